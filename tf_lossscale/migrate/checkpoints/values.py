"""Converts the values of a file to the dtypes of variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.migrate.checkpoints.saved import FileError
from tf_lossscale.wrapper.checks import name_of


def fitting(path: str, name: str, value: Any, variable: Any) -> np.ndarray:
    """Convert a value in the file at `path` to the dtype of a variable. Raise an error if the variable cannot hold it.

    A value may be rounded, but a finite value must stay finite, and an integer must not change.
    """
    value, dtype = np.asarray(value), tf.as_dtype(variable.dtype)
    # NumPy would parse text, and drop the imaginary part of a complex number.
    is_number = value.dtype.kind not in ("OSU" if dtype.is_complex else "OSUc") and dtype.name != "string"
    if is_number and value.shape == tuple(variable.shape):
        with np.errstate(all="ignore"):
            converted = value.astype(dtype.as_numpy_dtype, copy=False)
        alike = (converted, value) if dtype.is_integer or dtype.is_bool else map(np.isfinite, (converted, value))
        if np.array_equal(*alike):
            return converted
    raise FileError(
        f"{path}: {name} is of dtype {tf.as_dtype(value.dtype).name} and shape {value.shape}, and its values do not "
        f"fit into {name_of(variable)} of dtype {dtype.name} and shape {tuple(variable.shape)}. Pass a variable of the "
        "same dtype and shape."
    )
