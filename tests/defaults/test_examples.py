"""Every example in a terminal of 80 columns, without arguments, in both Kerases."""

import os
import pathlib
import runpy
import sys

import pytest
import tensorflow as tf

from tests.defaults.seen import process, seen
from tests.families import FAMILIES, NoKeras3, tf_keras

pytestmark = pytest.mark.wide("what the examples print in a terminal")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

# Example -> what the end of its output says.
ENDS = {
    "adafactor_digits": "Adam's would be",
    "custom_loop": "200 iterations",
    "distributed": "iterations",
    "float16_demo": "exponents are drawn in runs/training.png",
    "gan": "mean distance from the circle",
    "lenet_mixed_precision": "cell of one's own",
    "variational_inference": "float16 with scaling",
}


def test_every_example_has_a_row():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ENDS)


# Examples that take seconds, with these arguments.
QUICK = {"adafactor_digits": ["--epochs", "1"], "custom_loop": []}


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("example", QUICK)
def test_a_quick_example_prints_its_lines_and_nothing_else(example, library, monkeypatch):
    monkeypatch.setattr(tf, "keras", FAMILIES[0].keras if library == "keras" else tf_keras)
    if isinstance(tf.keras, NoKeras3):
        pytest.skip("TensorFlow 2.15: Keras 2 alone")
    monkeypatch.setattr(sys, "argv", [example, *QUICK[example]])
    with seen() as what:
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert ENDS[example] in what.text
    assert what.faults() == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("legacy_keras", ["0", "1"], ids=["keras3", "tf_keras"])
@pytest.mark.parametrize("example", ENDS)
def test_an_example_in_a_process_of_its_own_prints_its_lines_and_nothing_else(example, legacy_keras, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {"TF_USE_LEGACY_KERAS": legacy_keras, "PYTHONPATH": str(EXAMPLES.parent)}
    code, what = process([sys.executable, EXAMPLES / f"{example}.py"], tmp_path, environment)
    assert code == 0, what.text
    assert ENDS[example] in what.text
    assert what.faults() == []
