"""tf-lossscale run: a program runs as python runs it, with the old names in place."""

import os
import pathlib
import sys
import textwrap

import pytest

from tests import old_programs
from tests.processes import call

PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "tf_lossscale.cli", "run"]


# Old programs. --------------------------------------------------------------------------------------------------------


def test_every_old_script_is_in_the_table():
    assert {path.name for path in old_programs.FOLDER.glob("*.py")} == set(old_programs.SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", old_programs.SCRIPTS)
def test_an_old_script_runs_unchanged(name, tmp_path):
    old_programs.prints_what_it_did(name, [*RUN, old_programs.FOLDER / name], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["experimental_keras_tf22.py", "custom_loop_tf24.py"])
def test_an_old_script_runs_unchanged_with_keras_2(name, tmp_path):
    command = [*RUN, old_programs.FOLDER / name]
    old_programs.prints_what_it_did(name, command, tmp_path, TF_USE_LEGACY_KERAS="1")


@pytest.mark.slow
def test_the_start_file_of_the_docs_puts_keras_2_in_the_place_of_keras(tmp_path):
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "clients.md").read_text()
    start = page.partition("$ cat start.py\n")[2].partition("\n$ ")[0]
    (tmp_path / "start.py").write_text(start)
    (tmp_path / "train.py").write_text(
        "import sys\nfrom keras.src.engine import keras_tensor\nimport keras, tensorflow as tf\n"
        "tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), 'dynamic')\n"
        "print(keras.__name__, sys.argv[1:])\n"
    )
    done = call([*RUN, tmp_path / "start.py", tmp_path / "train.py", "--epochs", "3"], TF_USE_LEGACY_KERAS="1")
    assert done.stdout == "tf_keras ['--epochs', '3']\n", done.stderr[-2000:]


# As python does it. ---------------------------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import neighbour

    print(__name__, __file__, __spec__ is None, sys.argv, sys.path[0] == neighbour.where)
    print(sorted(name for name in globals() if not name.startswith("__")))
    if "fail" in sys.argv:
        raise ValueError("böse")
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("import os\nwhere = os.path.dirname(os.path.abspath(__file__))\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(__name__, __package__, sys.argv[1:])\nfrom . import nothing\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["program.py", "--help", "-m", "x", "--", "-1", "a b"],
        ["program.py", "fail"],
        ["-m", "program", "--help", "fail"],
        ["-m", "package", "-m", "x"],
        ["-m", "program", "--data", "x", "--", "--epochs", "3"],
        ["-m", "--", "program"],
        ["--", "program.py"],
        ["missing.py"],
        ["-m", "no_such_module"],
    ],
    ids=" ".join,
)
def test_a_program_runs_and_fails_as_under_python(program, arguments):
    plain, ours = (call([*command, *arguments], cwd=program) for command in (PYTHON, RUN))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert plain.stdout or plain.returncode


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_without_a_program_run_says_how_to_call_it(program, arguments):
    ours = call([*RUN, *arguments], cwd=program)
    assert ours.returncode == 2
    assert ours.stderr == (
        "tf-lossscale run: nothing to run. Call tf-lossscale run SCRIPT [ARG ...] or run -m MODULE [ARG ...].\n"
    )


@pytest.mark.slow
def test_processes_that_multiprocessing_spawns_have_the_old_names_too(tmp_path):
    program = """
    import multiprocessing
    import tensorflow as tf

    Old = tf.keras.mixed_precision.experimental.LossScaleOptimizer

    def work(number):
        return f"{Old.__module__} {number}"

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [1, 2]))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = call([*RUN, "program.py"], tmp_path, PYTHONPATH=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['tf_lossscale.legacy.experimental 1', 'tf_lossscale.legacy.experimental 2']\n"


@pytest.mark.parametrize("has_package", [True, False], ids=["same Python", "Python without the package"])
def test_a_process_that_the_program_starts_has_the_old_names_and_no_trace_of_how(tmp_path, has_package):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "sitecustomize.py").write_text("import sys\nsys.its_own = True\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tf_lossscale.py").write_text("raise ImportError\n")
    (tmp_path / "child.py").write_text(
        "import sys\n"
        "holders = getattr(sys.modules.get('tf_lossscale.legacy.install'), '_names', None)\n"
        "print(holders and holders._holders, sys.its_own, sys.modules['sitecustomize'].__file__)\n"
        "print([path for path in sys.path if 'startup' in path])\n"
    )
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys\n"
        "first, *others = os.environ['PYTHONPATH'].split(os.pathsep)\n"
        "os.environ['PYTHONPATH'] = os.pathsep.join([first, *sys.argv[1:], *others])\n"
        "subprocess.run([sys.executable, 'child.py'])\n"
    )
    path = os.pathsep.join([str(tmp_path / "environment"), os.getcwd()])
    done = call([*RUN, "program.py", *([] if has_package else [tmp_path / "other"])], tmp_path, PYTHONPATH=path)
    own = tmp_path / "environment" / "sitecustomize.py"
    assert done.stdout == f"{ {'install'} if has_package else None } True {own}\n[]\n", done.stderr
    assert not done.stderr
