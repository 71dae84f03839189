import importlib.util
import pathlib

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "lenet_mixed_precision.py"


@pytest.mark.slow
def test_the_loss_falls_in_each_of_the_six_ways():
    spec = importlib.util.spec_from_file_location("lenet_mixed_precision", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main(["--epochs", "2"])
    assert len(losses) == 6
    for name, (first, last) in losses.items():
        assert last < 0.7 * first, name
