"""The files of a training run: a checkpoint, and `state.json`, which names the checkpoint and contains all other state.

A checkpoint is deleted only when `state.json` names a newer one, so that a run stopped at any moment can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.precision.records import as_record, from_record
from tf_lossscale.training.lenet import Record, Run
from tf_lossscale.training.settings import Settings
from tf_lossscale.writing import checkpoint_errors_are_os_errors, name_latest_checkpoint, whole_file

STATE = "state.json"
_FOLDER = "checkpoint"
# Matches the names of a checkpoint's files, including files left by an interrupted write.
_NUMBERED = re.compile(r"ckpt-(\d+)[._].*")


def make_ready(out: pathlib.Path) -> None:
    """Create the folder of a run, and check that files can be written to this folder.

    Args:
        out: the folder.

    Raises:
        OSError: the folder or a file in it cannot be written.
    """
    for folder in (out, out / _FOLDER):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} must be a folder, but is a file. Pass a different --out.")
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / "trial") as trial:
            trial.write_text("")
        (folder / "trial").unlink()
    for name in (STATE, "training.png"):
        if (out / name).is_dir():
            raise IsADirectoryError(f"{out / name} must be a file, but is a folder. Pass a different --out.")


def save(run: Run, settings: Settings, out: pathlib.Path) -> None:
    """Write a checkpoint and `state.json`, which names the checkpoint. Then delete the older checkpoints.

    Args:
        run: the run to save.
        settings: the run's settings.
        out: the folder that `make_ready` has prepared.

    Raises:
        OSError: a file cannot be written. The message names the last complete checkpoint.
    """
    folder = out / _FOLDER
    number = max(_numbered(folder).values(), default=0) + 1
    name = f"ckpt-{number}"
    state = {
        "settings": dataclasses.asdict(settings),
        "checkpoint": name,
        "loss_scale": float(run.optimizer.loss_scale),
        "counter": int(run.optimizer.dynamic_counter),
        "history": run.history,
        "exponents": [as_record(counts) for counts in run.exponents],
    }
    try:
        with checkpoint_errors_are_os_errors():
            _checkpoint(run).write(str(folder / name))
        with whole_file(out / STATE) as temporary:
            temporary.write_text(json.dumps(state))
    except OSError as error:
        _delete(file for file, its_number in _numbered(folder).items() if its_number == number)
        raise OSError(f"the checkpoint {folder / name} cannot be written ({error}). {_last_whole(out)}") from error
    # If a file cannot be deleted now, the next save deletes it.
    with contextlib.suppress(OSError):
        name_latest_checkpoint(folder, name)
        _delete(file for file, its_number in _numbered(folder).items() if its_number < number)


def read(out: pathlib.Path) -> tuple[Settings, dict[str, Any]]:
    """Return the settings and the state that `save` wrote into a folder.

    Args:
        out: the folder.

    Returns:
        The settings and the state.

    Raises:
        ValueError: the folder contains no saved run, or `state.json` is damaged.
    """
    path = out / STATE
    if not path.exists():
        raise ValueError(f"nothing to resume: {path} does not exist. Start a run without --resume.")
    try:
        written = json.loads(path.read_text())
        state = {
            "checkpoint": written["checkpoint"],
            "history": [Record(*record) for record in written["history"]],
            # Older versions wrote this file without the key "exponents".
            "exponents": [from_record(record) for record in written.get("exponents", [])],
        }
        return Settings(**written["settings"]), state
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or was not written by tf-lossscale train. Start a run without --resume."
        ) from error


def restore(run: Run, state: dict[str, Any], out: pathlib.Path) -> None:
    """Restore a saved run.

    Args:
        run: a new run with the saved settings.
        state: the state that `read` returned.
        out: the folder.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    path = str(out / _FOLDER / state["checkpoint"])
    try:
        _checkpoint(run).restore(path).assert_consumed()
    except tf.errors.OpError as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.message}") from error
    run.history, run.exponents = state["history"], state["exponents"]
    print(
        f"resumed after {len(run.history)} steps with loss scale {float(run.optimizer.loss_scale):g} "
        f"and counter {int(run.optimizer.dynamic_counter)}"
    )


def _checkpoint(run: Run) -> tf.train.Checkpoint:
    checkpoint = tf.train.Checkpoint(model=run.model, optimizer=run.optimizer)
    # Reading the attribute creates the `save_counter` variable, which `assert_consumed()` expects.
    _ = checkpoint.save_counter
    return checkpoint


def _last_whole(out: pathlib.Path) -> str:
    try:
        settings, state = read(out)
    except (ValueError, OSError):
        return f"There is no complete checkpoint in {out}."
    return (
        f"The last complete checkpoint is {out / _FOLDER / state['checkpoint']}, after {len(state['history'])} of "
        f"{settings.steps} steps: --resume continues from it."
    )


def _numbered(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return the files of all checkpoints in a folder, each with the number of its checkpoint."""
    matches = {path: _NUMBERED.fullmatch(path.name) for path in folder.iterdir()}
    return {path: int(match[1]) for path, match in matches.items() if match}


def _delete(files: Iterable[pathlib.Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink() if not file.is_dir() else shutil.rmtree(file)
