"""Checks Adafactor's arguments."""

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
    ValueError: `d`, the clipping threshold, must be a number >= 1, but got: 0.5. The default is d=1.0.

    Args:
        options: a dict with some of Adafactor's options. Other names in the dict are ignored.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range.
        IndexError: `eps` has fewer than two elements.
    """
    if "lr" in options:
        _check_rate(options["lr"])
    if "beta2_decay" in options:
        _check_number("`beta2_decay`", options["beta2_decay"], "beta2_decay=-0.8", most=0)
    if "eps" in options:
        _check_eps(options["eps"])
    if "d" in options:
        _check_number("`d`, the clipping threshold,", options["d"], "d=1.0", least=1)
    if "weight_decay" in options:
        _check_number("`weight_decay`", options["weight_decay"], "weight_decay=0.0", least=0)
    for name, allowed in (("foreach", (True, False, None)), ("maximize", (True, False))):
        if name in options and not any(options[name] is each for each in allowed):
            raise TypeError(f"`{name}` must be one of {allowed}, but got: {options[name]!r}.")


def _check_rate(rate: Any) -> None:
    name = "`lr`, the learning rate,"
    if isinstance(rate, numbers.Real):
        _check_number(name, rate, "lr=0.01", least=0)
    elif hasattr(rate, "shape") and hasattr(rate, "dtype"):
        if math.prod(rate.shape) != 1:
            raise ValueError(
                f"{name} must be a number, or a tensor with 1 element, but got: {rate!r}. The default is 0.01."
            )
        if hasattr(rate, "numpy"):
            _check_number(name, rate.numpy().item(), "lr=0.01", least=0)
    elif not callable(rate):
        raise TypeError(
            f"{name} must be a number, a tensor, a variable, a LearningRateSchedule or a function without arguments, "
            f"but got: {rate!r}. The default is 0.01."
        )


def _check_eps(eps: Any) -> None:
    if not isinstance(eps, (tuple, list)) or len(eps) < 2:
        raise (IndexError if isinstance(eps, (tuple, list)) else TypeError)(
            f"`eps` must be a pair (eps1, eps2), but got: {eps!r}. The default is (None, 1e-3)."
        )
    if eps[0] is not None:
        _check_number("`eps[0]`, if it is not None,", eps[0], "eps[0]=None", least=0)
    _check_number("`eps[1]`", eps[1], "eps[1]=0.001", least=0)


def _check_number(name: str, value: Any, default: str, least: float = -math.inf, most: float = math.inf) -> None:
    allowed = f"a number <= {most}" if least == -math.inf else f"a number >= {least}"
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, but got: {value!r}. The default is {default}.")
    if not least <= value <= most:  # type: ignore[operator]  # false for NaN, too
        raise ValueError(f"{name} must be {allowed}, but got: {value!r}. The default is {default}.")
