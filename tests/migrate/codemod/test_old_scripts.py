"""Programs as each generation's documentation taught them, rewritten, do what they do when run unchanged."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.migrate.codemod import case_files
from tf_lossscale.legacy.table import OF_COMPILED

HERE = pathlib.Path(__file__).parents[2] / "old_scripts"
ARGUMENTS = {"graph_session_tf115": ["40", "{out}"], "custom_loop_tf24": ["{out}"], "graph_keras_tf215": ["{out}"]}
OF_KERAS_2 = {"graph_keras_tf215"}
# compile() is given a bare optimizer, and the program asks for what only the old class has.
NEEDS_A_WRAPPER = {"experimental_keras_tf22"}
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py"))


def migrated(name):
    return case_files.migrate_files(frozenset({("script.py", (HERE / f"{name}.py").read_text())}))["script.py"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left_to_people_but_what_compile_wraps(name):
    findings = migrated(name).findings
    assert not [f for f in findings if f.kind == "todo"]
    assert any(f.reason == OF_COMPILED.advice for f in findings) == (name in NEEDS_A_WRAPPER)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS_A_WRAPPER])
def test_the_rewritten_script_prints_what_the_old_one_prints(name, tmp_path):
    (tmp_path / "new.py").write_bytes(migrated(name).source)

    def output(*command):
        arguments = [part.format(out=tmp_path / f"out{len(command)}") for part in ARGUMENTS.get(name, [])]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        if name in OF_KERAS_2:
            environment["TF_USE_LEGACY_KERAS"] = "1"
        done = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    new = output(str(tmp_path / "new.py"))
    assert new
    assert new == output("-m", "tf_lossscale.cli", "run", str(HERE / f"{name}.py"))
