"""A bare optimizer whose gradients are counted by exponent for a while: is float16 worth a try?"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import replicas, scaling
from tf_lossscale.core.exponents import EVERY, Exponents
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.precision.counts import ExponentCounts
from tf_lossscale.precision.report import PrecisionReport, precision_report
from tf_lossscale.wrapper import families
from tf_lossscale.wrapper.family import Family
from tf_lossscale.wrapper.grads_and_vars import unzip
from tf_lossscale.wrapper.readings import names_of, require_values


@contextlib.contextmanager
def probe(optimizer: Any, every: int = EVERY) -> Iterator[Probe]:
    """Count the gradients of a bare optimizer by exponent inside a block, for a program that trains in float32.

    The report says what float16 would lose of the gradients, without a loss scale and with the best one. Training is
    the same bit for bit. After the block the optimizer is as it was, and the report can still be read.

    >>> import tf_lossscale
    >>> optimizer, weight = tf.keras.optimizers.SGD(0.5), tf.Variable([1.0, 1.0], name="weight")
    >>> with tf_lossscale.probe(optimizer) as probe:
    ...     _ = optimizer.apply_gradients([(tf.constant([2.0**-30, 1.0]), weight)])
    >>> row = probe.precision_report().rows[0]
    >>> row.vanished_unscaled
    0.5

    A `tf.function` that takes the step has to be traced inside the block, and not be used elsewhere: compile a Keras
    model anew if `fit` was called before.

    Args:
        optimizer: any optimizer that `LossScaleOptimizer` can wrap, but that is not wrapped.
        every: the number of steps from one counted step to the next; the first one is counted.

    Yields:
        The `Probe`, whose `precision_report()` is the answer.

    Raises:
        TypeError: the optimizer is of no known family, is a LossScaleOptimizer, or is wrapped in one; `every` is no
            number.
        ValueError: `every` is out of range, or the replicas of the strategy in use share their variables.
        RuntimeError: another probe counts the optimizer's steps.
    """
    every = errors.whole_number("every", every, "Pass the number of steps from one count to the next.")
    if families.scales_losses(optimizer) or families.is_wrapped(optimizer):
        raise TypeError(
            f"probe() takes an optimizer without a loss scale, but got: {optimizer!r}. Count with "
            'LossScaleOptimizer(..., diagnose="exponents") and precision_report().'
        )
    families.adapter_of(optimizer)  # raises if it is of no known family
    counting = Probe(families.of(optimizer), every)
    methods = {name: counting.method(getattr(optimizer, name)) for name in _METHODS if hasattr(optimizer, name)}
    if any(name in vars(optimizer) for name in methods):
        raise RuntimeError(
            f"probe() cannot count the steps of an optimizer whose method {' or '.join(methods)} was replaced, "
            "for example by another probe. Leave the other block first."
        )
    with replicas.overriding(optimizer, **methods):
        try:
            yield counting
        finally:
            counting._exponents.stop()


class Probe:
    """The counts of an optimizer that `probe` looks at.

    >>> optimizer, weight = tf.keras.optimizers.SGD(0.5), tf.Variable([1.0], name="weight")
    >>> with probe(optimizer) as counting:
    ...     _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    >>> counting.counts().step
    1

    Args:
        family: of the optimizer.
        every: the number of steps from one counted step to the next.
    """

    def __init__(self, family: Family, every: int):
        self._family = family
        self._exponents = Exponents(every)
        self._thread = _Thread()
        self._in_float16 = False  # whether float16 computed a gradient

    def precision_report(self) -> PrecisionReport:
        """Return what float16 would do to each variable's gradient, in the last counted step.

        Returns:
            The report: plain data that prints as a table.

        Raises:
            ValueError: no step was counted yet.
            RuntimeError: called while a graph is built, or without a default session in a legacy graph.
        """
        return precision_report(self.counts())

    def counts(self) -> ExponentCounts:
        """Return the counts of the last counted step.

        Raises:
            ValueError: no step was counted yet.
            RuntimeError: called while a graph is built, or without a default session in a legacy graph.
        """
        require_values("precision_report")
        found = self._exponents.last()
        if found is None:
            raise ValueError(
                "precision_report() needs a counted step, but the optimizer has taken none inside the block of "
                "probe(). A tf.function that was traced before the block does not count: trace it in the block, or "
                "compile the Keras model anew."
            )
        return dataclasses.replace(found, full_precision=not self._in_float16)

    def count_exponents(self) -> None:
        """Have the next step counted, and after that every `every`-th one."""
        self._exponents.count_next()

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the optimizer that counts the gradients before it does its work.

        Args:
            method: a bound method of gradients and variables, or of pairs of them.
        """

        @do_not_convert
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._thread.inside or tf.distribute.in_cross_replica_context():  # one method may call the other
                return method(*args, **kwargs)
            variables = [*args[1:2], *(kwargs[name] for name in _SECOND if name in kwargs)]
            named = [name for name in _FIRST if name in kwargs]
            if not args and not named:
                return method(*args, **kwargs)  # raises
            given = list(args[0] if args else kwargs.pop(named[0]))
            args = (given, *args[1:])  # a list, because it may have been an iterator
            done = self._record(given, variables) if given else []
            self._thread.inside = True
            try:
                with tf.control_dependencies(done):
                    return method(*args, **kwargs)
            finally:
                self._thread.inside = False

        return counted

    def _record(self, given: list[Any], variables: list[Any]) -> list[Any]:
        """Count gradients, which are paired with their variables or followed by them."""
        if isinstance(given[0], (tuple, list)):
            gradients, known = unzip(given)
        else:
            given_or_known = variables[0] if variables and variables[0] is not None else self._family.known_variables()
            gradients, known = scaling.floating(given), list(given_or_known or [])
        self._in_float16 |= any(gradient is not None and gradient.dtype == tf.float16 for gradient in gradients)
        factor = 1.0 if self._family.loss_scale_factor is None else self._family.loss_scale_factor
        return self._exponents.record(lambda: names_of(known), lambda: gradients, lambda: tf.constant(factor))


#: The methods that take the gradients of a step, and the names of their arguments.
_METHODS = ("apply_gradients", "apply")
_FIRST = ("grads_and_vars", "grads", "updates")
_SECOND = ("trainable_variables", "parameters")


class _Thread(threading.local):
    """Whether a method is called by another one; each replica has its own thread."""

    inside = False
