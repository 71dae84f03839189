"""A run of `migrate --write` that is killed, and begun again."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from tf_lossscale import cli
from tf_lossscale.migrate.codemod import files, journal

OLD = "import tensorflow as tf\nopt = tf.keras.mixed_precision.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
NEW = "import tensorflow as tf\nimport tf_lossscale\nopt = tf_lossscale.LossScaleOptimizer(opt)\n"
# What `train.py` becomes depends on what `compat.py` was: read after it was written, `Scaler` would be another class.
SOURCES = {
    "package/compat.py": "from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer as Scaler\n",
    "package/left.py": "import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(opt, 1024)\n",
    "package/train.py": "from compat import Scaler\nopt = Scaler(opt, 'dynamic')\nopt.loss_scale()\n",
    "broken.py": "def (LossScale\n",
    "same.py": "x = 1\n",
    "book.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": OLD}], "nbformat": 4, "metadata": {}}),
}

# Forks a process for each run, which kills itself right before a given call of those that change files.
DRIVER = """
import contextlib, io, json, os, pathlib, shutil, signal, sys
from tf_lossscale import cli

folder, sources, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
cli.main(["migrate", os.devnull])  # the modules are imported before the first fork

def tree():
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}

def run(fatal):
    process = os.fork()
    if not process:
        calls = 0
        def killing(function):
            def call(*arguments, **keywords):
                nonlocal calls
                calls += 1
                if calls == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)
            return call
        for name in ("open", "fsync", "replace", "unlink"):
            setattr(os, name, killing(getattr(os, name)))
        with open(folder.parent / "out", "w") as out, open(folder.parent / "err", "w") as err:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(["migrate", "--write", "--jobs", "1", *options, str(folder)])
        os._exit(code)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        return None
    said = [(folder.parent / name).read_text() for name in ("out", "err")]
    return [os.WEXITSTATUS(status), *said, tree()]

def fresh():
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

fresh()
undisturbed = run(0)
points = 1
while True:
    fresh()
    if run(points) is not None:
        break
    again = points  # killed a few times more, each time earlier
    while (ended := run(again)) is None:
        again -= 4
    assert ended == undisturbed, points
    points += 1
print(json.dumps([points - 1, undisturbed]))
"""


def write(folder, sources):
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def migrate(*arguments):
    return cli.main(["migrate", *map(str, arguments)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_that_is_killed_and_begun_again_ends_as_one_that_is_not(tmp_path, options):
    command = [sys.executable, "-c", DRIVER, tmp_path / "src", json.dumps(SOURCES), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    points, (code, out, err, tree) = json.loads(done.stdout.splitlines()[-1])
    assert points >= 20
    assert code == 2  # of broken.py
    assert "broken.py" in err
    assert (json.loads(out)["summary"]["changed"] == 4) if options else out == ""
    assert sorted(tree) == sorted(SOURCES)
    assert tree["package/train.py"].splitlines()[1:] == ["opt = Scaler(opt)", "opt.loss_scale"]


class Killed(BaseException):
    pass


@pytest.fixture
def stopped(tmp_path, monkeypatch, capsys):
    """A folder of three files, of which a run that was stopped has changed the first."""
    write(tmp_path, {"a.py": OLD, "b.py": OLD + "opt._loss_scale = scale\n", "c.py": OLD})
    write_atomically, written = files.write_atomically, []

    def second_fails(path, content):
        if written:
            raise Killed
        written.append(path)
        write_atomically(path, content)

    with monkeypatch.context() as context:
        context.setattr(files, "write_atomically", second_fails)
        with pytest.raises(Killed):
            migrate("--write", tmp_path)
    capsys.readouterr()
    assert [(tmp_path / name).read_text() == NEW for name in ("a.py", "b.py", "c.py")] == [True, False, False]
    return tmp_path


def test_the_journal_is_for_its_owner_only_and_no_source(stopped):
    assert stat.S_IMODE((stopped / journal.NAME).stat().st_mode) == 0o600
    assert [os.path.basename(path) for path in files.find([str(stopped)])] == ["a.py", "b.py", "c.py"]


@pytest.mark.parametrize("option", ["--diff", "--check"])
def test_a_run_that_writes_nothing_leaves_the_journal_and_names_it(stopped, option, capsys):
    before = (stopped / journal.NAME).read_bytes()
    migrate(option, stopped)
    out, err = capsys.readouterr()
    assert f"{stopped / journal.NAME}. Repeat that run" in err
    assert "a.py" not in out
    assert (stopped / journal.NAME).read_bytes() == before


def test_other_files_stay_in_the_journal_until_a_run_reports_on_them(stopped, capsys):
    assert migrate("--write", "--json", stopped / "c.py") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["summary"]["changed"] == 1
    assert "Repeat that run" in err
    assert migrate("--write", "--json", stopped) == 0
    out, err = capsys.readouterr()
    assert [pathlib.Path(each["path"]).name for each in json.loads(out)["files"]] == ["a.py", "b.py"]
    assert "Repeat" not in err
    assert sorted(os.listdir(stopped)) == ["a.py", "b.py", "c.py"]


def test_a_moved_folder_takes_its_journal_along(stopped, capsys):
    moved = stopped.rename(stopped.with_name("moved"))
    assert migrate("--write", "--json", moved) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["changed"] == 3


def test_a_file_that_somebody_changed_in_between_is_reported_and_left(stopped, capsys):
    (stopped / "a.py").write_text("mine = 1\n")
    (stopped / "c.py").unlink()
    assert migrate("--write", "--json", stopped) == 2
    a, b = json.loads(capsys.readouterr().out)["files"]
    assert (a["status"], b["status"]) == ("error", "changed")
    assert "Run the command again" in a["error"]
    assert (stopped / "a.py").read_text() == "mine = 1\n"
    assert migrate("--write", stopped) == 0
    assert sorted(os.listdir(stopped)) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:-9], "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: '{"tf_lossscale": "0.1.0", "files": {"a.py": 1}}', "is damaged"),
        (lambda text: text.replace('{"tf_lossscale": "', '{"tf_lossscale": "9.'), "written by tf-lossscale 9."),
    ],
)
def test_a_journal_that_cannot_be_used_stops_the_run_before_it_changes_anything(stopped, damage, why, capsys):
    path = stopped / journal.NAME
    path.write_text(damage(path.read_text()))
    before = {each.name: each.read_bytes() for each in stopped.iterdir()}
    assert migrate("--write", stopped) == 2
    err = capsys.readouterr().err
    assert why in err
    assert f"{path}. Restore the files" in err
    assert {each.name: each.read_bytes() for each in stopped.iterdir()} == before


def test_where_no_journal_can_be_written_the_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    write(tmp_path, {"a.py": OLD})

    def fail(*paths):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(journal, "whole_file", fail)
    assert migrate("--write", tmp_path) == 0
    assert "no journal can be written: [Errno 13] Permission denied" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == NEW
    assert os.listdir(tmp_path) == ["a.py"]


def test_a_run_that_changes_nothing_writes_no_journal(tmp_path, monkeypatch):
    write(tmp_path, {"a.py": NEW})
    monkeypatch.setattr(journal, "whole_file", None)
    assert migrate("--write", tmp_path) == 0
