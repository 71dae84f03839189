"""Plain functions of the core, and their faster twins in `core/fast`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def faster_in(module: str) -> Callable[[_Function], _Function]:
    """Decorate a plain function whose twin, of the same name, signature and results, is in a module of `core/fast`.

    A call runs the twin; without `core/fast` it runs the plain function, which `plain` gives as well:

    >>> import tensorflow as tf
    >>> from tf_lossscale.core import scaling
    >>> scaling.divide.plain(tf.constant(8.0), tf.constant(4.0)).numpy().item()
    2.0

    Args:
        module: the name of the module.

    Returns:
        A decorator.
    """

    def decorate(plain: _Function) -> _Function:
        @functools.wraps(plain)
        def either(*args: Any) -> Any:
            return _twin(module, plain)(*args)

        either.plain = plain  # type: ignore[attr-defined]
        return either  # type: ignore[return-value]

    return decorate


@functools.cache
def _twin(module: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{__package__}.fast.{module}"
    try:
        return getattr(importlib.import_module(name), plain.__name__)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        return plain
