"""Checks the values of a file, converts them to the dtypes of the variables, and assigns all of them or none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_lossscale.migrate.checkpoints.matching import name_of
from tf_lossscale.migrate.checkpoints.notes import Notes
from tf_lossscale.migrate.checkpoints.saved import File, FileError


def check_counts(file: File, counts: Mapping[str, float]) -> None:
    """Raise an error if a count is not a number of steps."""
    for name, count in counts.items():
        # Beyond 2**53, a float64 does not hold every count, and further steps might exceed an int64.
        if not (0 <= count <= 2**53 and count == int(count)):
            raise FileError(f"{file.path}: {name} must be a number of steps from 0 to 2**53, but is {count:g}.")


def fitting(file: File, name: str, value: Any, variable: Any, notes: Notes | None = None) -> np.ndarray:
    """Convert a value to the dtype of a variable. Raise an error if the dtype or the shape does not fit."""
    import tensorflow as tf

    value, dtype = np.asarray(value), tf.as_dtype(variable.dtype)
    converted = _converted(value, dtype) if value.shape == tuple(variable.shape) else None
    if converted is None:
        raise FileError(
            f"{file.path}: {name} is of dtype {tf.as_dtype(value.dtype).name} and shape {value.shape}, and its values "
            f"do not fit into {name_of(variable)} of dtype {dtype.name} and shape {tuple(variable.shape)}. "
            "Pass a variable of the same dtype and shape."
        )
    if notes is not None and converted is not value and not np.array_equal(converted, value, equal_nan=True):
        notes.rounded.append(name)
    return converted


def _converted(value: np.ndarray, dtype: Any) -> np.ndarray | None:
    """Convert an array to a TensorFlow dtype. If the dtype cannot hold its values, return None."""
    is_text = value.dtype.kind in "OSU"
    if is_text or dtype.name == "string":
        return value if is_text and dtype.name == "string" else None
    with warnings.catch_warnings():
        # NumPy warns of infinities and of lost imaginary parts.
        warnings.simplefilter("ignore")
        converted = value.astype(dtype.as_numpy_dtype, copy=False)
    if dtype.is_complex or (dtype.is_floating and value.dtype.kind != "c"):
        # The values may be rounded, but a finite value must stay finite.
        fits = np.array_equal(np.isfinite(converted), np.isfinite(value))
    else:
        fits = np.array_equal(converted, value)
    return converted if fits else None


def assign(pairs: list[tuple[Any, Any]]) -> None:
    """Assign a value to each variable. After an error or an interrupt, give the variables their old values again."""
    import tensorflow as tf

    before = []
    try:
        for variable, value in pairs:
            before.append((variable, tf.convert_to_tensor(variable)))
            variable.assign(value)
    except BaseException:
        for variable, value in before:
            # The variable whose assignment failed may fail again.
            with contextlib.suppress(Exception):
                variable.assign(value)
        raise
