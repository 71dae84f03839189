"""Heat maps of gradients' exponents, for each variable and over the steps of a run. Float16's range is marked."""

from __future__ import annotations

import itertools
import math
import pathlib
import posixpath
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_lossscale.libraries import optional
from tf_lossscale.precision.counts import FINITE, HIGHEST, INFINITE, LOWEST, NAN, ZEROS, ExponentCounts
from tf_lossscale.precision.report import MAXIMUM, NORMAL, SUBNORMAL
from tf_lossscale.precision.report_text import power
from tf_lossscale.writing import whole_file

# The ranges that a heat map marks, each as (lowest exponent, label). Values below the first range round to zero in
# float16.
_RANGES = ((SUBNORMAL - 1, "sub-\nnormal"), (NORMAL, "normal"), (MAXIMUM + 1, "over-\nflow"))

# The lightness of this colour map increases steadily, so colour-blind people can read it.
_COLOURS = "viridis"

# The smallest fraction of values that has its own colour. Smaller fractions are drawn in this colour as well.
_SMALLEST_SHARE = 1e-4

# Sizes in inches: the height of a row, the width of a figure, and the maximum height of a figure.
_ROW, _WIDTH, _TALLEST = 0.17, 8.0, 80.0
_LONGEST_NAME = 34


def draw_variables(counts: ExponentCounts, out: pathlib.Path) -> None:
    """Draw the exponents of each variable's gradient before and after scaling. A failure leaves no partial file.

    Args:
        counts: the exponent counts of one step.
        out: the path of the PNG or SVG file.
    """
    rows = len(counts.names)
    height = min(1.6 + _ROW * max(rows, 4), _TALLEST)
    figure = _figure(_WIDTH, height)
    panels = [("before scaling", counts.at(1.0)), (f"after scaling by {power(counts.scale)}", counts)]
    if counts.scale == 1:
        panels = [("of the gradient", counts)]
    low, high = _range([each for _, each in panels])
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    edges = np.arange(rows + 1) - 0.5
    for axis, (title, each) in zip(axes, panels):
        positions, shares = _with_margins(_shares(each.counts), low, high)
        mesh = axis.pcolormesh(positions, edges, shares, **_colours())
        _mark_ranges(axis, low, high, along="x")
        axis.set_xlabel(f"exponent {title}")
    every = math.ceil(max(rows, 1) * _ROW / _TALLEST)
    common, names = _without_common_folder(counts.names)
    axes[0].set_yticks(range(0, rows, every), [escaped(_short(name)) for name in names[::every]])
    axes[0].set_ylim(max(rows, 1) - 0.5, -0.5)
    of = f", variables of {escaped(common)}" if common else ""
    figure.suptitle(f"gradients in step {counts.step}{of}", fontsize=10)
    colour_bar(figure, mesh, axes, "fraction of the variable's values")
    save(figure, out)


def draw_steps(run: Sequence[ExponentCounts], out: pathlib.Path) -> None:
    """Draw the distribution of all gradients' exponents in each step of a run. A failure leaves no partial file.

    Args:
        run: the exponent counts of at least one step.
        out: the path of the PNG or SVG file.
    """
    panels = [("before scaling", [counts.at(1.0) for counts in run]), ("after scaling", run)]
    if all(counts.scale == 1 for counts in run):
        panels = [("of the gradients", run)]
    figure = _figure(_WIDTH, 1.0 + 3 * len(panels))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, each) in zip(axes, panels):
        mesh = steps_on(axis, each)
        axis.set_ylabel(f"exponent {title}")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(optional.load("matplotlib.ticker", "plot").MaxNLocator(integer=True))
    colour_bar(figure, mesh, axes, "fraction of all values")
    save(figure, out)


def steps_on(axis: Any, run: Sequence[ExponentCounts]) -> Any:
    """Draw a heat map of the exponents of all gradients over the steps of a run, with float16's range marked.

    Args:
        axis: the matplotlib `Axes` to draw on.
        run: the exponent counts of at least one step.

    Returns:
        The matplotlib mesh, to pass to `colour_bar`.
    """
    low, high = _range(run)
    totals = np.concatenate([_shares(counts.counts.sum(axis=0, keepdims=True)) for counts in run])
    positions, shares = _with_margins(totals, low, high)
    mesh = axis.pcolormesh(_edges([counts.step for counts in run]), positions, shares.T, **_colours())
    _mark_ranges(axis, low, high, along="y")
    return mesh


def colour_bar(figure: Any, mesh: Any, axes: Any, label: str) -> None:
    """Draw a colour bar below the axes. It shows which fraction of the values each colour stands for.

    Args:
        figure: the matplotlib figure.
        mesh: the matplotlib mesh of one of the heat maps.
        axes: all axes of the figure.
        label: the label of the colour bar.
    """
    bar = figure.colorbar(mesh, ax=list(axes), location="bottom", aspect=50, pad=0.01, label=label, extend="min")
    bar.ax.set_xticks([1e-4, 1e-3, 1e-2, 1e-1, 1.0], ["0.01%", "0.1%", "1%", "10%", "100%"])


def save(figure: Any, out: pathlib.Path, dpi: int = 100) -> None:
    """Write a figure to a file. A failure leaves no partial file.

    An SVG file contains no date, so the same figure always produces the same file.

    Args:
        figure: the matplotlib figure.
        out: the path of the PNG or SVG file.
        dpi: the resolution of a PNG file, in pixels per inch.
    """
    with whole_file(out) as temporary:
        figure.savefig(temporary, dpi=dpi, **({"metadata": {"Date": None}} if out.suffix == ".svg" else {}))


def escaped(name: str) -> str:
    r"""Return a name in a form that matplotlib draws unchanged.

    Matplotlib reads text between dollar signs as a formula, and leaves labels that begin with an underscore out of a
    legend.

    >>> escaped("kernel"), escaped("_run")
    ('kernel', ' _run')

    Args:
        name: the name of a variable or of a run.
    """
    return " " * name.startswith("_") + name.replace("$", r"\$")


def _figure(width: float, height: float) -> Any:
    return optional.load("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def _colours() -> dict[str, Any]:
    norm = optional.load("matplotlib.colors", "plot").LogNorm(_SMALLEST_SHARE, 1.0)
    # Without rasterizing, an SVG file would take several megabytes.
    return {"cmap": _COLOURS, "norm": norm, "rasterized": True}


def _range(run: Sequence[ExponentCounts]) -> tuple[int, int]:
    """Return the range of exponents to draw: all exponents that occur, and float16's range with a margin."""
    values = np.concatenate([counts.counts[:, FINITE] for counts in run])
    around = [SUBNORMAL - 7, MAXIMUM + 6, *(np.flatnonzero(values.sum(axis=0)) + LOWEST).tolist()]
    return max(min(around), LOWEST), min(max(around), HIGHEST)


def _shares(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def _with_margins(shares: np.ndarray, low: int, high: int) -> tuple[list[int], np.ndarray]:
    """Return the bin edges along the exponent axis, and the fraction of values in each bin.

    The bins are the zeros, a gap, the exponents, another gap, and the infinite values together with the NaNs.
    """
    edges = [low - 4, low - 1, *range(low, high + 2), high + 2, high + 5]
    bins = shares[:, FINITE][:, low - LOWEST : high + 1 - LOWEST]
    gap = np.zeros([len(shares), 1])
    drawn = np.hstack([shares[:, [ZEROS]], gap, bins, gap, shares[:, [INFINITE]] + shares[:, [NAN]]])
    return edges, np.where(drawn > 0, drawn, np.nan)


def _mark_ranges(axis: Any, low: int, high: int, along: str) -> None:
    """Mark float16's ranges with lines, label the ranges next to the axis, and label the ticks with exponents."""
    stroke = optional.load("matplotlib.patheffects", "plot").withStroke(linewidth=3, foreground="white")
    line = axis.axvline if along == "x" else axis.axhline
    begins = [low, *(begin for begin, _ in _RANGES), high + 1]
    for begin in begins[1:-1]:
        line(begin, color="black", linewidth=1, path_effects=[stroke])
    for name, begin, end in zip(("vanish", *(name for _, name in _RANGES)), begins, begins[1:]):
        middle = (begin + end) / 2
        if along == "x":
            where = {"xy": (middle, 1), "xycoords": ("data", "axes fraction"), "xytext": (0, 4), "ha": "center"}
            # The first range is narrow, so its label is aligned to the right to keep it away from the next label.
            if begin == low:
                where |= {"xy": (end - 1, 1), "ha": "right"}
        else:
            where = {"xy": (1, middle), "xycoords": ("axes fraction", "data"), "xytext": (4, 0), "va": "center"}
            name = name.replace("-\n", "")
        axis.annotate(name, textcoords="offset points", fontsize=8, **where)
    ticks = [exponent for exponent in range(LOWEST, HIGHEST, 8) if low + 3 <= exponent <= high - 1]
    set_ticks = axis.set_xticks if along == "x" else axis.set_yticks
    set_ticks([low - 2.5, *ticks, high + 3.5], ["zero", *map(str, ticks), "inf"])


def _edges(steps: Sequence[int]) -> list[float]:
    """Return the heat map's column edges. Inner edges are halfway between steps; the first edge is at least 0.5.

    >>> _edges([1, 11, 21])
    [0.5, 6.0, 16.0, 26.0]
    """
    middle = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    before = steps[0] - (middle[0] - steps[0] if middle else 0.5)
    after = steps[-1] + (steps[-1] - middle[-1] if middle else 0.5)
    return [max(before, 0.5), *middle, after]


def _without_common_folder(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split the paths of variables into the prefix that all of them share, and the rest of each path.

    >>> _without_common_folder(["model/dense/kernel", "model/dense/bias"])
    ('model/dense/', ['kernel', 'bias'])
    >>> _without_common_folder(["kernel"])
    ('', ['kernel'])
    """
    common = posixpath.commonpath([name.rpartition("/")[0] for name in names] or [""])
    common = f"{common}/" if common else ""
    return common, [name.removeprefix(common) for name in names]


def _short(name: str) -> str:
    """Shorten a name to at most 34 characters by leaving out its middle.

    >>> _short("sequential/transformer/block_11/attention/query/kernel")
    'sequential/trans…ion/query/kernel'
    """
    half = (_LONGEST_NAME - 1) // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"
