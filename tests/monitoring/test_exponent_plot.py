"""Counts of exponents in a run's file, and the pictures that `tf-lossscale plot` draws of them."""

import re
import struct

import numpy as np
import pytest

from tests.monitoring.test_monitoring import scalars
from tests.precision.made import counted, run, write
from tf_lossscale import cli
from tf_lossscale.monitoring import exponent_plot
from tf_lossscale.precision import records


def plot(folder, *arguments):
    return cli.main(["plot", str(folder), *arguments])


def size(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_a_damaged_file_is_named(tmp_path, capsys):
    (tmp_path / records.FILE).write_text("{\n")
    assert plot(tmp_path) == 2
    assert "Line 1 of" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_variables_and_steps_beside_the_scale(suffix, tmp_path, capsys):
    scalars(tmp_path / "logs")
    write(tmp_path / "logs", [100, 200])
    out = tmp_path / f"run.{suffix}"
    assert plot(tmp_path / "logs", "--out", str(out)) == 0
    names = ["run", "run_exponents", "run_exponents_by_step"]
    assert capsys.readouterr().out == "".join(f"drew {tmp_path / name}.{suffix} from 1 run: logs\n" for name in names)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", *sorted(f"{name}.{suffix}" for name in names)]
    if suffix == "png":
        assert all(size(tmp_path / f"{name}.png")[0] == 800 for name in names[1:])


def test_without_a_loss_scale_the_exponents_are_drawn_alone(tmp_path):
    write(tmp_path, [1], scale=1.0)
    assert plot(tmp_path) == 0
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [
        "loss_scale_exponents.png",
        "loss_scale_exponents_by_step.png",
    ]


def test_a_run_of_an_older_version_is_drawn_as_before(tmp_path, capsys):
    scalars(tmp_path)
    assert plot(tmp_path) == 0
    assert capsys.readouterr().out == f"drew {tmp_path / 'loss_scale.png'} from 1 run: {tmp_path.name}\n"
    assert [p.name for p in tmp_path.glob("*.png")] == ["loss_scale.png"]


def test_each_run_has_pictures_of_its_own(tmp_path):
    write(tmp_path / "a", [1])
    write(tmp_path / "b" / "c", [1])
    assert plot(tmp_path) == 0
    assert len(list(tmp_path.glob("loss_scale_exponents_a*.png"))) == 2
    assert len(list(tmp_path.glob("loss_scale_exponents_b_c*.png"))) == 2


def test_names_that_matplotlib_would_change_are_drawn_as_they_are(tmp_path):
    folder = tmp_path / "_$run$"
    scalars(folder)
    records.append(folder, counted({"$\\kernel$/a": [1.0], "$\\kernel$/_b": [2.0]}, step=1))
    assert plot(folder, "--out", str(tmp_path / "run.svg")) == 0
    drawn = (tmp_path / "run.svg").read_text() + (tmp_path / "run_exponents.svg").read_text()
    for text in (" _$run$", ", variables of $\\kernel$/", " _b"):
        assert f"{text} -->" in drawn


def test_runs_with_the_same_picture_are_named(tmp_path, capsys):
    write(tmp_path / "a" / "b", [1])
    write(tmp_path / "a_b", [1])
    assert plot(tmp_path) == 2
    assert "a/b and a_b, would be drawn to the same file loss_scale_exponents_a_b.png" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_no_picture_is_drawn_if_one_is_there(tmp_path, capsys):
    scalars(tmp_path)
    write(tmp_path, [1])
    kept = tmp_path / "loss_scale_exponents_by_step.png"
    kept.write_text("kept")
    assert plot(tmp_path) == 2
    assert f"{kept} exists" in capsys.readouterr().err
    assert [p.name for p in tmp_path.glob("*.png")] == [kept.name]
    assert plot(tmp_path, "--force") == 0
    assert kept.read_bytes().startswith(b"\x89PNG")


def test_the_last_counted_step_is_drawn_or_a_chosen_one(tmp_path, capsys):
    write(tmp_path, range(100, 2100, 100))
    assert plot(tmp_path, "--out", str(tmp_path / "last.svg")) == 0
    assert "gradients in step 2000" in (tmp_path / "last_exponents.svg").read_text()
    assert plot(tmp_path, "--out", str(tmp_path / "chosen.svg"), "--step", "300") == 0
    assert "gradients in step 300" in (tmp_path / "chosen_exponents.svg").read_text()
    assert plot(tmp_path, "--step", "7") == 2
    error = capsys.readouterr().err
    assert "--step 7: this step has no exponent counts. Steps with counts: 100, 200, 300, 400, 500, ..., 1600," in error
    scalars(tmp_path / "old")
    assert plot(tmp_path / "old", "--step", "7") == 2
    assert "has no exponents.jsonl" in capsys.readouterr().err


def texts(svg):
    """The texts that matplotlib wrote beside their shapes into an SVG."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def test_both_sides_of_the_scale_and_the_ranges_of_float16_are_named(tmp_path):
    exponent_plot.draw_variables(run([100])[0], tmp_path / "variables.svg")
    shown = texts(tmp_path / "variables.svg")
    assert {"exponent before scaling", "exponent after scaling by 2**10", "vanish", "normal", "zero", "inf"} <= set(
        shown
    )
    assert "gradients in step 100, variables of model/dense/" in shown
    assert {"kernel", "bias"} <= set(shown)
    exponent_plot.draw_steps(run([100, 200]), tmp_path / "steps.svg")
    assert {"exponent before scaling", "exponent after scaling", "subnormal", "overflow"} <= set(
        texts(tmp_path / "steps.svg")
    )


def test_unscaled_gradients_have_one_panel(tmp_path):
    exponent_plot.draw_variables(run([1], scale=1.0)[0], tmp_path / "variables.svg")
    assert "exponent of the gradient" in texts(tmp_path / "variables.svg")
    assert "exponent before scaling" not in texts(tmp_path / "variables.svg")


def test_many_variables_with_long_names_have_a_row_each(tmp_path):
    names = [f"model/{'nested/' * 9}block_{i}/{'attention_' * 3}kernel" for i in range(80)]
    (counts,) = run([100], names=names)
    exponent_plot.draw_variables(counts, tmp_path / "many.png")
    width, height = size(tmp_path / "many.png")
    assert width == 800
    assert height > 80 * 15, "pixels for a line of text"
    exponent_plot.draw_variables(counts, tmp_path / "many.svg")
    shown = [text for text in texts(tmp_path / "many.svg") if text.startswith("block_")]
    assert len(shown) == len(set(shown)) == 80
    assert max(map(len, shown)) <= 34


@pytest.mark.parametrize("gradients", [{}, {"kernel": []}, {"kernel": [0.0]}, {"kernel": [np.inf]}])
def test_counts_without_values_are_drawn_too(gradients, tmp_path):
    exponent_plot.draw_variables(counted(gradients), tmp_path / "variables.png")
    exponent_plot.draw_steps([counted(gradients)], tmp_path / "steps.png")
    assert size(tmp_path / "variables.png")[0] == size(tmp_path / "steps.png")[0] == 800


def test_a_row_of_the_picture_is_the_shares_of_a_variable():
    counts = counted({"kernel": [0.0, 0.0, 2.0**-20, 2.0**-20, 1.0, 2.0**20, np.inf, np.nan]})
    edges, shares = exponent_plot._with_margins(exponent_plot._shares(counts.counts), -31, 21)
    drawn = {edge: share for edge, share in zip(edges, shares[0]) if share == share}
    assert drawn == {-35: 0.25, -20: 0.25, 0: 0.125, 20: 0.125, 23: 0.25}
