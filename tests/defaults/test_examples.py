"""Every example in a terminal of 80 columns, without arguments, in both Kerases."""

import os
import pathlib
import runpy
import sys

import pytest

from tests.defaults.seen import process, seen

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

# Example -> what the end of its output says.
ENDS = {
    "adafactor_digits": "Adam's would be",
    "custom_loop": "200 iterations",
    "distributed": "iterations",
    "gan": "mean distance from the circle",
    "lenet_mixed_precision": "cell of one's own",
    "variational_inference": "float16 with scaling",
}


def test_every_example_has_a_row():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ENDS)


def test_the_first_example_prints_its_lines_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["custom_loop.py"])
    with seen() as what:
        runpy.run_path(str(EXAMPLES / "custom_loop.py"), run_name="__main__")
    assert ENDS["custom_loop"] in what.text
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
