"""A descriptor for private attributes that subclasses of TensorFlow's loss scales and managers read or assign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaceable:
    """An attribute whose value is computed until a value is assigned to it."""

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute = compute

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # This class has no `__set__`, so a value that was assigned to the instance takes precedence over `__get__`.
        return self if instance is None else self._compute(instance)
