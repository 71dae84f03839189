"""The main job, as a user runs it."""

import contextlib
import fcntl
import importlib
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import tensorflow as tf

from tests.test_cli import exit_code
from tf_lossscale.training import progress

TRAIN = [sys.executable, "-m", "tf_lossscale.cli", "train"]


def state_of(folder):
    return json.loads((folder / "state.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one step. Tests that change it copy it first."""
    out = tmp_path_factory.mktemp("finished")
    assert exit_code(["train", "--steps", "1", "--no-compare", "--out", str(out)]) == 0
    return out


@pytest.fixture
def out(finished, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.slow
def test_it_compares_the_three_runs_and_plots(tmp_path, capsys):
    assert exit_code(["train", "--steps", "60", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = {}
    for line in printed.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 3:
            rows[name] = [float(cell.rstrip("%")) for cell in cells]
    accuracy, skipped, zeros = zip(*(rows[n] for n in ("float32", "float16 without scaling", "float16 with scaling")))
    assert accuracy[1] < 30 < 60 < accuracy[2]
    assert abs(accuracy[2] - accuracy[0]) < 10
    assert skipped[0] == skipped[1] == 0
    assert skipped[2] == sum(record[2] for record in state_of(tmp_path)["history"])
    assert zeros[1] > 80
    assert abs(zeros[2] - zeros[0]) < 5
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_other_optimizers_learn_too(tmp_path, optimizer):
    arguments = ["train", "--optimizer", optimizer, "--steps", "60", "--out", str(tmp_path), "--no-compare"]
    assert exit_code(arguments) == 0
    history = state_of(tmp_path)["history"]
    assert history[-1][0] < 0.7 * history[0][0]


def test_by_default_it_writes_into_runs_where_tensorflow_and_the_other_commands_find_the_checkpoint(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["train", "--steps", "1", "--no-compare"]) == 0
    printed = capsys.readouterr()
    assert "deprecat" not in printed.err
    latest = tf.train.latest_checkpoint("runs/checkpoint")
    assert latest == "runs/checkpoint/ckpt-1"
    assert tf.train.list_variables(latest)
    assert exit_code(["inspect", "runs"]) == 0
    assert capsys.readouterr().err == ""


def test_a_log_file_gets_ten_lines_of_a_run_and_no_bar(capsys):
    with progress.shown("float16", 0, 300) as report:
        for i in range(300):
            report(f"loss={i}, scale=2^30, skipped=0")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "float16: 30/300 loss=29, scale=2^30, skipped=0"
    assert lines[-1].startswith("float16: 300/300 ")


def read_all(terminal):
    """Read what was written to a terminal until its other side was closed."""
    printed = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(terminal, 65536):
            printed += part
    os.close(terminal)
    return printed


def test_a_terminal_of_80_columns_shows_loss_scale_and_skipped_steps(monkeypatch):
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress.shown("float16 with scaling", 0, 300) as report:
            for _ in range(300):
                report("loss=2.301, scale=2^30, skipped=12")
        monkeypatch.undo()
    printed = read_all(ours).decode()
    drawn = [line for line in re.split("[\r\n]+", printed) if "300/300" in line]
    assert drawn
    for line in drawn:
        assert line.startswith("float16 with scaling: loss=2.301, scale=2^30, skipped=12 300/300 ")
        assert len(line) <= 80


@pytest.mark.slow
def test_the_bar_of_a_real_terminal_fits_and_nothing_foreign_is_printed(tmp_path):
    command = [*TRAIN, "--steps", "3", "--no-compare"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, command, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    printed = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(terminal, 65536):
            printed += part
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, printed
    lines = re.split("[\r\n]+", printed.decode())
    drawn = [line for line in lines if "3/3" in line]
    assert drawn
    assert all("scale=2^30, skipped=0" in line and len(line) <= 80 for line in drawn)
    assert "deprecated" not in printed.decode()


@pytest.mark.parametrize("module", ["matplotlib.figure", "rich.console", "sklearn.datasets", "tqdm"])
def test_a_missing_library_is_said_before_the_training_as_the_readme_installs_it(module, tmp_path, monkeypatch, capsys):
    load = importlib.import_module

    def without(name):
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return load(name)

    monkeypatch.setattr("tf_lossscale.libraries.optional.importlib.import_module", without)
    assert exit_code(["train", "--steps", "1", "--no-compare", "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(
        f"tf-lossscale train: This feature needs {module.partition('.')[0]}, which is not installed."
    )
    assert line.endswith(" pip install '.[train]'")
    assert not (tmp_path / "out").exists()


def test_a_scale_that_overflows_is_lowered_and_no_number_of_a_run_without_a_step_is_made_up(tmp_path, capsys):
    arguments = ["train", "--steps", "2", "--initial-scale", "1e30", "--no-compare", "--out", str(tmp_path)]
    assert exit_code(arguments) == 0
    assert "no step taken" in capsys.readouterr().out
    assert [record[2] for record in state_of(tmp_path)["history"]] == [True, True]
    assert state_of(tmp_path)["loss_scale"] == pytest.approx(2.5e29)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on_as_if_nothing_had_happened(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--steps", "150", "--growth-steps", "10", "--no-compare"]
    subprocess.run([*TRAIN, *options, "--out", whole], check=True, capture_output=True)

    running = subprocess.Popen([*TRAIN, *options, "--out", cut], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = b""
    deadline = time.monotonic() + 1200
    while b"/150" not in seen.split(b"0/150")[-1] and time.monotonic() < deadline:
        seen += running.stderr.read(1)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=1200)
    assert running.returncode == 130, out
    stopped = state_of(cut)
    assert 0 < len(stopped["history"]) < 150
    assert b"--resume" in out

    resumed = subprocess.run([*TRAIN, "--resume", "--no-compare", "--out", cut], check=True, capture_output=True)
    assert f"loss scale {stopped['loss_scale']:g} and counter {stopped['counter']}" in resumed.stdout.decode()
    assert state_of(cut)["history"] == state_of(whole)["history"]
    for name in ("loss_scale", "counter"):
        assert state_of(cut)[name] == state_of(whole)[name]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "0"], "--steps: must be a whole number that is at least 1, but got: 0"),
        (["--steps", "1.5"], "--steps: must be a whole number that is at least 1, but got: 1.5"),
        (["--seed", "-1"], "--seed: must be a whole number that is at least 0, but got: -1"),
        (["--loss-weight", "0"], "--loss-weight: must be a number above 0, but got: 0"),
        (["--initial-scale", "nan"], "--initial-scale: must be a number above 0, but got: nan"),
        (["--initial-scale", "1e39"], "initial_scale"),
        (["--optimizer", "none"], "--optimizer: invalid choice: 'none'"),
        (["--resume"], "nothing to resume"),
        (["--resume", "--steps", "3", "--growth-steps", "3"], "Leave out: --steps, --growth-steps."),
    ],
)
def test_bad_options_exit_with_2_and_say_why_and_write_nothing(tmp_path, capsys, arguments, text):
    assert exit_code(["train", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder in which not even root can write")
def test_a_folder_that_cannot_be_written_is_said_before_the_training(capsys):
    assert exit_code(["train", "--steps", "1", "--no-compare", "--out", "/proc/self"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tf-lossscale train: ")
    assert "/proc/self" in captured.err
    assert "step/s" not in captured.err


def test_a_stopped_run_is_not_replaced_without_a_word(out, capsys):
    arguments = ["train", "--steps", "1", "--no-compare", "--out", str(out)]
    assert exit_code(arguments) == 0
    assert "holds a run" not in capsys.readouterr().out
    assert state_of(out)["checkpoint"] == "ckpt-2"
    stopped = state_of(out)
    stopped["settings"]["steps"] = 3
    (out / "state.json").write_text(json.dumps(stopped))
    assert exit_code(arguments) == 0
    assert "holds a run that was stopped after 1 of 3 steps" in capsys.readouterr().out
    assert state_of(out)["settings"]["steps"] == 1


def test_the_exponents_of_the_gradients_are_saved_and_a_run_of_an_older_version_is_resumed_without(out):
    (record,) = state_of(out)["exponents"]
    assert (record["step"], record["scale"], len(record["variables"])) == (1, 2.0**30, 10)
    older = state_of(out)
    del older["exponents"]
    (out / "state.json").write_text(json.dumps(older))
    (out / "training.png").unlink()
    assert exit_code(["train", "--resume", "--no-compare", "--out", str(out)]) == 0
    assert (out / "training.png").exists()
    resumed = state_of(out)
    resumed["settings"]["steps"] = 6
    (out / "state.json").write_text(json.dumps(resumed))
    assert exit_code(["train", "--resume", "--no-compare", "--out", str(out)]) == 0
    assert [record["step"] for record in state_of(out)["exponents"]] == [6]


NO_CHECKPOINT = '{"settings": {}, "history": []}'


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"settings": {"lr": 1}, "history": []}', NO_CHECKPOINT])
def test_a_damaged_state_is_said_and_left_as_it_is(tmp_path, capsys, state):
    (tmp_path / "state.json").write_text(state)
    assert exit_code(["train", "--resume", "--out", str(tmp_path)]) == 2
    assert "is damaged, or was not written by tf-lossscale train" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_missing_checkpoint_is_said(out, capsys):
    for path in (out / "checkpoint").iterdir():
        path.unlink()
    assert exit_code(["train", "--resume", "--out", str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err


class Killed(BaseException):
    """What a process that is killed does not survive."""


def full_disk(monkeypatch, times):
    """Lets that many checkpoints fail as on a full disk, with half of the data written; returns the attempts."""
    attempts, write = [], tf.train.Checkpoint.write

    def fail(checkpoint, prefix):
        attempts.append(prefix)
        if len(attempts) > times:
            return write(checkpoint, prefix)
        pathlib.Path(prefix + "_temp").mkdir()
        pathlib.Path(prefix + ".data-00000-of-00001").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(
            None, None, f"{{{{node}}}} {prefix}; No space left on device [Op:SaveV2]"
        )

    monkeypatch.setattr(tf.train.Checkpoint, "write", fail)
    return attempts


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, capsys, monkeypatch):
    arguments = ["train", "--steps", "1", "--no-compare", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        attempts = full_disk(patch, times=2)
        assert exit_code(arguments) == 2
        assert len(attempts) == 2
    printed = capsys.readouterr()
    assert "(" + attempts[0] + "; No space left on device)" in printed.err
    assert f"There is no complete checkpoint in {tmp_path}." in printed.err
    assert "float16 with scaling" in printed.out
    assert not list((tmp_path / "checkpoint").iterdir())


def test_where_no_checkpoint_can_be_written_the_last_whole_one_is_named_and_kept(out, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    full_disk(monkeypatch, times=2)
    assert exit_code(["train", "--steps", "1", "--no-compare", "--out", str(out)]) == 2
    whole = out / "checkpoint" / "ckpt-1"
    assert f"The last complete checkpoint is {whole}, after 1 of 1 steps: --resume" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_only_for_a_while_loses_nothing(tmp_path, capsys, monkeypatch):
    full_disk(monkeypatch, times=1)
    assert exit_code(["train", "--steps", "2", "--no-compare", "--out", str(tmp_path)]) == 0
    assert "will try again when it ends" in capsys.readouterr().err
    assert len(state_of(tmp_path)["history"]) == 2
    assert exit_code(["train", "--resume", "--no-compare", "--out", str(tmp_path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["json.dumps", "os.replace", "name_latest_checkpoint", "_delete"])
def test_a_run_killed_twice_at_any_moment_of_saving_can_be_resumed(tmp_path, monkeypatch, moment):
    def die(*args, **kwargs):
        raise Killed

    resume = ["train", "--resume", "--no-compare", "--out", str(tmp_path)]
    assert exit_code(["train", "--steps", "2", *resume[2:]]) == 0
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(f"tf_lossscale.training.saved.{moment}" if moment != "os.replace" else moment, die)
            patch.setattr("tf_lossscale.training.saved.make_ready", lambda out: None)
            with pytest.raises(Killed):
                exit_code(resume)
    named = tf.train.latest_checkpoint(str(tmp_path / "checkpoint"))
    assert tf.train.list_variables(named)
    assert exit_code(resume) == 0
    kept = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    last = state_of(tmp_path)["checkpoint"]
    assert kept == ["checkpoint", f"{last}.data-00000-of-00001", f"{last}.index"]


def _a_file(out):
    out.write_text("mine")


def _below_a_file(out):
    out.parent.rmdir()
    out.parent.write_text("mine")


def _a_link_that_leads_nowhere(out):
    out.symlink_to(out.parent / "nowhere" / "at all")


def _with_a_file_for_the_checkpoints(out):
    out.mkdir()
    (out / "checkpoint").write_text("mine")


def _with_a_folder_for_the_state(out):
    (out / "state.json").mkdir(parents=True)


@pytest.mark.parametrize(
    "wrong",
    [
        _a_file,
        _below_a_file,
        _a_link_that_leads_nowhere,
        _with_a_file_for_the_checkpoints,
        _with_a_folder_for_the_state,
    ],
)
def test_a_place_that_cannot_hold_a_run_is_said_before_the_training(tmp_path, capsys, wrong):
    out = tmp_path / "below" / "out"
    out.parent.mkdir()
    wrong(out)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert exit_code(["train", "--steps", "1", "--no-compare", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tf-lossscale train: ")
    assert str(out.parent) in error
    assert "step/s" not in error
    assert before == sorted(path for path in tmp_path.rglob("*") if path.is_file())
