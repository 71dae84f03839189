"""The `tf-lossscale train` subcommand, which shows its progress, saves a checkpoint on Ctrl-C and can be resumed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tf_lossscale import option_types
from tf_lossscale.libraries import optional
from tf_lossscale.training import progress
from tf_lossscale.training.settings import OPTIMIZERS, SETUPS, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tf-lossscale train`.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--steps", "20"]).steps
    20

    Args:
        parser: the parser of the subcommand.
    """
    usual = Settings()

    def add(name: str, of: Any, what: str, **kwargs: Any) -> None:
        value = getattr(usual, name.strip("-").replace("-", "_"))
        parser.add_argument(name, type=of, help=f"{what} (default: {value})", **kwargs)

    add("--optimizer", str, "inner optimizer", choices=OPTIMIZERS)
    add("--steps", option_types.whole_number(1), "steps of each run", metavar="N")
    add("--seed", option_types.whole_number(0), "seed of the weights and of the order of the digits", metavar="N")
    what = "weight of the loss, as in a sum of several losses; float16 gradients vanish if it is small"
    add("--loss-weight", option_types.positive_number, what, metavar="X")
    add("--initial-scale", option_types.positive_number, "loss scale to start with", metavar="X")
    add("--growth-steps", option_types.whole_number(1), "good steps until the scale doubles", metavar="N")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder from its last checkpoint")
    what = "train only with loss scaling, without the two runs to compare with"
    parser.add_argument("--no-compare", action="store_true", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale train`.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code: 0 if the training finished, 130 after Ctrl-C.

    Raises:
        ImportError: an optional library is missing.
        OSError: a file cannot be read or written.
        ValueError: `--resume` is combined with a setting, or the run to resume is missing or damaged.
    """
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.out.exists() and not arguments.out.is_dir():
        raise NotADirectoryError(f"{arguments.out} is a file. Pass a folder as --out.")
    # Some libraries are needed only after the training. Check for them now, so that no training is wasted.
    for module in ("matplotlib.figure", "rich.console", "sklearn.datasets", "tqdm"):
        optional.load(module, "train")
    from tf_lossscale.training import saved

    if not arguments.resume:
        return _train(Settings(**given), None, arguments.out, compare=not arguments.no_compare)
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"--resume uses the settings of the run that it continues. Leave out: {options}.")
    settings, state = saved.read(arguments.out)
    return _train(settings, state, arguments.out, compare=not arguments.no_compare)


def _train(settings: Settings, state: dict[str, Any] | None, out: pathlib.Path, *, compare: bool) -> int:
    from tf_lossscale.training import report, saved
    from tf_lossscale.training.lenet import Digits, Run

    digits = Digits(settings.seed)
    scaled = Run(SETUPS[-1], settings)
    if state is not None:
        saved.restore(scaled, state, out)
    saved.make_ready(out)
    if state is None:
        _say_what_is_replaced(out)

    with _ctrl_c() as asked_to_stop:
        _take_steps(scaled, digits, settings, asked_to_stop)
        unsaved = _save(scaled, settings, out)
    if asked_to_stop():
        if unsaved:
            saved.save(scaled, settings, out)
        print(
            f"stopped after {len(scaled.history)} of {settings.steps} steps. To continue, run: "
            f"tf-lossscale train --resume --out {out}"
        )
        return 130

    try:
        others = [Run(setup, settings) for setup in SETUPS[:-1]] if compare else []
        for each in others:
            _take_steps(each, digits, settings)
        report.print_table([*others, scaled], digits.test, settings)
    finally:
        if unsaved:
            saved.save(scaled, settings, out)
    report.plot(scaled.history, scaled.exponents, out / "training.png")
    print(f"loss, loss scale and the gradients' exponents are in {out / 'training.png'}")
    return 0


def _take_steps(run: Any, digits: Any, settings: Settings, asked_to_stop: Callable[[], bool] = lambda: False) -> None:
    """Take the remaining steps and show the progress."""
    first = len(run.history)
    with progress.shown(run.setup.name, first, settings.steps) as report:
        for batch in digits.batches(first, settings.steps):
            record = run.step(*batch)
            scaling = f", scale={_short(record.scale)}, skipped={run.skipped}" if run.setup.scaled else ""
            report(f"loss={record.loss:.3f}{scaling}")
            if asked_to_stop():
                break


def _short(scale: float) -> str:
    """Format a loss scale, as a power of two if possible."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"


def _save(run: Any, settings: Settings, out: pathlib.Path) -> OSError | None:
    """Save the run. If saving fails, return the error, so that the caller can try again before the command ends."""
    from tf_lossscale.training import saved

    try:
        saved.save(run, settings, out)
    except OSError as error:
        print(f"tf-lossscale train: {error} The command will try again when it ends.", file=sys.stderr)
        return error
    return None


def _say_what_is_replaced(out: pathlib.Path) -> None:
    from tf_lossscale.training import saved

    # `read` raises a ValueError if the folder contains no run that can be resumed.
    with contextlib.suppress(ValueError):
        settings, state = saved.read(out)
        if len(state["history"]) < settings.steps:
            print(
                f"{out} holds a run that was stopped after {len(state['history'])} of {settings.steps} steps, which "
                "--resume would continue. This run will replace it."
            )


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. A second Ctrl-C stops the program immediately."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        del frame
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
