import importlib.util
import pathlib

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "lenet_mixed_precision.py"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_loss_falls_in_each_of_the_six_ways_at_its_precision_and_scale():
    spec = importlib.util.spec_from_file_location("lenet_mixed_precision", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    results = example.main(["--epochs", "2"])
    assert {name: half for name, (_, half, _) in results.items()} == {
        "level O2": 12,
        "level O3": 14,
        "one layer by hand": 1,
        "fixed manager": 12,
        "dynamic manager": 12,
        "cell of one's own": 12,
    }
    scales = {name: scale for name, (_, _, scale) in results.items()}
    assert (scales["level O3"], scales["one layer by hand"], scales["fixed manager"]) == (128.0, 1.0, 1024.0)
    for name, (losses, _, _) in results.items():
        assert losses[-1] < 0.7 * losses[0], name
