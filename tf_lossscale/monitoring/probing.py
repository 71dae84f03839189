"""Counts an optimizer's gradients by exponent, to see whether they would fit in float16 with or without a loss
scale."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import gradients as gradients_lib
from tf_lossscale.core import replicas
from tf_lossscale.core.exponents import EVERY, Exponents
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.families import registry as families
from tf_lossscale.families.family import Family
from tf_lossscale.precision.counts import ExponentCounts
from tf_lossscale.precision.report import PrecisionReport
from tf_lossscale.wrapper.grads_and_vars import names_of, unzip
from tf_lossscale.wrapper.readings import require_values


@contextlib.contextmanager
def probe(optimizer: Any, every: int = EVERY) -> Iterator[Probe]:
    """Inside a `with` block, count an optimizer's gradients by exponent. The optimizer must have no loss scale.

    Use it in a program that trains in float32. The report says how much of the gradients would be lost in float16,
    without a loss scale and with the best loss scale. The training steps are bit for bit the same as without the probe.
    At the end of the block, the optimizer's methods are restored. The report can still be read after the block.

    >>> import tf_lossscale
    >>> optimizer, weight = tf.keras.optimizers.SGD(0.5), tf.Variable([1.0, 1.0], name="weight")
    >>> with tf_lossscale.probe(optimizer) as probe:
    ...     _ = optimizer.apply_gradients([(tf.constant([2.0**-30, 1.0]), weight)])
    >>> row = probe.precision_report().rows[0]
    >>> row.vanished_unscaled
    0.5

    If the step is in a `tf.function`, trace the function inside the block, and do not call it outside the block. If a
    Keras model's `fit` was called before the block, call `compile` again inside the block.

    Args:
        optimizer: an optimizer that `LossScaleOptimizer` could wrap, but that is not wrapped.
        every: the number of steps from one count of gradients to the next. The first step is counted.

    Yields:
        A `Probe`. Its `precision_report()` returns the report.

    Raises:
        TypeError: the optimizer is not supported, is a LossScaleOptimizer, or is wrapped in one; or `every` is not a
            number.
        ValueError: `every` is less than 1, or the replicas of the current strategy share their variables.
        RuntimeError: one of the optimizer's methods was replaced, for example by another probe.
    """
    every = errors.whole_number("every", every, "Pass the number of steps from one count to the next.")
    if families.scales_losses(optimizer) or families.is_wrapped(optimizer):
        raise TypeError(
            f"probe() takes an optimizer without a loss scale, but got: {optimizer!r}. Count its gradients "
            'with LossScaleOptimizer(..., diagnose="exponents") and precision_report().'
        )
    # This call raises an error if the optimizer is not supported.
    families.require_wrapper_class(optimizer)
    counting = Probe(families.family_of(optimizer), every)
    methods = {name: counting.method(getattr(optimizer, name)) for name in _METHODS if hasattr(optimizer, name)}
    if any(name in vars(optimizer) for name in methods):
        replaced = " or ".join(methods)
        raise RuntimeError(
            f"probe() cannot count the steps of an optimizer whose method {replaced} was replaced, for example by "
            "another probe. End the `with` block of the other probe first."
        )
    with replicas.overriding(optimizer, **methods):
        try:
            yield counting
        finally:
            counting._exponents.stop()


class Probe:
    """Holds the exponent counts that `probe` collects for an optimizer, and creates the report.

    >>> optimizer, weight = tf.keras.optimizers.SGD(0.5), tf.Variable([1.0], name="weight")
    >>> with probe(optimizer) as counting:
    ...     _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    >>> counting.counts().step
    1

    Args:
        family: the `Family` object that adapts the optimizer.
        every: the number of steps from one count of gradients to the next.
    """

    def __init__(self, family: Family, every: int):
        self._family = family
        self._exponents = Exponents(every)
        # The `inside` attribute is True while a wrapped method runs. It is thread-local, because each replica runs in
        # its own thread.
        self._thread = threading.local()
        # Whether any counted gradient was a float16 tensor.
        self._in_float16 = False

    def precision_report(self) -> PrecisionReport:
        """Report how much of each variable's last counted gradient would be lost in float16.

        Returns:
            The report, which contains plain data and prints as a table.

        Raises:
            ValueError: no gradients have been counted yet.
            RuntimeError: the method is called while a graph is being built, or in a TF1 graph without a default
                session.
        """
        return PrecisionReport(self.counts())

    def counts(self) -> ExponentCounts:
        """Return the most recent exponent counts.

        Raises:
            ValueError: no gradients have been counted yet.
            RuntimeError: the method is called while a graph is being built, or in a TF1 graph without a default
                session.
        """
        require_values("precision_report")
        counts = self._exponents.last()
        if counts is None:
            raise ValueError(
                "precision_report() needs at least one step, but the optimizer has taken none inside the block of "
                "probe(). Steps of a tf.function that was traced before the block are not counted: trace it in the "
                "block, or compile the Keras model again in the block."
            )
        return dataclasses.replace(counts, full_precision=not self._in_float16)

    def count_exponents(self) -> None:
        """Count the gradients in the next step, and then again at intervals of `every` steps."""
        self._exponents.count_next()

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the optimizer. The result counts the gradients in its arguments, then calls the method.

        Args:
            method: a bound method that takes gradients and variables, or (gradient, variable) pairs.
        """

        @do_not_convert
        def counted(*args: Any, **kwargs: Any) -> Any:
            # If one wrapped method calls another, the outer method has already counted the gradients.
            if getattr(self._thread, "inside", False) or tf.distribute.in_cross_replica_context():
                return method(*args, **kwargs)
            variables = [*args[1:2], *(kwargs[name] for name in _SECOND if name in kwargs)]
            named = [name for name in _FIRST if name in kwargs]
            if not args and not named:
                # The call passes no gradients. Let the optimizer raise its own error.
                return method(*args, **kwargs)
            given = list(args[0] if args else kwargs.pop(named[0]))
            # Pass the list to the optimizer, because the original argument may be an iterator that is now exhausted.
            args = (given, *args[1:])
            counted_first = self._record(given, variables) if given else []
            self._thread.inside = True
            try:
                with tf.control_dependencies(counted_first):
                    return method(*args, **kwargs)
            finally:
                self._thread.inside = False

        return counted

    def _record(self, given: list[Any], variables: list[Any]) -> list[Any]:
        """Count gradients by exponent. `given` is a list of gradients, or of (gradient, variable) pairs."""
        if isinstance(given[0], (tuple, list)):
            gradients, known_variables = unzip(given)
        else:
            given_or_known = variables[0] if variables and variables[0] is not None else self._family.known_variables()
            gradients, known_variables = gradients_lib.floating(given), list(given_or_known or [])
        self._in_float16 |= any(gradient is not None and gradient.dtype == tf.float16 for gradient in gradients)
        factor = getattr(self._family.inner, "loss_scale_factor", None) or 1.0
        return self._exponents.record(lambda: names_of(known_variables), lambda: gradients, lambda: tf.constant(factor))


#: The optimizer methods that receive the gradients of a step.
_METHODS = ("apply_gradients", "apply")
#: The names under which `apply_gradients` and `apply` take the gradients as a keyword argument.
_FIRST = ("grads_and_vars", "grads", "updates")
#: The names under which `apply` takes the variables as a keyword argument.
_SECOND = ("trainable_variables", "parameters")
