"""The `tf-lossscale plot` subcommand, which plots the loss scale, the loss, skipped steps and gradients' exponents."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from tf_lossscale.libraries import optional
from tf_lossscale.monitoring.exponent_plot import draw_steps, draw_variables, escaped, save
from tf_lossscale.precision import records
from tf_lossscale.precision.counts import ExponentCounts

# Maps the tag of each plotted scalar to the label of its axis.
_LABELS = {"loss_scale": "loss scale", "loss": "loss", "skipped_steps": "total skipped steps"}
Series = list[tuple[int, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tf-lossscale plot`.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["logs"]).logdir.name
    'logs'

    Args:
        parser: the parser of the subcommand.
    """
    what = "folder with TensorBoard's event files, or with the exponents.jsonl of LossScaleMonitor or probe"
    parser.add_argument("logdir", type=pathlib.Path, metavar="LOGDIR", help=what)
    what = (
        "picture to write, .png or .svg (default: LOGDIR/loss_scale.png); the pictures of exponents are written to the "
        "same folder, as loss_scale_exponents.png and loss_scale_exponents_by_step.png"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help=what)
    what = "step whose exponents are drawn (default: the last step with counts)"
    parser.add_argument("--step", type=int, metavar="N", help=what)
    parser.add_argument("--force", action="store_true", help="overwrite existing pictures")


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale plot`.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code, 0.

    Raises:
        ImportError: an optional library is missing.
        OSError: a file cannot be read or written.
        ValueError: the folder contains nothing to plot, or a picture already exists and `--force` is not set.
    """
    out = arguments.out or arguments.logdir / "loss_scale.png"
    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out must end in .png or .svg, but got: {out}.")
    for folder in (arguments.logdir, out.parent):
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise NotADirectoryError(f"{folder} {problem}. Pass a folder.")
    # Reading the event files takes a while, so check for matplotlib first.
    optional.load("matplotlib.figure", "plot")
    pictures = _pictures(arguments.logdir, out, arguments.step)
    for path in pictures:
        if path.exists() and not arguments.force:
            raise ValueError(f"{path} exists. Choose another --out, or add --force to overwrite it.")
    for path, (draw_it, runs) in pictures.items():
        draw_it(path)
        print(f"drew {path} from {len(runs)} run{'s' * (len(runs) > 1)}: {', '.join(runs)}")
    return 0


def _pictures(
    logdir: pathlib.Path, out: pathlib.Path, step: int | None
) -> dict[pathlib.Path, tuple[Callable[[pathlib.Path], None], list[str]]]:
    """Return a dict that maps each picture's path to its drawing function and the names of its runs."""
    runs, counted = read(logdir), _counted(logdir)
    if not runs and not counted:
        raise ValueError(
            f"{logdir} has no event file with a loss scale. Write one with "
            "tf_lossscale.LossScaleMonitor(log_dir=...) or tf_lossscale.write_summary(optimizer)."
        )
    if step is not None and not counted:
        raise ValueError(f"--step selects a step with exponent counts, but {logdir} has no {records.FILE}.")
    pictures: dict[pathlib.Path, tuple[Callable[[pathlib.Path], None], list[str]]] = {}
    if runs:
        pictures[out] = functools.partial(draw, runs), list(runs)
    for name, run in counted.items():
        of = f"{out.stem}_exponents" + f"_{name.replace(os.sep, '_')}" * (len(counted) > 1)
        chosen = _chosen(run, step)
        drawn = {"": functools.partial(draw_variables, chosen), "_by_step": functools.partial(draw_steps, run)}
        for what, draw_it in drawn.items():
            path = out.with_name(f"{of}{what}{out.suffix}")
            if path in pictures:
                raise ValueError(
                    f"Two runs in {logdir}, {pictures[path][1][0]} and {name}, would be drawn to the same file "
                    f"{path.name}. Plot each run's folder separately, or rename one of them."
                )
            pictures[path] = draw_it, [name]
    return pictures


def _counted(logdir: pathlib.Path) -> dict[str, list[ExponentCounts]]:
    """Return a dict that maps the names of runs to their exponent counts. Runs without counts are left out."""
    paths = sorted(path.parent for path in logdir.rglob(records.FILE))
    counts = {_name_of(path, logdir): records.read(path) for path in paths}
    return {name: run for name, run in counts.items() if run}


def _chosen(run: list[ExponentCounts], step: int | None) -> ExponentCounts:
    for counts in run:
        if counts.step == step:
            return counts
    if step is None:
        return run[-1]
    counted = [str(counts.step) for counts in run]
    some = ", ".join(counted if len(counted) <= 10 else [*counted[:5], "...", *counted[-5:]])
    raise ValueError(f"--step {step}: this step has no exponent counts. Steps with counts: {some}.")


def _name_of(folder: pathlib.Path, logdir: pathlib.Path) -> str:
    return str(folder.relative_to(logdir)) if folder != logdir else logdir.name


def read(logdir: pathlib.Path) -> dict[str, dict[str, Series]]:
    """Read the loss scale, the loss and the number of skipped steps from the event files of a folder.

    Args:
        logdir: the folder. Event files in its subfolders are read as well.

    Returns:
        A dict with an entry for each run that logged a loss scale. The key is the run's name. The value is a dict that
        maps `loss_scale`, `loss` and `skipped_steps` to lists of (step, value) pairs, ordered by step. If a run was
        resumed from an earlier step, the values that it had logged after this step are left out.
    """
    runs: dict[str, dict[str, Series]] = {}
    for path in sorted(logdir.rglob("*.tfevents.*"), key=_by_folder_and_age):
        for kind, step, value in _scalars(path):
            series = runs.setdefault(_name_of(path.parent, logdir), {kind: [] for kind in _LABELS})[kind]
            while series and series[-1][0] >= step:
                series.pop()
            series.append((step, value))
    return {name: run for name, run in runs.items() if run["loss_scale"]}


def _by_folder_and_age(path: pathlib.Path) -> tuple[pathlib.Path, list[int]]:
    # The name of an event file contains the second of its creation, the number of the process and a count of the
    # process's files.
    return path.parent, [int(number) for number in re.findall(r"\d+", path.name)]


def draw(runs: dict[str, dict[str, Series]], out: pathlib.Path) -> None:
    """Draw the curves of all runs in one figure. A failure leaves no partial file.

    Args:
        runs: the return value of `read`.
        out: the path of the PNG or SVG file.
    """
    figure = optional.load("matplotlib.figure", "plot").Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    for (kind, label), axis in zip(_LABELS.items(), axes):
        for name, run in runs.items():
            steps, values = zip(*run[kind]) if run[kind] else ((), ())
            drawn: Any = axis.plot(
                steps, values, label=escaped(name), drawstyle="default" if kind == "loss" else "steps-post"
            )
            if kind == "loss_scale":
                at = dict(run[kind])
                marked = [(step, at[step]) for step in _skips(run) if step in at]
                axis.plot(*(zip(*marked) if marked else ((), ())), "x", color=drawn[0].get_color())
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log", base=2)
    axes[0].legend(title="x: steps skipped since the last reading", loc="best")
    axes[-1].set_xlabel("step")
    axes[-1].yaxis.get_major_locator().set_params(integer=True)
    save(figure, out, dpi=120)


def _skips(run: dict[str, Series]) -> list[int]:
    """Return the steps at which the number of skipped steps increased."""
    series = [(0, 0.0), *run["skipped_steps"]]
    return [step for (_, before), (step, value) in itertools.pairwise(series) if value > before]


def _scalars(path: pathlib.Path) -> list[tuple[str, int, float]]:
    import tensorflow as tf

    # `write_summary` uses the names of the curves as tags. Keras's TensorBoard callback adds the prefix `epoch_` to
    # them.
    kinds = {tag: kind for kind in _LABELS for tag in (kind, f"epoch_{kind}")}
    scalars = []
    try:
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag in kinds:
                    number = tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value
                    scalars.append((kinds[value.tag], event.step, float(number)))
    except tf.errors.DataLossError:
        # If a run was killed, its last record may be incomplete. The records before it are valid.
        pass
    return scalars
