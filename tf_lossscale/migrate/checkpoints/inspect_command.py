"""The `tf-lossscale inspect` subcommand."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from tf_lossscale.migrate.checkpoints.matching import with_owners
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Optimizer, Tensor

_EXIT_CODES = """\
exit code:
  0  all went well
  2  bad arguments, or the file is missing, damaged, or of no known kind
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale inspect`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    what = "a checkpoint's prefix, a folder of checkpoints, a SavedModel, or an .h5 file"
    parser.add_argument("path", metavar="PATH", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale inspect`."""
    from tf_lossscale.migrate.checkpoints.read import read

    file = read(arguments.path)
    if arguments.json:
        print(json.dumps(describe(file), indent=1, allow_nan=False))
    else:
        _print_tables(file)
    return 0


def describe(file: File) -> dict[str, Any]:
    """Describe the contents of a file in a dict that can be written as JSON."""
    return {
        "version": 1,
        "path": file.path,
        "kind": file.kind,
        "written_by": file.writer,
        "optimizers": [_optimizer(each, file) for each in file.optimizers],
        "variables": [_tensor(each) for each in file.variables],
    }


def _optimizer(optimizer: Optimizer, file: File) -> dict[str, Any]:
    return {
        "path": optimizer.path,
        "library": optimizer.family,
        "class": optimizer.name,
        "wrapper": optimizer.wrapper,
        "loss_scale": _number(optimizer.scale_state.get("loss_scale")),
        "counter": optimizer.scale_state.get("dynamic_counter"),
        "iterations": optimizer.iterations,
        "learning_rate": _number(optimizer.learning_rate),
        "hyperparameters": {name: _number(value) for name, value in optimizer.hyperparameters.items()},
        "slots": {
            slot: [
                {"variable": owner.path if owner else None, **_tensor(tensor)}
                for tensor, owner in with_owners(each, file, file.ordered_variables)
            ]
            for slot, each in optimizer.slots.items()
        },
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"path": tensor.path, "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _print_tables(file: File) -> None:
    _print_table([("file", file.path), ("kind", file.kind), ("written by", file.writer)])
    for optimizer in file.optimizers:
        print()
        _print_table(_rows(optimizer))
    if not file.optimizers:
        print("\nno optimizer")
    print()
    _print_table([("variable", "shape", "dtype", "slots"), *_variables(file)])


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _rows(optimizer: Optimizer) -> list[tuple[str, str]]:
    name = f"{optimizer.name or 'of an unknown class'} of {LIBRARIES[optimizer.family]}"
    there = [
        ("optimizer", f"{optimizer.path}: {name}" if optimizer.path else name),
        ("wrapped in", optimizer.wrapper or "nothing"),
        ("loss scale", _or_missing(optimizer.scale_state.get("loss_scale"))),
        ("counter", _or_missing(optimizer.scale_state.get("dynamic_counter"))),
        ("iterations", _or_missing(optimizer.iterations)),
        ("learning rate", _or_missing(optimizer.learning_rate)),
    ]
    there += [(name, _or_missing(value)) for name, value in optimizer.hyperparameters.items()]
    there += [("slots", ", ".join(f"{slot} ({len(each)})" for slot, each in optimizer.slots.items()) or "none")]
    return there if optimizer.wrapper else [row for row in there if row[0] not in ("loss scale", "counter")]


def _or_missing(value: float | None) -> str:
    return "not in the file" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _variables(file: File) -> list[tuple[str, ...]]:
    """Return a row for each variable, with its slots. A slot whose variable is unknown has its own row."""
    slots_of: dict[str, list[str]] = {}
    of_nobody = []
    for optimizer in file.optimizers:
        for slot, each in optimizer.slots.items():
            for tensor, owner in with_owners(each, file, file.ordered_variables):
                if owner is None:
                    of_nobody.append((tensor.name or tensor.path, str(tensor.shape), tensor.dtype, slot))
                else:
                    slots_of.setdefault(owner.path, []).append(slot)
    rows = [(v.path, str(v.shape), v.dtype, ", ".join(slots_of.get(v.path, []))) for v in file.variables]
    return [*rows, *of_nobody]
