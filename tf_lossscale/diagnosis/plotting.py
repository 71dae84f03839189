"""Plots a precision report, and a training run. This module needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_lossscale.diagnosis.precision import (
    FINITE,
    INFINITE,
    LOWEST,
    MAXIMUM,
    NAN,
    NORMAL,
    SUBNORMAL,
    ZEROS,
    PrecisionReport,
    column,
    power,
)
from tf_lossscale.libraries import optional

# The ranges of float16 that a heat map marks: the exponent at which each range begins, and its label.
_RANGES = {SUBNORMAL - 1: "subnormal", NORMAL: "normal", MAXIMUM + 1: "overflow"}
# The width of the bins for zeros and for infinite values, in exponents.
_MARGIN = 3


def plot(
    reports: PrecisionReport | Sequence[PrecisionReport] = (), history: Mapping[str, Sequence[float]] | None = None
) -> Any:
    """Plot gradients by exponent against the range of float16, and the curves of a training run above them.

    >>> import tensorflow as tf
    >>> from tf_lossscale.diagnosis import precision_report
    >>> report = precision_report([tf.constant([2.0**-20, 0.0])], ["kernel"], scale=8)
    >>> figure = plot(report)
    >>> history = {"loss": [1.5, 1.4], "loss_scale": [32768.0, 16384.0], "skipped_steps": [0, 1]}
    >>> figure = plot([report], history)

    Args:
        reports: one precision report, to draw a heat map with a row for each variable; or the reports of several steps,
            to draw a heat map of all gradients over the steps.
        history: a dict of equally long lists, such as the `history` of the `History` object that `fit` returns. A panel
            is drawn for each list. `skipped_steps`, the number of steps skipped so far, is drawn as a cross where it
            grows. The values belong to the steps in `history["step"]`, or to the steps 1, 2, 3, ... without this key.

    Returns:
        A matplotlib `Figure`. Call its `savefig(path)` method to write it to a file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to plot.
    """
    history = history or {}
    curves = [name for name in history if name not in ("step", "skipped_steps")]
    one = reports if isinstance(reports, PrecisionReport) else None
    several = [] if isinstance(reports, PrecisionReport) else sorted(reports, key=lambda report: report.step)
    heights = [1.8] * len(curves)
    if one or several:
        heights.append(1.5 + 0.17 * max(8, len(one.rows) if one else 12))
    if not heights:
        raise ValueError("plot() needs a precision report, several of them, or a history, but got none of these.")
    figure = optional.load("matplotlib.figure", "plot").Figure(figsize=(8, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights, sharex=one is None)[:, 0]
    _draw_curves(axes, curves, history)
    if one:
        _draw_variables(figure, axes[-1], one)
    elif several:
        _draw_steps(figure, axes[-1], several)
    return figure


def _draw_curves(axes: Any, names: list[str], history: Mapping[str, Sequence[float]]) -> None:
    for axis, name in zip(axes, names):
        values = np.array(history[name], float)
        steps = np.array(history.get("step", np.arange(len(values)) + 1))
        axis.plot(steps, values, drawstyle="steps-post" if name == "loss_scale" else "default")
        if "skipped_steps" in history:
            skipped = np.diff(np.array(history["skipped_steps"]), prepend=0) > 0
            axis.plot(steps[skipped], values[skipped], "x", color="tab:red", label="skipped steps")
            if skipped.any():
                axis.legend()
        if name == "loss_scale":
            axis.set_yscale("log", base=2)
        axis.set(ylabel=name.replace("_", " "), xlabel="step" if axis is axes[-1] else "")
        axis.grid(alpha=0.3)


def _draw_variables(figure: Any, axis: Any, report: PrecisionReport) -> None:
    counts, names = report.counts.at(report.scale), report.counts.names
    positions, shares = _shares(counts.counts)
    mesh = axis.pcolormesh(positions, np.arange(len(names) + 1) - 0.5, shares, **_colours())
    # Matplotlib reads text between dollar signs as a formula.
    axis.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"exponent of the gradients of step {report.step} at the loss scale {power(report.scale)}")
    axis.set_xticks(*_ticks(positions))
    mark_ranges(axis)
    _colour_bar(figure, mesh, axis)


def mark_ranges(axis: Any) -> None:
    """Draw a line where each range of float16 begins on a horizontal axis of exponents, with its label above it."""
    for begin, label in _RANGES.items():
        axis.axvline(begin, color="black", linewidth=1)
        axis.annotate(label, (begin, 1), (2, 3), xycoords=("data", "axes fraction"), textcoords="offset points")


def _draw_steps(figure: Any, axis: Any, reports: list[PrecisionReport]) -> None:
    totals = [report.counts.at(report.scale).counts.sum(axis=0) for report in reports]
    positions, shares = _shares(np.array(totals))
    steps = [report.step for report in reports]
    middle = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    edges = [steps[0] - 0.5, *middle, steps[-1] + (steps[-1] - middle[-1] if middle else 0.5)]
    mesh = axis.pcolormesh(edges, positions, shares.T, **_colours())
    axis.set(xlabel="step", ylabel="exponent of the scaled gradients")
    axis.set_yticks(*_ticks(positions))
    for begin, label in _RANGES.items():
        axis.axhline(begin, color="black", linewidth=1)
        axis.annotate(label, (1, begin), (2, 3), xycoords=("axes fraction", "data"), textcoords="offset points")
    _colour_bar(figure, mesh, axis)


def _shares(counts: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the edges of the bins along the exponent axis, and the fraction of each row's values in each bin.

    The bins are the zeros, the exponents, and the infinite values together with the NaNs.
    """
    seen = (np.flatnonzero(counts[:, FINITE].sum(axis=0)) + LOWEST).tolist()
    low, high = min([SUBNORMAL - 7, *seen]), max([MAXIMUM + 6, *seen])
    bins = [counts[:, [ZEROS]], counts[:, column(low) : column(high) + 1], counts[:, [INFINITE]] + counts[:, [NAN]]]
    shares = np.hstack(bins) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return [low - _MARGIN, *range(low, high + 2), high + 1 + _MARGIN], np.where(shares > 0, shares, np.nan)


def _ticks(positions: list[int]) -> tuple[list[float], list[str]]:
    exponents = [each for each in positions[2:-2] if each % 8 == 0]
    places = [positions[0] + _MARGIN / 2, *exponents, positions[-1] - _MARGIN / 2]
    return places, ["zero", *map(str, exponents), "inf"]


def _colours() -> dict[str, Any]:
    # Fractions below 0.01% are drawn like 0.01%. Without rasterizing, an SVG file would take several megabytes.
    norm = optional.load("matplotlib.colors", "plot").LogNorm(1e-4, 1.0)
    return {"cmap": "viridis", "norm": norm, "rasterized": True}


def _colour_bar(figure: Any, mesh: Any, axis: Any) -> None:
    bar = figure.colorbar(mesh, ax=axis, location="bottom", aspect=50, pad=0.01, label="fraction of the values")
    bar.ax.set_xticks([1e-4, 1e-3, 1e-2, 1e-1, 1.0], ["0.01%", "0.1%", "1%", "10%", "100%"])
