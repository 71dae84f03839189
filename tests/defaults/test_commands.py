"""Every command in a terminal of 80 columns, one after the other in one folder, with the defaults of its options."""

import os
import pathlib
import re
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests.defaults.seen import process, seen
from tests.test_cli import exit_code
from tf_lossscale import cli

ROOT = pathlib.Path(__file__).parents[2]

# Command -> lines to type, and what each prints. In this order: each uses what those before it left.
LINES = {
    # 300 steps, the default, take a minute.
    "train": [("train --steps 4", r"float16 with scaling: loss=\d\.\d+, scale=2\^\d+, skipped=\d+ 4/4 █")],
    "inspect": [("inspect runs", "written by  Keras 3"), ("inspect runs --json", "optimizers")],
    "probe": [("probe --out counts train32.py 3", "^Float16 fits with a loss scale: without one 100% of")],
    "plot": [
        ("plot logs", r"^drew logs/loss_scale\.png from 1 run: logs$"),
        ("plot counts", r"^drew counts/loss_scale_exponents\.png from 1 run: counts$"),
    ],
    "migrate": [
        ("migrate old.py", r"^\+opt = tf_lossscale\.LossScaleOptimizer\(sgd\)$"),
        ("migrate src", r"^would change +3$"),
        ("migrate src --check", r"^would change +3$"),
        ("migrate src --write", r"^changed +3$"),
    ],
    "run": [("run old.py", "^loss scale: 32768$"), ("run -m old", "^loss scale: 32768$")],
}
ORDER = ("train", "inspect", "probe", "plot", "run", "migrate")

OLD = """import tensorflow as tf

mixed_precision = tf.keras.mixed_precision.experimental
sgd = tf.keras.optimizers.SGD()
opt = mixed_precision.LossScaleOptimizer(sgd, "dynamic")
print("loss scale:", int(opt.loss_scale()))
"""

FLOAT32 = """import sys

import tensorflow as tf

optimizer, weight = tf.keras.optimizers.SGD(0.5), tf.Variable([1.0, 1.0], name="weight")
for _ in range(int(sys.argv[1])):
    optimizer.apply_gradients([(tf.constant([2.0**-30, 2.0**-20]), weight)])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an old script, three old modules, a float32 script and TensorBoard logs; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tf-lossscale"])
    (tmp_path / "src").mkdir()
    for name in ("old.py", "src/a.py", "src/b.py", "src/c.py"):
        (tmp_path / name).write_text(OLD)
    (tmp_path / "train32.py").write_text(FLOAT32)
    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD())
    with tf.summary.create_file_writer("logs").as_default():
        for step in range(3):
            tf_lossscale.write_summary(optimizer, step, 0.5)
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
