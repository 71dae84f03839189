"""Private attributes of the original loss scales and managers, which subclasses read or assign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaceable:
    """An attribute that is computed, unless a value was assigned to it.

    >>> class Scale:
    ...     _value = Replaceable(lambda self: 8)
    >>> scale = Scale()
    >>> scale._value
    8
    >>> scale._value = 16
    >>> scale._value, replaced(scale, "_value"), replaced(Scale(), "_value")
    (16, 16, None)

    Args:
        compute: returns the value for an instance.
    """

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute = compute

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # This class has no `__set__`, so Python calls `__get__` only if the instance has no such attribute of its own.
        return self if instance is None else self._compute(instance)


def replaced(instance: Any, name: str, default: Callable[[], Any] = lambda: None) -> Any:
    """Return the value that was assigned to a `Replaceable`, or a default.

    Args:
        instance: the object.
        name: the attribute.
        default: a function that returns the default.
    """
    value = vars(instance).get(name)
    return default() if value is None else value
