"""Converts values of the originals to JSON and back. Floats are exact. NaN and infinities become strings."""

import math

import numpy as np


def plain(value):
    """Return a number, tensor, variable or nested structure as JSON."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufc":
            value = value.astype(np.float64)
        return plain(value.tolist())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "numpy"):
        return plain(value.numpy())
    return {"__object__": type_name(value)}


def typed(value):
    """Return a value together with its type. For a tensor, add the dtype."""
    described = {"type": type_name(value)}
    if hasattr(value, "dtype"):
        described["dtype"] = getattr(value.dtype, "name", str(value.dtype))
    described["value"] = plain(value)
    return described


def type_name(value):
    """Return the qualified name of a value's class, without the module for a built-in class."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else "{}.{}".format(kind.__module__, kind.__name__)


def outcome(function, *arguments):
    """Call a function. Return {"ok": result}, or {"error": class and message} if it raises an error."""
    try:
        return {"ok": function(*arguments)}
    except Exception as error:
        return {"error": {"type": type(error).__name__, "message": str(error)[:1500]}}


def array(value, dtype="float64"):
    return np.array(value, dtype=object).astype("float64").astype(dtype)


def numbers(config):
    """Return recorded arguments, in which infinity and NaN are strings, as Python numbers."""
    return {key: float(value) if value in ("inf", "-inf", "nan") else value for key, value in config.items()}
