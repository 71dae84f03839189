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
    >>> scale._value
    16

    Args:
        compute: returns the value for an instance.
    """

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute = compute

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # This class has no `__set__`, so Python calls `__get__` only if the instance has no such attribute of its own.
        return self if instance is None else self._compute(instance)
