"""Every command in a terminal of 80 columns, one after the other in one folder, with the defaults of its options."""

import os
import re
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests.terminal.seen import process, seen
from tests.test_cli import exit_code
from tf_lossscale import cli

# Command -> lines to type, and what each prints. In this order: each uses what those before it left.
LINES = {
    "inspect": [("inspect runs", "written by  Keras 3"), ("inspect runs --json", "optimizers")],
    "migrate": [
        ("migrate old.py", r"^\+mixed_precision = tf_lossscale\.legacy\.experimental$"),
        ("migrate src", r"^would change +3$"),
        ("migrate src --check", r"^would change +3$"),
        ("migrate src --write", r"^changed +3$"),
    ],
    "run": [("run old.py", "^loss scale: 32768$"), ("run -m old", "^loss scale: 32768$")],
}
ORDER = ("inspect", "run", "migrate")

OLD = """import tensorflow as tf

mixed_precision = tf.keras.mixed_precision.experimental
sgd = tf.keras.optimizers.SGD()
opt = mixed_precision.LossScaleOptimizer(sgd, "dynamic")
print("loss scale:", int(opt.loss_scale()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an old script, three old modules and a checkpoint; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tf-lossscale"])
    (tmp_path / "src").mkdir()
    for name in ("old.py", "src/a.py", "src/b.py", "src/c.py"):
        (tmp_path / name).write_text(OLD)
    optimizer, weight = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam()), tf.Variable(1.0, name="weight")
    optimizer.minimize(lambda: weight**2, [weight])
    checkpoint = tf.train.Checkpoint(weight=weight, optimizer=optimizer)
    tf.train.CheckpointManager(checkpoint, "runs", max_to_keep=1).save()
    return tmp_path


def test_every_command_has_a_line():
    assert set(LINES) == set(ORDER) == set(cli._COMMANDS)


def test_a_command_prints_what_fits_a_terminal_and_nothing_else(folder):
    # `run` replaces the process, so it is only in the next test.
    for line, expected in (pair for command in ORDER if command != "run" for pair in LINES[command]):
        with seen() as what:
            code = exit_code(line.split())
        assert code == int("--check" in line), (line, what.text)
        assert any(re.search(expected, shown) for shown, _ in what.lines), (line, what.text)
        assert what.faults() == [], line


@pytest.mark.slow
def test_a_command_in_a_process_of_its_own_prints_the_same(folder):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    for line, expected in (pair for command in ORDER for pair in LINES[command][:1]):
        code, what = process([sys.executable, "-m", "tf_lossscale.cli", *line.split()], folder, environment)
        assert code == 0, (line, what.text)
        assert any(re.search(expected, shown) for shown, _ in what.lines), (line, what.text)
        assert what.faults() == [], line
