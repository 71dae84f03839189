"""The examples run as they are, shortened."""

import pathlib
import runpy

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_a_custom_loop_lowers_a_scale_that_is_too_high_and_learns(capsys):
    main = runpy.run_path(str(EXAMPLES / "custom_loop.py"))["main"]
    assert main(["--steps", "60"]) > 0.6
    printed = capsys.readouterr().out
    assert "step    0" in printed
    assert "skipped, loss scale is now 2**23" in printed
    assert "60 iterations" in printed


def test_variational_inference_in_float16_needs_the_scale(capsys):
    main = runpy.run_path(str(EXAMPLES / "variational_inference.py"))["main"]
    accuracies = main(["--steps", "100"])
    assert abs(accuracies["float16 with scaling"] - accuracies["float32"]) < 0.02
    assert accuracies["float16 with scaling"] > 0.6
    assert accuracies["float16 without scaling"] < 0.2
    assert capsys.readouterr().out.count("deviations  accuracy") == 3
