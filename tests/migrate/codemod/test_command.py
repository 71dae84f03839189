"""The subcommand, as it is called."""

import json
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale import cli
from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import files, names

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


def test_the_diff_is_the_default_and_can_be_applied(file, tmp_path, capsys):
    path = file(OLD)
    assert run(path) == 0
    patch = capsys.readouterr().out
    assert patch.startswith(f"--- a{path}\n+++ b{path}\n")
    assert pathlib.Path(path).read_text() == OLD
    subprocess.run(["patch", "-p1", "-d", "/"], input=patch, text=True, check=True, capture_output=True)
    assert pathlib.Path(path).read_text() == NEW
    assert run(path, "--diff") == 0
    assert capsys.readouterr().out == ""


def test_write_changes_the_file_and_says_how_much(file, capsys):
    path = file(OLD)
    assert run(path, "--write") == 0
    assert pathlib.Path(path).read_text() == NEW
    out, err = capsys.readouterr()
    assert out == ""
    assert "changed" in err


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


def test_json_is_one_document_with_what_the_documentation_promises(file, tmp_path, capsys):
    file(OLD), file(LEFT, "left.py"), file(CLEAN, "clean.py"), file("def (LossScale", "broken.py")
    assert run(str(tmp_path), "--json") == 2
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == 1
    assert report["written"] is False
    assert report["summary"] == {
        "files": 4,
        "changed": 2,
        "unchanged": 1,
        "error": 1,
        "rewritten": 1,
        "todo": 1,
        "notice": 0,
    }
    assert [each["path"].rsplit("/", 1)[1] for each in report["files"]] == ["broken.py", "left.py", "train.py"]
    broken, left, train = report["files"]
    assert "does not parse" in broken["error"]
    assert left["findings"][0]["kind"] == "todo"
    assert train["findings"] == [
        {
            "line": 2,
            "column": 6,
            "kind": "rewritten",
            "old": "tf.keras.mixed_precision.experimental.LossScaleOptimizer(opt, 'dynamic')",
            "new": "tf_lossscale.LossScaleOptimizer(opt)",
            "reason": None,
        }
    ]


def test_who_is_killed_while_writing_was_told_everything_before(file, tmp_path, capsys, monkeypatch):
    file(OLD, "a.py"), file(OLD + "opt._loss_scale = scale\n", "b.py")
    assert run(str(tmp_path)) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if ": notice: " in line]
    assert told

    def killed(path, content):
        raise Killed

    monkeypatch.setattr(files, "write_atomically", killed)
    with pytest.raises(Killed):
        run("--write", str(tmp_path))
    assert [line for line in capsys.readouterr().err.splitlines() if ": notice: " in line] == told


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
print([name for name in sys.modules if name.split(".")[0] in ("tensorflow", "keras", "tf_keras")])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_new_names_exist():
    wanted = (
        {old.new for old in table.OLD.values()}
        | set(table.WRAPPERS_WITH_OLD_ARGUMENTS.values())
        | set(table.MODULES.values())
    )
    for dotted in sorted(wanted | {names.HELPER, names.EXPERIMENTAL}):
        root, *rest = dotted.split(".")
        found = {"tf_lossscale": tf_lossscale, "keras": tf.keras}[root]
        for part in rest:
            found = getattr(found, part)


def test_a_run_that_is_killed_leaves_each_file_old_or_new(file, tmp_path, monkeypatch):
    paths = [file(OLD, name) for name in ("a.py", "b.py", "c.py")]
    write_atomically = files.write_atomically

    def second_fails(path, content):
        if path == paths[1]:
            raise Killed
        write_atomically(path, content)

    with monkeypatch.context() as context:
        context.setattr(files, "write_atomically", second_fails)
        with pytest.raises(Killed):
            run("--write", str(tmp_path))
    assert [pathlib.Path(path).read_text() for path in paths] == [NEW, OLD, OLD]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py", "c.py"]
    assert run("--write", str(tmp_path)) == 0
    assert [pathlib.Path(path).read_text() for path in paths] == [NEW, NEW, NEW]
