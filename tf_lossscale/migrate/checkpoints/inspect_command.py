"""The `tf-lossscale inspect` subcommand."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Optimizer, Tensor
from tf_lossscale.writing import aligned, printable

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

    shown = describe(read(arguments.path))
    if arguments.json:
        print(json.dumps(shown, indent=1, allow_nan=False))
    else:
        _print_tables(shown)
    return 0


def describe(file: File) -> dict[str, Any]:
    """Describe the contents of a file in a dict that can be written as JSON."""
    return {
        "version": 1,
        "path": file.path,
        "kind": file.kind,
        "written_by": file.writer,
        "optimizers": [_optimizer(optimizer) for optimizer in file.optimizers],
        "variables": [_tensor(variable) for variable in file.variables],
    }


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "path": optimizer.path,
        "library": optimizer.family,
        "class": optimizer.name,
        "wrapper": optimizer.wrapper,
        "loss_scale": _number(optimizer.scale_state.get("loss_scale")),
        "counter": _number(optimizer.scale_state.get("dynamic_counter")),
        "iterations": _number(optimizer.iterations),
        "learning_rate": _number(optimizer.learning_rate),
        "hyperparameters": {name: _number(value) for name, value in optimizer.hyperparameters.items()},
        "slots": {
            name: [{"variable": owner.path if owner else None, **_tensor(tensor)} for tensor, owner in slots]
            for name, slots in optimizer.slots.items()
        },
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"path": tensor.path, "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _print_tables(shown: dict[str, Any]) -> None:
    _print_table([("file", shown["path"]), ("kind", shown["kind"]), ("written by", shown["written_by"])])
    for optimizer in shown["optimizers"]:
        print()
        _print_table(_rows(optimizer))
    if not shown["optimizers"]:
        print("\nno optimizer")
    print()
    slots = [(name, slot) for each in shown["optimizers"] for name, slots in each["slots"].items() for slot in slots]
    rows = [(each["path"], each, [n for n, s in slots if s["variable"] == each["path"]]) for each in shown["variables"]]
    # A slot whose variable is unknown has its own row.
    rows += [(slot["name"] or slot["path"], slot, [name]) for name, slot in slots if slot["variable"] is None]
    table = [(name, str(tuple(each["shape"])), each["dtype"], ", ".join(of)) for name, each, of in rows]
    _print_table([("variable", "shape", "dtype", "slots"), *table])


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    print(*aligned([tuple(map(printable, row)) for row in rows], left=len(rows[0])), sep="\n")


def _rows(optimizer: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"{optimizer['class'] or 'of an unknown class'} of {LIBRARIES[optimizer['library']]}"
    slots = ", ".join(f"{slot} ({len(each)})" for slot, each in optimizer["slots"].items())
    of_scale = {key: optimizer[key] for key in ("loss_scale", "counter") if optimizer["wrapper"]}
    numbers = {**of_scale, **{key: optimizer[key] for key in ("iterations", "learning_rate")}}
    numbers = {key.replace("_", " "): value for key, value in numbers.items()} | optimizer["hyperparameters"]
    return [
        ("optimizer", f"{optimizer['path']}: {name}" if optimizer["path"] else name),
        ("wrapped in", optimizer["wrapper"] or "nothing"),
        *((key, _or_missing(value)) for key, value in numbers.items()),
        ("slots", slots or "none"),
    ]


def _or_missing(value: float | str | None) -> str:
    return "not in the file" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
