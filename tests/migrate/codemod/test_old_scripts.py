"""Programs as each generation's documentation taught them, rewritten, print what they print when run unchanged."""

import sys

import pytest

from tests import old_programs
from tests.migrate.codemod import case_files
from tf_lossscale.legacy.table import OF_COMPILED

# compile() is given a bare optimizer, and the program asks for what only the old class has.
NEEDS_A_WRAPPER = {"experimental_keras_tf22.py"}


def migrated(name):
    return case_files.migrate_files(frozenset({("script.py", (old_programs.FOLDER / name).read_text())}))["script.py"]


@pytest.mark.parametrize("name", old_programs.SCRIPTS)
def test_nothing_is_left_to_people_but_what_compile_wraps(name):
    findings = migrated(name).findings
    assert not [f for f in findings if f.kind == "todo"]
    assert any(f.reason == OF_COMPILED.advice for f in findings) == (name in NEEDS_A_WRAPPER)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in old_programs.SCRIPTS if name not in NEEDS_A_WRAPPER])
def test_the_rewritten_script_prints_what_the_old_one_prints(name, tmp_path):
    (tmp_path / "new.py").write_bytes(migrated(name).source)
    old_programs.prints_what_it_did(name, [sys.executable, tmp_path / "new.py"], tmp_path)
