"""The picture of a precision report, and the picture of a run."""

import sys

import numpy as np
import pytest

from tests.diagnosis.made import counted
from tf_lossscale.diagnosis import PrecisionReport, plot

VALUES = np.random.default_rng(0).normal(size=400) * 2.0 ** np.arange(-40, 0).repeat(10)


def report(names=("kernel", "bias"), step=1, values=VALUES, scale=2.0**10):
    return PrecisionReport(counted(dict.fromkeys(names, values), scale, step))


def drawn(axis):
    """The fractions that a heat map draws. NaN is drawn as nothing."""
    return np.array(axis.collections[0].get_array())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_report_is_drawn_with_a_row_for_each_variable_by_name(suffix, tmp_path):
    figure = plot(report(["a$_1$", "_b"]))
    axis, bar = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [r"a\$_1\$", "_b"]
    assert len(drawn(axis)) == 2
    assert np.nansum(drawn(axis)) == pytest.approx(2)
    assert "step 1 at the loss scale 2**10" in axis.get_xlabel()
    assert bar.get_xlabel() == "fraction of the values"
    figure.savefig(tmp_path / f"report.{suffix}")


def test_a_report_is_drawn_at_its_own_scale():
    zeros, infinite = 0, -1
    low, high = (drawn(plot(report(["kernel"]).at(scale)).axes[0])[0] for scale in (2.0**-30, 2.0**60))
    assert np.isnan([low[zeros], low[infinite]]).all()
    assert np.argmax(np.nan_to_num(low)) < np.argmax(np.nan_to_num(high))


def test_zeros_infinities_and_values_beyond_every_range_have_places():
    values = [0.0, np.inf, np.nan, 1e-30, 1e30]
    fractions = drawn(plot(report(["kernel"], values=np.array(values), scale=1.0)).axes[0])[0]
    assert fractions[[0, 1, -2, -1]].tolist() == [0.2, 0.2, 0.2, 0.4]


def test_reports_of_several_steps_are_drawn_by_step_under_the_curves():
    history = {"loss": [3.0, 2.0, 1.0], "loss_scale": [8.0, 8.0, 4.0], "skipped_steps": [0, 1, 1]}
    loss, scale, heat, _ = plot([report(step=3), report(step=1)], history).axes
    assert loss.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert loss.lines[1].get_xydata().tolist() == [[2, 2]], "the skipped step"
    assert scale.lines[1].get_xydata().tolist() == [[2, 8]]
    assert scale.get_yscale() == "log"
    assert heat.collections[0].get_coordinates()[0, :, 0].tolist() == [0.5, 2, 4]


def test_a_history_has_steps_of_its_own_and_needs_no_report():
    (axis,) = plot(history={"step": [10, 20], "loss": [3.0, 2.0]}).axes
    assert axis.lines[0].get_xdata().tolist() == [10, 20]
    assert axis.get_legend() is None


def test_the_history_of_fit_is_drawn_above_a_report_with_axes_of_its_own():
    loss, heat, _ = plot(report(), {"loss": [3.0, 2.0]}).axes
    assert loss.get_xlim()[0] > 0 > heat.get_xlim()[0]


def test_nothing_to_plot_and_a_missing_library_are_errors(monkeypatch):
    for nothing in ((), ([], {})):
        with pytest.raises(ValueError, match=r"^plot\(\) needs a precision report, several of them, or a history"):
            plot(*nothing)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        plot(report())
