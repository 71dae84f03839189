"""The `tf-lossscale inspect` subcommand."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Optimizer, Slot
from tf_lossscale.writing import aligned, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale inspect`."""
    parser.epilog = "The exit code is 2 if the file is missing, damaged or of an unknown kind."
    parser.add_argument("path", metavar="PATH", help="a checkpoint's prefix or folder, a SavedModel, or an .h5 file")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale inspect`."""
    from tf_lossscale.migrate.checkpoints.read import read

    file = read(arguments.path)
    if arguments.json:
        print(json.dumps(_plain(file), indent=1, allow_nan=False))
    else:
        _print_tables(file)
    return 0


def _plain(value: Any) -> Any:
    """Convert a `File`, or a part of it, to values that JSON can represent."""
    if isinstance(value, Slot):
        return {"variable": value.owner and value.owner.path, **_plain(value.tensor)}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.repr]
        return {name: _plain(getattr(value, name)) for name in fields}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_tables(file: File) -> None:
    _print_table([("file", file.path), ("kind", file.kind), ("written by", file.writer)])
    for optimizer in file.optimizers:
        print()
        _print_table(_rows(optimizer))
    if not file.optimizers:
        print("\nno optimizer")
    print()
    slots = [(name, slot) for each in file.optimizers for name, slots in each.slots.items() for slot in slots]
    tensors = [(each.path, each, [name for name, slot in slots if slot.owner == each]) for each in file.variables]
    # A slot whose variable is unknown has its own row.
    tensors += [(slot.tensor.name, slot.tensor, [name]) for name, slot in slots if slot.owner is None]
    rows = [(name, str(tensor.shape), tensor.dtype, ", ".join(of)) for name, tensor, of in tensors]
    _print_table([("variable", "shape", "dtype", "slots"), *rows])


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    print(*aligned([tuple(map(printable, row)) for row in rows], left=len(rows[0])), sep="\n")


def _rows(optimizer: Optimizer) -> list[tuple[str, str]]:
    name = f"{optimizer.name or 'of an unknown class'} of {LIBRARIES[optimizer.family]}"
    scale = optimizer.scale_state
    of_scale = {"loss scale": scale.get("loss_scale"), "counter": scale.get("dynamic_counter")}
    numbers = {
        **(of_scale if optimizer.wrapper else {}),
        "iterations": optimizer.iterations,
        "learning rate": optimizer.learning_rate,
        **optimizer.hyperparameters,
    }
    return [
        ("optimizer", f"{optimizer.path}: {name}" if optimizer.path else name),
        ("wrapped in", optimizer.wrapper or "nothing"),
        *((key, _shown(value)) for key, value in numbers.items()),
        ("slots", ", ".join(f"{slot} ({len(each)})" for slot, each in optimizer.slots.items()) or "none"),
    ]


def _shown(value: float | None) -> str:
    return "not in the file" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
