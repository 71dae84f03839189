"""The examples run as they are, shortened."""

import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from tests.processes import call

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def main_of(example):
    return runpy.run_path(str(EXAMPLES / f"{example}.py"))["main"]


@pytest.mark.slow
def test_a_custom_loop_lowers_a_scale_that_is_too_high_and_learns(capsys):
    assert main_of("custom_loop")(["--steps", "100"]) > 0.6
    printed = capsys.readouterr().out
    assert "step    0" in printed
    assert "skipped, loss scale is now 2**23" in printed
    assert "100 iterations" in printed


def demo():
    pytest.importorskip("sklearn")
    return runpy.run_path(str(EXAMPLES / "float16_demo.py"))


@pytest.mark.exhaustive  # `make demo` runs in a slow test
def test_the_demo_compares_the_three_runs_and_draws_the_last(tmp_path, capsys):
    demo()["main"](["--steps", "60", "--out", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["test", "accuracy", "skipped", "steps", "zero", "gradients"]
    rows = {line[:24].strip(): [float(cell.rstrip("%")) for cell in line[24:].split()] for line in printed[1:4]}
    accuracy, skipped, zeros = zip(*(rows[n] for n in ("float32", "float16 without scaling", "float16 with scaling")))
    assert accuracy[1] < 30 < 60 < accuracy[2]
    assert abs(accuracy[2] - accuracy[0]) < 10
    assert skipped[0] == skipped[1] == 0
    assert zeros[1] > 50
    assert abs(zeros[2] - zeros[0]) < 5
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_demo_prints_the_table_of_the_readme(tmp_path, capsys):
    """Processors add float16 numbers in different orders, so percentages may differ by two points."""
    demo()["main"](["--out", str(tmp_path)])
    printed = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[1:4]]
    readme = (EXAMPLES.parent / "README.md").read_text()
    for name, accuracy, skipped, zeros in printed:
        of_readme = re.search(rf"^\| {name} \| (.*)% \| {skipped} \| (.*)% \|$", readme, re.MULTILINE)
        for text, percentage in zip(of_readme.groups(), (accuracy, zeros)):
            assert abs(float(text) - float(percentage.rstrip("%"))) <= 2.0, printed


@pytest.mark.slow
def test_make_demo_prints_the_table_and_the_progress_bars_alone(tmp_path):
    pytest.importorskip("sklearn")
    command = ["-m", "tools.quietly", "examples/float16_demo.py", "--steps", "20", "--out", str(tmp_path)]
    ran = subprocess.run([sys.executable, *command], cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) == 5
    assert [line for line in re.split(r"[\r\n]+", ran.stderr) if line.strip() and "/20 [" not in line] == []


@pytest.mark.slow
def test_the_demo_resumes_bit_for_bit_after_ctrl_c(tmp_path):
    train = demo()["train"]
    globals_ = train.__globals__
    training, _ = globals_["digits"]()

    def run(folder, resume=False):
        # The first two steps overflow.
        globals_["RUNS"]["few"] = ("mixed_float16", {"initial_scale": 2.0**60, "dynamic_growth_steps": 3})
        return train("few", training, 6, tmp_path / folder, resume)

    whole, expected, _ = run("whole")
    batches = globals_["batches"]

    def interrupted(*arguments):
        for i, batch in enumerate(batches(*arguments)):
            if i == 4:
                raise KeyboardInterrupt
            yield batch

    globals_["batches"] = interrupted
    with pytest.raises(SystemExit, match=r"Stopped after 4 of 6 steps\. To continue, add --resume"):
        run("interrupted")
    globals_["batches"] = batches
    resumed, values, reports = run("interrupted", resume=True)
    assert [report.step for report in reports] == [5]
    for name in expected:
        np.testing.assert_array_equal(values[name], expected[name])
    for a, b in zip(resumed.trainable_variables, whole.trainable_variables):
        np.testing.assert_array_equal(a, b)
    again = run("interrupted", resume=True)
    assert again[2] == [], "a finished run takes no step"


@pytest.mark.slow
def test_variational_inference_in_float16_needs_the_scale(capsys):
    accuracies = main_of("variational_inference")(["--steps", "100"])
    assert abs(accuracies["float16 with scaling"] - accuracies["float32"]) < 0.02
    assert accuracies["float16 with scaling"] > 0.6
    assert accuracies["float16 without scaling"] < 0.2
    assert capsys.readouterr().out.count("deviations  accuracy") == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_workers_of_which_one_dies_end_as_two_devices_of_one_process():
    def run(*arguments):
        command = [sys.executable, EXAMPLES / "distributed.py", "--steps", "30", *arguments]
        done = call(command, CUDA_VISIBLE_DEVICES="-1", PYTHONPATH=str(EXAMPLES.parent))
        assert done.returncode == 0, done.stdout + done.stderr[-5000:]
        return done.stdout

    alone, together = run(), run("--workers", "2")
    assert "this process: step   0" in alone
    (end,) = re.findall(r"this process: (accuracy .*)", alone)
    assert re.fullmatch(r"accuracy \d\d\.\d%, loss scale 2\*\*\d\d, counter \d+, \d+ iterations", end)
    assert "worker 1: dies before step 25\n" in together
    for worker in (0, 1):
        seen = [line.partition(": ")[2] for line in together.splitlines() if line.startswith(f"worker {worker}: ")]
        assert seen[0].endswith("skipped, loss scale 2**23")
        assert sum(line.startswith("goes on after step 20, loss scale 2**") for line in seen) == 1
        # What it had learned, and its scale and counter, were not lost: sums are rounded alike for two replicas.
        assert seen[-1].partition(", ")[2] == end.partition(", ")[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_adafactor_in_float16_learns_the_digits_with_little_state(capsys):
    accuracy, optimizer = main_of("adafactor_digits")(["--epochs", "3"])
    assert accuracy > 0.8
    assert int(optimizer.skipped_steps) > 0
    printed = capsys.readouterr().out
    assert "Adafactor's state      5,668 bytes" in printed
    assert "Adam's would be      615,004 bytes" in printed


@pytest.mark.slow
def test_a_gan_with_one_scale_skips_both_networks_together(capsys):
    main_of("gan")(["--steps", "20"])
    skipped = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "steps skipped" in line]
    assert len(skipped) == 2
    assert skipped[0] == skipped[1]
    assert int(skipped[0].split()[0]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["shared", "separate"])
def test_a_gan_learns(scales):
    assert main_of("gan")(["--steps", "800", "--scales", scales]) < 0.3
