"""Checks arguments, and raises errors with consistent messages.

Every message names the argument, shows the value that was passed, and says which values are allowed and what to do. The
errors are built-in exceptions, so existing `except ValueError` code keeps working.
"""

from __future__ import annotations

import math
import numbers
from typing import Any


class NotWrappable(TypeError, ValueError):
    """Raised if the object to wrap is not an optimizer, or is already a LossScaleOptimizer.

    For such an object, TensorFlow 2.3 and older raise a ValueError, and newer versions raise a TypeError. Code that
    catches either error keeps working.
    """


def positive_number(name: str, value: Any, remedy: str) -> float:
    """Return `value` as a float. Raise an error if it is not a finite number above 0."""
    number = _as_float(name, value, remedy)
    if not FLOAT32_ZERO < number <= FLOAT32_MAX:
        raise ValueError(f"`{name}` must be a finite float32 number above 0, but got: {value!r}. {remedy}")
    return number


def normal_number(name: str, value: Any, remedy: str) -> float:
    """Return `value` as a float. Raise an error if it is not a positive number that TensorFlow does not treat as 0."""
    number = positive_number(name, value, remedy)
    if number < FLOAT32_TINY:
        raise ValueError(
            f"`{name}` must be at least {FLOAT32_TINY:g}, because TensorFlow treats smaller float32 numbers as 0, but "
            f"got: {value!r}. {remedy}"
        )
    return number


def whole_number(name: str, value: Any, remedy: str, least: int = 1) -> int:
    """Return `value` as an int. Raise an error if it is not a whole number or is less than `least`."""
    number = _as_float(name, value, remedy)
    if isinstance(value, numbers.Integral):
        # Convert the argument itself, because `number` is a float and may have been rounded.
        whole = int(value)
    elif math.isfinite(number) and number == int(number):
        whole = int(number)
    else:
        whole = least - 1
    if whole < least:
        raise ValueError(f"`{name}` must be a whole number that is at least {least}, but got: {value!r}. {remedy}")
    if whole >= 2**63:
        raise ValueError(f"`{name}` must be below 2**63, to fit in an int64, but got: {value!r}. {remedy}")
    return whole


def boolean(name: str, value: Any, remedy: str) -> bool:
    """Return `value` if it is a Python bool; otherwise raise an error."""
    if not isinstance(value, bool):
        raise TypeError(
            f'"{name}" argument to LossScaleOptimizer.__init__ must be a bool, but got: {value!r}. {remedy}'
        )
    return value


#: The smallest positive float32 number that kernels do not treat as 0.
FLOAT32_TINY = 2.0**-126
FLOAT32_MAX = 3.4028234663852886e38
# 2**-150 and all smaller positive numbers are rounded to zero in float32.
FLOAT32_ZERO = 2.0**-150


def _as_float(name: str, value: Any, remedy: str) -> float:
    if hasattr(value, "numpy"):
        value = value.numpy()
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    dtype = getattr(value, "dtype", None)
    is_scalar_array = getattr(value, "shape", None) == () and dtype is not None and dtype.kind not in "bcOSU"
    if not (is_number or is_scalar_array):
        raise TypeError(f"`{name}` must be a number, but got: {value!r}. {remedy}")
    try:
        return float(value)
    except OverflowError:
        # The value is an int that is too large for a float.
        return math.inf if value > 0 else -math.inf
