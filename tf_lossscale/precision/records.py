"""The `exponents.jsonl` file, which contains a run's exponent counts: one line of JSON for each step whose gradients
were counted."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from tf_lossscale.precision.counts import COLUMNS, FINITE, INFINITE, LOWEST, NAN, ZEROS, ExponentCounts, column

#: The name of the file in a run's folder that contains the run's exponent counts.
FILE = "exponents.jsonl"


def append(folder: pathlib.Path | str, counts: ExponentCounts) -> None:
    """Append the exponent counts of a step to a run's `exponents.jsonl` file.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> append(folder, ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1024.0, step=100))
    >>> [counts.step for counts in read(folder)]
    [100]

    Args:
        folder: the folder of the run. It is created if it does not exist.
        counts: the exponent counts of one step.

    Raises:
        OSError: the file cannot be written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(as_record(counts)) + "\n")


def read(folder: pathlib.Path | str) -> list[ExponentCounts]:
    """Read the exponent counts of a run.

    Args:
        folder: the folder of the run.

    Returns:
        The exponent counts, ordered by step. If the file contains several lines for one step, because the run was
        resumed from an earlier step, only the last of these lines is used. If the run was killed while it was writing
        the last line, that line is ignored.

    Raises:
        FileNotFoundError: the folder contains no `exponents.jsonl` file.
        ValueError: a complete line is damaged.
    """
    path = pathlib.Path(folder) / FILE
    by_step: dict[int, ExponentCounts] = {}
    # The part after the last newline is empty, or an incomplete line if the run was killed.
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            counts = from_record(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"Line {number} of {path} is damaged: {error}. Delete the line.") from error
        by_step[counts.step] = counts
    return [by_step[step] for step in sorted(by_step)]


def as_record(counts: ExponentCounts) -> dict[str, Any]:
    """Return exponent counts as a dict that can be written as JSON.

    For each variable, only the bins from the lowest to the highest exponent that occurs are stored.

    >>> row = np.zeros([1, COLUMNS], np.int64)
    >>> row[0, column(-3)] = 5
    >>> as_record(ExponentCounts(("kernel",), row, scale=1.0, step=1))["variables"]["kernel"]
    {'zeros': 0, 'infinite': 0, 'nan': 0, 'lowest_exponent': -3, 'bins': [5]}

    Args:
        counts: the exponent counts of one step.
    """
    record: dict[str, Any] = {"step": counts.step, "scale": counts.scale, "full_precision": counts.full_precision}
    record["variables"] = {}
    for name, row in zip(counts.names, counts.counts):
        bins = np.flatnonzero(row[FINITE])
        first, last = (int(bins[0]), int(bins[-1])) if bins.size else (0, -1)
        kept = [int(n) for n in row[FINITE][first : last + 1]]
        fields = {"zeros": int(row[ZEROS]), "infinite": int(row[INFINITE]), "nan": int(row[NAN])}
        record["variables"][name] = {**fields, "lowest_exponent": first + LOWEST, "bins": kept}
    return record


def from_record(record: dict[str, Any]) -> ExponentCounts:
    """Create exponent counts from a dict that `as_record` returned.

    >>> from_record({"step": 1, "scale": 1.0, "full_precision": False, "variables": {}}).names
    ()

    Args:
        record: the dict. It may have been written as JSON and read back.

    Raises:
        KeyError, TypeError, ValueError: the dict is not a record of exponent counts.
    """
    names = tuple(record["variables"])
    counts: np.ndarray = np.zeros([len(names), COLUMNS], np.int64)
    for row, fields in zip(counts, record["variables"].values()):
        row[ZEROS], row[INFINITE], row[NAN] = fields["zeros"], fields["infinite"], fields["nan"]
        first = column(fields["lowest_exponent"])
        row[first : first + len(fields["bins"])] = fields["bins"]
    return ExponentCounts(names, counts, float(record["scale"]), int(record["step"]), bool(record["full_precision"]))
