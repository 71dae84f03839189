"""Remembers by which factor a loss scale multiplied losses, so that their gradients are divided by the same factor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core.graphs import ancestors, enclosing, functions, notes


class Factors:
    """The factors of one loss scale.

    A traced function keeps the factors of its own losses, and a None for each loss that the user may have scaled by
    hand. If there are several, or another function may have returned scaled gradients, the factor is the one that the
    gradients were computed from. In eager mode, the factor is the last one, unless the gradients may come from a
    function or from a loss that the user has scaled by hand.
    """

    def __init__(self) -> None:
        # The factor of the last loss in eager mode, in all threads and in each thread.
        self._last: tf.Tensor | None = None
        self._in_thread = _InThread()
        # The functions that have scaled a loss and have unscaled no gradients since.
        self._unfinished: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Factors], tuple[()]]:
        # The copies and pickles of a loss scale have scaled no losses.
        return Factors, ()

    def remember(self, factor: tf.Tensor) -> None:
        """Record that a loss is multiplied by a factor."""
        here = functions()
        for function in here:
            notes(function).setdefault(self, []).append(factor)
        self._unfinished.update(here[:1])
        self._last = self._in_thread.last = None if here else factor
        self._in_thread.is_pending = not here

    def of(self, gradients: list[Any]) -> tf.Tensor | None:
        """Return the factor of the loss of gradients. If it is unknown, return None."""
        here = functions()
        self._unfinished.difference_update(here[:1])
        if not here:
            # Another thread may have scaled the loss, unless this thread has scaled one for which it took no gradients.
            is_own, self._in_thread.is_pending = self._in_thread.is_pending, False
            if self._unfinished:
                return None
            return self._in_thread.last if is_own else self._last
        factors = notes(here[0]).get(self, [])
        if len(factors) + len(self._unfinished) > 1:
            inputs = {id(tensor) for tensor in ancestors(gradients, lambda tensor: True)}
            used = [factor for factor in factors if id(factor) in inputs]
            is_known = not self._unfinished and all(factor is not None for factor in factors)
            factors = used or (factors if is_known else [])
        # A tensor of a branch or a loop cannot be used outside of it.
        usable = [factor for factor in factors[-1:] if getattr(factor, "graph", None) in enclosing()]
        return usable[0] if usable else None

    def forget(self) -> None:
        """Forget the factor of the last loss, because the user has read the scale and may scale the next loss by it."""
        if not self._in_thread.is_reading:
            self._last = self._in_thread.last = None
            for function in functions():
                notes(function).setdefault(self, []).append(None)

    def read(self, loss_scale: Callable[[], Any]) -> Any:
        """Return the current scale, without forgetting the factor of the last loss."""
        self._in_thread.is_reading = True
        try:
            return loss_scale()
        finally:
            self._in_thread.is_reading = False


class _InThread(threading.local):
    #: The factor of the last loss of the thread.
    last: tf.Tensor | None = None
    #: Whether no gradients have been unscaled since that loss was scaled.
    is_pending = False
    #: Whether the package itself reads the scale.
    is_reading = False
