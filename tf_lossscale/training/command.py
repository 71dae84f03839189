"""The subcommand `train`: trains, shows how it goes, stops at Ctrl-C with a checkpoint and goes on from one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale import optional
from tf_lossscale.training import report
from tf_lossscale.training.lenet import OPTIMIZERS, SETUPS, Digits, Record, Run, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tf-lossscale train`.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--steps", "20"]).steps
    20

    Args:
        parser: of the subcommand.
    """
    usual = Settings()

    def add(name: str, of: Any, what: str, **kwargs: Any) -> None:
        value = getattr(usual, name.strip("-").replace("-", "_"))
        parser.add_argument(name, type=of, help=f"{what} (default: {value})", **kwargs)

    add("--optimizer", str, "inner optimizer", choices=OPTIMIZERS)
    add("--steps", _at_least(1), "steps of each run", metavar="N")
    add("--seed", _at_least(0), "of the weights and of the order of the digits", metavar="N")
    what = "weight of the loss, as one in a sum of several has it; float16 gradients vanish if it is small"
    add("--loss-weight", _positive, what, metavar="X")
    add("--initial-scale", _positive, "loss scale to start with", metavar="X")
    add("--growth-steps", _at_least(1), "good steps until the scale doubles", metavar="N")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where the run in the folder was stopped")
    parser.add_argument("--no-compare", action="store_true", help="only the run with loss scaling")


def run(arguments: argparse.Namespace) -> int:
    """Runs `tf-lossscale train`.

    Args:
        arguments: as `add_arguments` described them.

    Returns:
        The exit code: 0 at the end, 130 after Ctrl-C, 2 if something stands in the way.
    """
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        if not arguments.resume:
            return _train(Settings(**given), None, arguments.out, compare=not arguments.no_compare)
        if given:
            options = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--resume goes on with the settings that the run was started with. Leave out: {options}.")
        settings, state = _saved(arguments.out)
        return _train(settings, state, arguments.out, compare=not arguments.no_compare)
    except (ValueError, ImportError, OSError) as error:
        print(f"tf-lossscale train: {error}", file=sys.stderr)
        return 2


def _train(settings: Settings, state: dict[str, Any] | None, out: pathlib.Path, *, compare: bool) -> int:
    tqdm = optional.load("tqdm", "train").tqdm
    digits = Digits(settings.seed)
    scaled = Run(SETUPS[-1], settings)
    if state is not None:
        _restore(scaled, state, out)
    _make_ready(out, resuming=state is not None)

    with _ctrl_c() as asked_to_stop:
        first = len(scaled.history)
        with tqdm(total=settings.steps, initial=first, desc=scaled.setup.name, unit="step") as bar:
            for batch in digits.batches(first, settings.steps):
                record = scaled.step(*batch)
                bar.set_postfix(loss=f"{record.loss:.3f}", scale=f"{record.scale:g}", skipped=scaled.skipped)
                bar.update()
                if asked_to_stop():
                    break
        _save(scaled, settings, out)
    if asked_to_stop():
        print(
            f"stopped after {len(scaled.history)} of {settings.steps} steps. Go on with: "
            f"tf-lossscale train --resume --out {out}"
        )
        return 130

    runs = [scaled]
    if compare:
        runs = [Run(setup, settings) for setup in SETUPS[:-1]] + runs
        for each in runs[:-1]:
            batches = digits.batches(0, settings.steps)
            for batch in tqdm(batches, total=settings.steps, desc=each.setup.name, unit="step"):
                each.step(*batch)
    report.print_table(runs, digits.test, settings)
    report.plot(scaled.history, out / "training.png")
    print(f"loss and loss scale are drawn in {out / 'training.png'}")
    return 0


def _make_ready(out: pathlib.Path, *, resuming: bool) -> None:
    """Makes the folder; raises before the training, not after it, if nothing can be written there."""
    out.mkdir(parents=True, exist_ok=True)
    trial = out / "state.tmp"
    trial.write_text("")
    trial.unlink()
    if resuming or not (out / "state.json").exists():
        return
    with contextlib.suppress(ValueError):
        settings, state = _saved(out)
        if len(state["history"]) < settings.steps:
            print(
                f"{out} holds a run that was stopped after {len(state['history'])} of {settings.steps} steps, which "
                "--resume would go on with. This run will replace it."
            )


def _save(run: Run, settings: Settings, out: pathlib.Path) -> None:
    """Writes a checkpoint, and then the file that names it: stopped in between, the one before is still whole."""
    manager = _manager(run, out)
    last = manager.latest_checkpoint  # of this run, or of one before it in the same folder
    number = int(last.rpartition("-")[2]) + 1 if last else 1
    state = {
        "settings": dataclasses.asdict(settings),
        "checkpoint": pathlib.Path(manager.save(checkpoint_number=number)).name,
        "loss_scale": float(run.optimizer.loss_scale),
        "counter": int(run.optimizer.dynamic_counter),
        "history": run.history,
    }
    temporary = out / "state.tmp"
    temporary.write_text(json.dumps(state))
    os.replace(temporary, out / "state.json")


def _saved(out: pathlib.Path) -> tuple[Settings, dict[str, Any]]:
    path = out / "state.json"
    if not path.exists():
        raise ValueError(f"nothing to resume: {path} does not exist. Start a run without --resume.")
    try:
        state = json.loads(path.read_text())
        state["history"] = [Record(*record) for record in state["history"]]
        return Settings(**state["settings"]), state
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not what a stopped run leaves. Start a run without --resume.") from error


def _restore(run: Run, state: dict[str, Any], out: pathlib.Path) -> None:
    path = str(out / "checkpoint" / state["checkpoint"])
    try:
        _manager(run, out).checkpoint.restore(path).assert_consumed()
    except tf.errors.OpError as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.message}") from error
    run.history = state["history"]
    print(
        f"resumed after {len(run.history)} steps with loss scale {float(run.optimizer.loss_scale):g} "
        f"and counter {int(run.optimizer.dynamic_counter)}"
    )


def _manager(run: Run, out: pathlib.Path) -> tf.train.CheckpointManager:
    checkpoint = tf.train.Checkpoint(model=run.model, optimizer=run.optimizer)
    return tf.train.CheckpointManager(checkpoint, str(out / "checkpoint"), max_to_keep=2)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; a second one stops at once, as without this."""
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


def _at_least(minimum: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, but got: {text}")

    return whole


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, but got: {text}")
