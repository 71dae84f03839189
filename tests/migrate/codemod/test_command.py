"""The subcommand, as it is called."""

import pathlib
import subprocess
import sys

import pytest

from tf_lossscale import cli
from tf_lossscale.migrate.codemod import files

OLD = "import tensorflow as tf\nopt = tf.keras.mixed_precision.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
NEW = "import tensorflow as tf\nimport tf_lossscale\nopt = tf_lossscale.LossScaleOptimizer(opt)\n"
LEFT = "import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(opt, 1024)\n"
CLEAN = "x = 1\n"


class Killed(BaseException):
    """Ends the command as a signal does."""


@pytest.fixture
def file(tmp_path):
    def written(content, name="train.py"):
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return written


def run(*arguments):
    return cli.main(["migrate", *arguments])


def test_the_diff_is_the_default_and_can_be_applied(file, capsys):
    path = file(OLD)
    assert run(path) == 0
    patch = capsys.readouterr().out
    assert patch.startswith(f"--- a{path}\n+++ b{path}\n")
    assert pathlib.Path(path).read_text() == OLD
    subprocess.run(["patch", "-p1", "-d", "/"], input=patch, text=True, check=True, capture_output=True)
    assert pathlib.Path(path).read_text() == NEW
    assert run(path) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("content", "code"), [(OLD, 1), (LEFT, 1), (NEW, 0), (CLEAN, 0), ("def (LossScale", 2)])
def test_check_says_whether_anything_is_left_to_do(file, content, code):
    path = file(content)
    assert run(path, "--check") == code
    assert pathlib.Path(path).read_text() == content


def test_check_still_fails_for_what_was_left_with_a_comment(file, capsys):
    path = file(LEFT)
    assert run(path, "--write") == 0
    assert f"{path}:2:7: todo:" in capsys.readouterr().err
    assert "# TODO(tf-lossscale): " in pathlib.Path(path).read_text()
    assert run(path, "--check") == 1


def test_a_run_that_is_killed_has_told_everything_and_leaves_each_file_old_or_new(file, tmp_path, capsys, monkeypatch):
    old = OLD + "opt._loss_scale = scale\n"
    paths = [pathlib.Path(file(old, name)) for name in ("a.py", "b.py", "c.py")]
    assert run(str(tmp_path)) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if ": notice: " in line]
    assert told
    write = files._write

    def second_fails(changed):
        if changed.path == str(paths[1]):
            raise Killed
        write(changed)

    with monkeypatch.context() as context:
        context.setattr(files, "_write", second_fails)
        with pytest.raises(Killed):
            run("--write", str(tmp_path))
    assert [line for line in capsys.readouterr().err.splitlines() if ": notice: " in line] == told
    new = NEW + "opt._loss_scale = scale\n"
    assert [path.read_text() for path in paths] == [new, old, old]
    assert sorted(tmp_path.iterdir()) == paths
    assert run("--write", str(tmp_path)) == 0
    assert [path.read_text() for path in paths] == [new, new, new]
    out, err = capsys.readouterr()
    assert out == ""
    assert "\nchanged  " in err


def test_control_characters_of_a_path_or_a_source_are_printed_as_text(file, tmp_path, capsys):
    evil = "\x1b[2J\x9b\u202e"
    file(OLD + f"'{evil}'\r\n# a\rb = 1\n", f"a{evil}\nfaked line.py"), file(f"{LEFT}'{evil}'", f"b{evil}.py")
    file(f"LossScaleOptimizer('{evil}' ", f"c{evil}\nfaked line.py")
    for more in ((), ("--write",)):
        assert run(str(tmp_path), *more) == 2
        out, err = capsys.readouterr()
        assert not {"\x1b", "\x9b"} & {*out, *err} and "\r" not in out.replace("\r\n", "")
        assert not [line for line in (out + err).splitlines() if line.startswith("faked line")]
        assert more or (r"+++ b" in out and r"a\x1b[2J\x9b\u202e\nfaked line.py" in out)


def test_a_missing_path_is_exit_code_2_and_named(capsys):
    assert run("/nowhere/at/all") == 2
    assert "/nowhere/at/all" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x.py", "--write", "--check"]])
def test_bad_arguments_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_no_tensorflow_is_loaded(file):
    code = f"""
import sys
from tf_lossscale import cli
assert cli.main(["migrate", {file(OLD)!r}]) == 0
assert not {{"tensorflow", "keras", "tf_keras"}} & {{name.split(".")[0] for name in sys.modules}}
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
