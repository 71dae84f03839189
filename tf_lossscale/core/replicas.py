"""One step across replicas: reduce, agree, apply or skip under one tf.cond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import finite as finite_lib
from tf_lossscale.core import strategies
from tf_lossscale.core.state import LossScale

Gradients = list[Any]


def require_replica_context(method: str) -> None:
    """Raises if the caller is in a cross-replica context, where a step has no meaning.

    >>> require_replica_context("apply_gradients")

    Args:
        method: the method's name, for the message.

    Raises:
        ValueError: the caller is in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"{method}() must be called in a replica context. Call it inside the function that you give to "
            "strategy.run(), not directly under strategy.scope()."
        )


@strategies.explains_where_replicas_cannot_meet
def step(
    loss_scale: LossScale,
    gradients: Gradients,
    *,
    aggregate: bool,
    reduce: Callable[[Gradients], Gradients],
    apply: Callable[[Gradients], Any],
    skip: Callable[[], Any],
) -> Any:
    """Applies the gradients on all replicas, or skips them on all.

    >>> from tf_lossscale.core.state import DynamicLossScale
    >>> weight = tf.Variable(1.0)
    >>> def sgd(gradients):
    ...     weight.assign_sub(gradients[0])
    >>> _ = step(DynamicLossScale(), [tf.constant(0.25)], aggregate=True, reduce=list, apply=sgd, skip=lambda: None)
    >>> weight.numpy().item()
    0.75

    Args:
        loss_scale: decides, and is moved once.
        gradients: this replica's, tensors or IndexedSlices or None.
        aggregate: whether they still have to be summed over the replicas.
        reduce: sums them over the replicas, in a replica context.
        apply: applies reduced gradients without reducing them again, in a replica context.
        skip: what a skipped step still does, in a cross-replica context where there is one.

    Returns:
        In a legacy graph the operation to run; otherwise nothing of use.
    """
    if aggregate:
        gradients = reduce(gradients)
    if not loss_scale.may_skip:
        return apply(gradients)
    agreed = None if aggregate or not strategies.several_replicas() else _agree(finite_lib.all_finite(gradients))

    def decide(local_gradients: Gradients, apply_everywhere: Callable[[], Any]) -> Any:
        if agreed is not None:
            # As a gradient, what all replicas agree on: a loss scale may look at gradients in a way of its own.
            local_gradients = [tf.where(agreed, 0.0, float("nan"))]
        applied = loss_scale.check(local_gradients)
        done = _either(applied, apply_everywhere, skip)
        with tf.control_dependencies(done):
            return _group(loss_scale.record(applied))

    if not strategies.meet():
        return decide(gradients, lambda: apply(gradients))

    def across_replicas(strategy: tf.distribute.Strategy, per_replica: Gradients, agreed_flag: Any) -> Any:
        nonlocal agreed
        if agreed_flag is not None:
            agreed = strategy.experimental_local_results(agreed_flag)[0]
        first = [None if g is None else strategy.experimental_local_results(g)[0] for g in per_replica]
        return decide(first, lambda: strategy.extended.call_for_each_replica(apply, args=(per_replica,)))

    return tf.distribute.get_replica_context().merge_call(across_replicas, args=(gradients, agreed))


def sum_over_replicas(gradients: Gradients) -> Gradients:
    """Returns the gradients summed over all replicas; None stays None, IndexedSlices stay sparse.

    >>> [g.numpy().item() for g in sum_over_replicas([tf.constant(2.0)])]
    [2.0]

    Args:
        gradients: this replica's, tensors or IndexedSlices or None.

    Returns:
        A list of the same length.
    """
    if not tf.distribute.has_strategy():
        return gradients
    present = [g for g in gradients if g is not None]
    if not present:
        return gradients
    context = tf.distribute.get_replica_context()
    reduced = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if g is None else next(reduced) for g in gradients]


def _agree(finite: tf.Tensor) -> tf.Tensor:
    """Whether the flag is True on all replicas; the same answer on each."""
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)


def _either(applied: tf.Tensor, apply: Callable[[], Any], skip: Callable[[], Any]) -> list[Any]:
    """Runs one of the two; returns what a later operation has to wait for."""
    if tf.executing_eagerly():
        (apply if applied else skip)()
        return []

    def waited_for(branch: Callable[[], Any]) -> Callable[[], tf.Tensor]:
        def run() -> tf.Tensor:
            with tf.control_dependencies(operations(branch())):
                return tf.constant(True)

        return run

    return [tf.cond(applied, waited_for(apply), waited_for(skip))]


def operations(result: Any) -> list[Any]:
    """Returns the operations in what a step or a branch returned, in a graph.

    >>> operations(None)
    []

    Args:
        result: operations, tensors and anything else, in any structure.

    Returns:
        A list of `tf.Operation`.
    """
    found = [getattr(leaf, "op", leaf) for leaf in tf.nest.flatten(result)]
    return [operation for operation in found if isinstance(operation, tf.Operation)]


def _group(result: Any) -> Any:
    return None if tf.executing_eagerly() else tf.group(*operations(result))
