"""Registers twins: faster versions of plain functions. The plain function defines the correct result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def has_faster_twin(plain: _Function) -> _Function:
    """Decorate a plain function, so that a module in `core/fast` can register a twin: a faster version.

    A call runs the twin if there is one. The `plain` attribute is always the plain function:

    >>> import tensorflow as tf
    >>> from tf_lossscale.core import scaling
    >>> scaling.divide.plain(tf.constant(8.0), tf.constant(4.0)).numpy().item()
    2.0

    Args:
        plain: a function of positional arguments.

    Returns:
        A function that calls the twin, or the plain function if there is no twin.
    """

    @functools.wraps(plain)
    def either(*args: Any) -> Any:
        return either.twin(*args)  # type: ignore[attr-defined]

    either.plain = either.twin = plain  # type: ignore[attr-defined]
    return either  # type: ignore[return-value]


def faster(function: Any) -> Callable[[_Function], _Function]:
    """Decorate the faster twin of a function. The twin takes the same arguments, and training is bit for bit the same.

    >>> @has_faster_twin
    ... def double(number):
    ...     return number + number
    >>> @faster(double)
    ... def shifted(number):
    ...     return number << 1
    >>> double(3), double.plain(3), double.twin is shifted
    (6, 6, True)

    Args:
        function: a function that is decorated with `has_faster_twin`.

    Returns:
        A decorator for the twin.
    """

    def register(twin: _Function) -> _Function:
        function.twin = twin
        return twin

    return register
