"""Checks of Adafactor's arguments."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

# The options and their defaults, in PyTorch's order.
DEFAULTS: dict[str, Any] = {
    "lr": 1e-2,
    "beta2_decay": -0.8,
    "eps": (None, 1e-3),
    "d": 1.0,
    "weight_decay": 0.0,
    "foreach": None,
    "maximize": False,
}


def check(options: Mapping[str, Any]) -> None:
    """Raise an error if the value of an option is not allowed.

    >>> check({"d": 0.5})
    Traceback (most recent call last):
    ...
    ValueError: `d`, the clipping threshold, must be a number >= 1, but got: 0.5. Pass d=1.0, the default.

    Args:
        options: some of Adafactor's options by name; other names are ignored.

    Raises:
        TypeError: a value is of a wrong type.
        ValueError: a value is out of range.
        IndexError: `eps` has fewer than two elements.
    """
    if "lr" in options:
        _check_rate(options["lr"])
    if "beta2_decay" in options:
        value = options["beta2_decay"]
        _require(_number("beta2_decay", value, -0.8) <= 0, "beta2_decay", value, "a number <= 0", -0.8)
    if "eps" in options:
        _check_eps(options["eps"])
    if "d" in options:
        value = options["d"]
        _require(_number("d", value, 1.0) >= 1, "d`, the clipping threshold,", value, "a number >= 1", 1.0)
    if "weight_decay" in options:
        value = options["weight_decay"]
        _require(_number("weight_decay", value, 0.0) >= 0, "weight_decay", value, "a number >= 0", 0.0)
    for name, allowed in (("foreach", (True, False, None)), ("maximize", (True, False))):
        if name in options and not any(options[name] is each for each in allowed):
            raise TypeError(f"`{name}` must be one of {allowed}, but got: {options[name]!r}.")


def _check_rate(rate: Any) -> None:
    if isinstance(rate, numbers.Real):
        _require(float(rate) >= 0, "lr`, the learning rate,", rate, "a number >= 0", 0.01)
    elif hasattr(rate, "shape") and hasattr(rate, "dtype"):
        _require(
            math.prod(rate.shape) == 1, "lr`, the learning rate,", rate, "a number, or a tensor with 1 element", 0.01
        )
        if hasattr(rate, "numpy"):
            _require(rate.numpy().item() >= 0, "lr`, the learning rate,", rate, "a number >= 0", 0.01)
    elif not callable(rate):
        raise TypeError(
            f"`lr`, the learning rate, must be a number, a tensor, a variable, a LearningRateSchedule or a function "
            f"without arguments, but got: {rate!r}. Pass lr=0.01, the default."
        )


def _check_eps(eps: Any) -> None:
    if not isinstance(eps, (tuple, list)):
        raise TypeError(f"`eps` must be a pair (eps1, eps2), but got: {eps!r}. Pass eps=(None, 1e-3), the default.")
    if len(eps) < 2:
        raise IndexError(f"`eps` must be a pair (eps1, eps2), but got: {eps!r}. Pass eps=(None, 1e-3), the default.")
    if eps[0] is not None:
        _require(_number("eps[0]", eps[0], None) >= 0, "eps[0]", eps[0], "None or a number >= 0", None)
    _require(_number("eps[1]", eps[1], 1e-3) >= 0, "eps[1]", eps[1], "a number >= 0", 1e-3)


def _number(name: str, value: Any, default: Any) -> Any:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, but got: {value!r}. Pass {name}={default}, the default.")
    return value


def _require(holds: Any, name: str, value: Any, allowed: str, default: Any) -> None:
    # `holds` is a comparison, which is false for NaN, so NaN is refused.
    if not holds:
        argument = name.partition("`")[0]
        name = name if "`" in name else f"{name}`"
        raise ValueError(f"`{name} must be {allowed}, but got: {value!r}. Pass {argument}={default}, the default.")
