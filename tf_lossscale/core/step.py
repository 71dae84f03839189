"""Takes one step: unscales, reduces and checks the gradients, applies or skips them, and records the outcome.

Importing `core` imports `core/fast`, which registers a faster version of each function decorated with
`has_faster_twin`. In a graph, the faster versions record what a tensor was computed from (see `core.notes.origin`), for
example which stack of gradients it is a part of. `as_arguments`, `apply_or_skip` and the check then use the recorded
tensors instead of their arguments. The applied gradients are bitwise equal to the gradients that the plain functions
compute.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tf_lossscale.core import compiled_steps, finite, replicas
from tf_lossscale.core.graphs import finished, operations
from tf_lossscale.core.norm import global_norm
from tf_lossscale.core.state import LossScale
from tf_lossscale.core.twins import has_faster_twin

Gradients = list[Any]


class Update(abc.ABC):
    """The gradients of a step, and the methods that reduce, apply or skip them.

    A subclass implements the step of one optimizer, or a joint step of several optimizers.

    >>> class Descent(Update):
    ...     def __init__(self, gradients, variables):
    ...         self.gradients, self.variables = gradients, variables
    ...     def unscaled_gradients(self):
    ...         return self.gradients
    ...     def apply(self, gradients):
    ...         return [variable.assign_sub(gradient) for gradient, variable in zip(gradients, self.variables)]
    >>> Descent([], []).aggregate
    True
    """

    #: Whether the gradients still have to be summed over the replicas.
    aggregate = True
    #: Whether the step calls `observe` to record which gradients were not finite.
    observes = False
    #: What XLA needs to compile the step, or None if the step is not compiled.
    to_compile: compiled_steps.StepToCompile | None = None

    def count_exponents(self) -> list[tf.Operation]:
        """Count this replica's scaled gradients by exponent. Return the operations that update the counts."""
        return []

    @abc.abstractmethod
    def unscaled_gradients(self) -> Gradients:
        """Return this replica's unscaled gradients: tensors, IndexedSlices or None."""

    def reduce(self, gradients: Gradients) -> Gradients:
        """Sum unscaled gradients over the replicas, in a replica context."""
        return replicas.sum_over_replicas(gradients)

    def may_differ(self) -> bool:
        """Return whether the reduced gradients may differ between the replicas."""
        return not self.aggregate

    @abc.abstractmethod
    def apply(self, gradients: Gradients) -> Any:
        """Apply reduced gradients without reducing them again, in a replica context."""

    def skip(self) -> Any:
        """Update the optimizer state that changes even in skipped steps, for example the step count.

        This method is called in the cross-replica context if the step makes a merge call.
        """
        return None

    def observe(self, applied: tf.Tensor, gradients: Gradients, checked: Gradients) -> Any:
        """Record the outcome of the step.

        Args:
            applied: a bool scalar, False if the step was skipped.
            gradients: the reduced gradients.
            checked: the tensors that were checked, one for each gradient. Each of them is finite if and only if its
                gradient is finite on all replicas.
        """
        del applied, gradients, checked


def take_step(loss_scale: LossScale, update: Update) -> Any:
    """Apply the gradients on all replicas, or skip the step on all replicas.

    >>> from tf_lossscale.core.state import DynamicLossScale
    >>> class Descent(Update):
    ...     def unscaled_gradients(self):
    ...         return [tf.constant(0.25)]
    ...     def apply(self, gradients):
    ...         return weight.assign_sub(gradients[0])
    >>> weight = tf.Variable(1.0)
    >>> take_step(DynamicLossScale(), Descent())
    True
    >>> weight.numpy().item()
    0.75

    Args:
        loss_scale: the loss scale, which decides whether to apply the gradients, and then changes once.
        update: an object that provides the gradients, and methods that reduce and apply them.

    Returns:
        In eager mode, whether the step was applied. In a graph, what the caller must wait for: a tensor or operations.
    """
    # In a TF1 graph the control dependency ensures that the exponents are counted before the scale changes.
    with replicas.explaining_refused_merge_calls(), tf.control_dependencies(update.count_exponents()):
        gradients = update.unscaled_gradients()
        if update.aggregate:
            gradients = update.reduce(gradients)
        consensus = None
        if loss_scale.may_skip and replicas.several_replicas() and update.may_differ():
            # All replicas must make the same decision, so it is made from tensors that are equal on all replicas.
            all_values = loss_scale.reads_gradients or loss_scale.uses_norm
            consensus = finite.consensus(gradients, exactly=update.observes, all_values=all_values)
        finish = _finish if update.to_compile is None else _finish_compiled
        return finish(loss_scale, update, gradients, consensus)


def _finish(loss_scale: LossScale, update: Update, gradients: Gradients, consensus: Gradients | None) -> Any:
    """Check reduced gradients, apply or skip them, and record the outcome."""
    if not loss_scale.may_skip:
        updates = update.apply(gradients)
        return True if tf.executing_eagerly() else updates

    if not replicas.uses_merge_call():
        return _apply_if_finite(loss_scale, update, gradients, consensus, update.apply, gradients)
    # To apply gradients, many optimizers call merge_call, which TensorFlow refuses inside a tf.cond. The tf.cond is
    # therefore created in the cross-replica context, and its branches enter the replica context again.
    tensors, gradients_of = as_arguments(gradients, False)

    def in_cross_replica_context(strategy: tf.distribute.Strategy, per_replica: list[Any], consensus: Any) -> Any:
        def apply_on_each_replica(per_replica: list[Any]) -> Any:
            apply = lambda tensors: update.apply(gradients_of(tensors))  # noqa: E731
            return strategy.extended.call_for_each_replica(apply, args=(per_replica,))

        # `merge_call` runs this function once, with the update of the first replica. All replicas have the same
        # gradients or, if their gradients may differ, the same consensus, so the first replica's decision applies to
        # all of them.
        first = gradients_of(_first(strategy, per_replica))
        shared = None if consensus is None else _first(strategy, consensus)
        return _apply_if_finite(loss_scale, update, first, shared, apply_on_each_replica, per_replica)

    return tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(tensors, consensus))


def _apply_if_finite(
    loss_scale: LossScale,
    update: Update,
    gradients: Gradients,
    consensus: Gradients | None,
    apply: Callable[[list[Any]], Any],
    to_apply: list[Any],
) -> Any:
    """Check gradients; if they are finite, call `apply(to_apply)`, otherwise skip the step. Record the outcome."""
    to_check = gradients if consensus is None else consensus
    norm = {"norm": global_norm(to_check)} if loss_scale.uses_norm else {}
    applied = loss_scale.check(to_check, **norm)

    def skip() -> list[Any]:
        # If `update.skip` raises an error, the step is not counted as skipped.
        updates = update.skip()
        with tf.control_dependencies(operations(updates)):
            return [updates, loss_scale.skip()]

    def record() -> list[Any]:
        recorded = loss_scale.record(applied, **norm)
        return [recorded, update.observe(applied, gradients, to_check)] if update.observes else recorded

    if tf.executing_eagerly():
        # `bool` waits for the device if the check has not already done so.
        outcome = bool(applied)
        _ = apply(to_apply) if outcome else skip()
        record()
        return outcome
    with tf.control_dependencies(apply_or_skip(applied, to_apply, apply, skip)):
        return tf.group(*operations(record()))


def _first(strategy: tf.distribute.Strategy, per_replica: list[Any]) -> list[Any]:
    return [None if each is None else strategy.experimental_local_results(each)[0] for each in per_replica]


def _finish_compiled(loss_scale: LossScale, update: Update, gradients: Gradients, consensus: Gradients | None) -> Any:
    """Take the step in one function that XLA compiles. Each replica uses its own copies of the variables.

    If `CompiledSteps.compile` returns None, the step runs without XLA.
    """
    tensors, gradients_of = as_arguments(gradients, True)

    # XLA's errors contain the name of the function.
    def LossScaleOptimizer_with_jit_compile(tensors: list[tf.Tensor], consensus: Gradients | None) -> tf.Tensor:
        updates = _finish(loss_scale, update, gradients_of(tensors), consensus)
        with tf.control_dependencies(operations(updates)):
            return tf.logical_not(loss_scale.last_step_skipped) if loss_scale.may_skip else tf.constant(True)

    # In this block `uses_merge_call` returns False, so each replica makes the decision itself.
    with replicas.independent_writes():
        steps, reads, ignored = cast("compiled_steps.StepToCompile", update.to_compile)
        compiled = steps.compile(reads, LossScaleOptimizer_with_jit_compile, tensors, consensus, ignored=ignored)
        applied = None if compiled is None else compiled(tensors, consensus)
    if applied is None:
        return _finish(loss_scale, update, gradients, consensus)
    return bool(applied) if tf.executing_eagerly() else applied


# A call to this function runs its faster version in core/fast/packing.py.
@has_faster_twin
def as_arguments(gradients: Gradients, to_compile: bool) -> tuple[list[Any], Callable[[list[Any]], Gradients]]:
    """Convert gradients to tensors that can be passed to a function, and back.

    >>> tensors, gradients_of = as_arguments([None, tf.constant(2.0)], False)
    >>> len(tensors), gradients_of([tf.constant(3.0)])[1].numpy().item()
    (1, 3.0)

    Args:
        gradients: tensors, IndexedSlices or None.
        to_compile: whether XLA compiles the function that takes the tensors.

    Returns:
        A list of tensors, and a function that converts a list of the same length back to gradients.
    """

    def back(tensors: list[tf.Tensor]) -> Gradients:
        each = iter(tensors)
        return [None if gradient is None else next(each) for gradient in gradients]

    return [gradient for gradient in gradients if gradient is not None], back


# A call to this function runs its faster version in core/fast/branching.py.
@has_faster_twin
def apply_or_skip(
    applied: tf.Tensor, gradients: list[Any], apply: Callable[[Any], Any], skip: Callable[[], Any]
) -> list[Any]:
    """Apply gradients if a condition is true, otherwise skip the step. Call this in a graph.

    >>> weight = tf.Variable(1.0)
    >>> @tf.function
    ... def take(applied):
    ...     apply_or_skip(applied, [tf.constant(0.25)], lambda gradients: weight.assign_sub(gradients[0]), lambda: None)
    >>> take(tf.constant(False))
    >>> take(tf.constant(True))
    >>> weight.numpy().item()
    0.75

    Args:
        applied: bool scalar tensor.
        gradients: the gradients to pass to `apply`.
        apply: a function of the gradients, called if `applied` is True.
        skip: a function without arguments, called if `applied` is False.

    Returns:
        Tensors that later operations have to wait for.
    """
    return [tf.cond(applied, lambda: finished(apply(gradients)), lambda: finished(skip()))]
