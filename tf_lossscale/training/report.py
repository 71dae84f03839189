"""The report at the end of `tf-lossscale train`: a table of the runs, and a plot."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_lossscale.libraries import optional
from tf_lossscale.monitoring import exponent_plot
from tf_lossscale.precision.counts import ExponentCounts
from tf_lossscale.training.lenet import Record, Run
from tf_lossscale.training.settings import Settings


def print_table(runs: Sequence[Run], test: Any, settings: Settings) -> None:
    """Print a row for each run: test accuracy, skipped steps, and the fraction of zeros in the gradients.

    The fraction of zeros is the mean over the steps that were not skipped.

    Args:
        runs: the finished runs.
        test: the test images and their labels.
        settings: the settings that all runs share.
    """
    table = optional.load("rich.table", "train").Table(
        title=f"LeNet-5, {settings.optimizer}, {settings.steps} steps, seed {settings.seed}, "
        f"loss x {settings.loss_weight:g}"
    )
    for name in ("", "test accuracy", "skipped steps", "zero gradients"):
        table.add_column(name, justify="right" if name else "left")
    for run in runs:
        taken = [record.zeros for record in run.history if not record.skipped]
        zeros = f"{np.mean(taken):.1%}" if taken else "no step taken"
        table.add_row(run.setup.name, f"{run.accuracy(test):.1%}", str(run.skipped), zeros)
    optional.load("rich.console", "train").Console().print(table)


def plot(history: Sequence[Record], exponents: Sequence[ExponentCounts], path: pathlib.Path) -> None:
    """Plot the loss, the loss scale and the gradients' exponents over the steps, and mark the skipped steps.

    >>> import os, tempfile
    >>> history = [Record(2.5, 1024.0, True, 0.0), Record(2.0, 512.0, False, 0.0)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot(history, [], pathlib.Path(folder) / "training.png")
    ...     os.listdir(folder)
    ['training.png']

    Args:
        history: a record for each step.
        exponents: the exponent counts of the scaled gradients, counted every few steps. The list is empty if the run
            was saved by an older version.
        path: the PNG file to write.
    """
    counted = bool(exponents)
    figure = optional.load("matplotlib.figure", "train").Figure(figsize=(8, 5 + 3.5 * counted), layout="constrained")
    steps = np.arange(1, len(history) + 1)
    loss = np.array([record.loss for record in history])
    scale = np.array([record.scale for record in history])
    skipped = np.flatnonzero([record.skipped for record in history])
    above, below, *heat = figure.subplots(2 + counted, sharex=True, height_ratios=[1, 1, 1.7][: 2 + counted])
    above.plot(steps, loss, color="tab:blue", linewidth=1)
    above.set_ylabel("loss")
    below.step(steps, scale, where="post", color="tab:orange")
    below.set_yscale("log", base=2)
    below.set_ylabel("loss scale")
    for axes, values in ((above, loss), (below, scale)):
        axes.plot(steps[skipped], values[skipped], "x", color="tab:red", label=f"{len(skipped)} skipped steps")
        axes.grid(alpha=0.3)
    # The loss falls during training, so the upper right corner of its plot has room for the legend.
    above.legend(loc="upper right")
    for axes in heat:
        exponent_plot.colour_bar(
            figure, exponent_plot.steps_on(axes, exponents), [above, below, axes], "fraction of all values"
        )
        axes.set_ylabel("exponent of the scaled gradients")
    [above, below, *heat][-1].set_xlabel("step")
    exponent_plot.save(figure, path)
