"""One training step, which is applied on all replicas or skipped on all of them.

::

    step(gradients, apply, skip, aggregate):
        sum the gradients over the replicas, unless `aggregate` is False
        apply_or_skip(gradients):  applied = check(gradients)
                                   if applied:  apply(gradients), then count the step
                                   otherwise:   count the step, then skip()
                                   move(applied)

In eager mode `apply_or_skip` is an `if` of Python, in a graph it is one `tf.cond`. Without merge calls, it runs on each
replica. With them, it runs once, in the cross-replica context, and checks the first replica's gradients. TensorFlow
refuses the merge calls of optimizers inside a tf.cond, so the branch that applies the step enters the replica context
again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas, scaling
from tf_lossscale.core.finite import nonfinite_kind
from tf_lossscale.core.graphs import (
    finished,
    in_xla_context,
    operations,
    outside_xla,
    runs_in_order,
    through_conditional,
)
from tf_lossscale.core.variables import as_number, unless

#: After this many skipped steps in a row, a warning says so.
STALL = 100
WHAT_TO_TRY = (
    "Look for NaN in the data, in the loss and in derivatives, such as that of tf.norm at zero; find the variables "
    "with LossScaleOptimizer(..., diagnose=True) and overflow_report(); lower the learning rate, keep the layers that "
    "overflow in float32 or bfloat16, lower initial_scale if the scale is fixed, or lower min_scale."
)
_STALLED = f"The last {STALL} steps were all skipped. The loss scale is {{}} now. {WHAT_TO_TRY}"

# Weak references to the open blocks of `keep_state` in all threads, by the ids of the blocks. One that an interrupt has
# left behind disappears with its object. Each access is one atomic operation of the dict: an interrupt could prevent
# the release of a lock.
_watchers: dict[int, weakref.ref[Any]] = {}


def watch(watcher: Any) -> None:
    """Call the methods `_step_starts` and `_skipped` of an object in each step for which its `_is_inside` is true.

    `_step_starts` is called at the start of the step, and `_skipped` in the branch that skips it.
    """
    key = id(watcher)
    _watchers[key] = weakref.ref(watcher, lambda _: _watchers.pop(key, None))


def unwatch(watcher: Any) -> None:
    """End what `watch` began."""
    _watchers.pop(id(watcher), None)


def _watching() -> list[Any]:
    """Return the watchers of the calling thread's step. After a merge call, return the watchers of all replicas."""
    watchers = [reference() for reference in list(_watchers.values())]
    return [watcher for watcher in watchers if watcher is not None and watcher._is_inside()]


def step(
    loss_scale: Any,
    gradients: list[Any],
    apply: Callable[[list[Any]], object],
    skip: Callable[[], object] | None = None,
    aggregate: bool = True,
) -> Any:
    """Take a step with a loss scale; see `LossScale.step`."""
    replicas.require_replica_context("step")
    loss_scale._factors.step(loss_scale)
    for watcher in _watching():
        watcher._step_starts()
    gradients = scaling.floating(gradients)
    with replicas.explaining_refused_merge_calls():
        if aggregate:
            gradients = replicas.sum_over_replicas(gradients)
        if not loss_scale.may_skip:
            return _outcome_after(apply(gradients), True)
        # `prepare` creates all variables, so it is enough to look for one of them. A merge call in `once` creates them
        # only after all replicas have looked, so either all replicas call `once` or none.
        if loss_scale._is_missing("step_counts"):
            replicas.once(loss_scale.prepare)
        # Gradients that the caller has summed may differ between the replicas.
        are_equal = aggregate or not replicas.several_replicas()
        to_check = gradients if are_equal else _values_to_check(loss_scale, gradients)
        if not replicas.uses_merge_call():
            return _apply_or_skip(loss_scale, to_check, lambda: apply(gradients), skip)

        # The functions are the first replica's. `apply` is called on each replica, with that replica's gradients.
        def across_replicas(strategy: tf.distribute.Strategy, per_replica: list[Any], to_check: list[Any]) -> Any:
            # The first replica's values decide for all. A value is non-finite if its gradient is, on any replica.
            local = strategy.experimental_local_results
            first = [None if each is None else local(each)[0] for each in to_check]
            apply_on_each = lambda: strategy.extended.call_for_each_replica(apply, args=(per_replica,))  # noqa: E731
            return _apply_or_skip(loss_scale, first, apply_on_each, skip)

        return tf.distribute.get_replica_context().merge_call(across_replicas, args=(gradients, to_check))


def _apply_or_skip(loss_scale: Any, to_check: list[Any], apply: Any, skip: Any) -> Any:
    """Apply or skip the step as `check` says, count it, and move the scale. Return whether it was applied."""
    applied = _checked(loss_scale, to_check)

    def apply_and_count() -> list[Any]:
        return [apply(), loss_scale._count_step(applied=True)]

    def skip_and_count() -> list[Any]:
        counted = loss_scale._count_step(applied=False)
        with tf.control_dependencies(operations(counted)):
            return [counted, skip and skip(), [watcher._skipped() for watcher in _watching()], _warnings(loss_scale)]

    if tf.executing_eagerly():
        # `bool` waits for the device if the check has not already done so.
        _ = apply_and_count() if bool(applied) else skip_and_count()
        return _outcome_after(loss_scale.move(applied), applied)

    def skipped() -> tf.Tensor:
        with tf.control_dependencies(operations(skip_and_count())):
            return through_conditional(applied)

    outcome = tf.cond(applied, lambda: finished(apply_and_count()), skipped)
    with tf.control_dependencies([outcome]):
        moved = loss_scale.move(outcome)
        if loss_scale._overrides("move") and not (runs_in_order() or operations(moved)):
            raise TypeError(
                f"{type(loss_scale).__name__}.move() must return the results of `assign` in a TF1 graph, where a "
                f"session runs nothing else, but returned: {moved!r}."
            )
        return _outcome_after([outcome, moved], outcome)


def _outcome_after(results: Any, applied: Any) -> Any:
    """Return whether the step was applied: in a graph a tensor that is available when the step is complete."""
    if tf.executing_eagerly():
        return bool(applied)
    with tf.control_dependencies(operations(results)):
        return tf.identity(applied)


def _checked(loss_scale: Any, gradients: list[Any]) -> tf.Tensor:
    """Return the decision of `check`, which is the same on all replicas. Raise an error if it is no bool scalar."""
    decision = loss_scale.check(gradients)
    if decision is None or isinstance(decision, tf.Operation):
        raise TypeError(
            f"{type(loss_scale).__name__}.check() must return whether to apply the step, as a bool scalar tensor, but "
            f"returned: {decision!r}."
        )
    decision = tf.cast(decision, tf.bool)
    if loss_scale._overrides("check") and replicas.several_replicas() and not replicas.uses_merge_call():
        # Without a merge call, every replica has made its own decision. A step is applied if all would apply it.
        [refusals] = replicas.all_reduce([tf.cast(tf.logical_not(decision), tf.float32)])
        decision = tf.equal(refusals, 0)
    if decision.shape.rank not in (0, None):
        raise ValueError(
            f"{type(loss_scale).__name__}.check() must return a bool scalar tensor, but returned one of shape "
            f"{decision.shape}. Reduce it, for example with tf.reduce_all."
        )
    return decision


def _values_to_check(loss_scale: Any, gradients: list[Any]) -> list[Any]:
    """Return values to check in place of gradients that may differ between the replicas.

    A value is finite if and only if its gradient is finite on all replicas. If `check` is overridden, the values are
    this replica's gradients, with infinity or NaN added to all values of a gradient that has one on any replica.
    """
    kinds = kinds_on_all_replicas(gradients)
    if not loss_scale._overrides("check"):
        return kinds

    def with_kind(gradient: Any, kind: Any) -> Any:
        return scaling.over_values(lambda values: values + tf.cast(kind, values.dtype), gradient)

    return list(map(with_kind, gradients, kinds))


def kinds_on_all_replicas(gradients: list[Any]) -> list[Any]:
    """Return a scalar for each gradient that is 0 if the gradient is finite on all replicas, else infinity or NaN."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return gradients
    [kinds] = replicas.all_reduce([tf.stack([nonfinite_kind(gradient) for gradient in present])])
    kind_of_each = iter(tf.unstack(kinds))
    return [None if gradient is None else next(kind_of_each) for gradient in gradients]


def _warnings(loss_scale: Any) -> Any:
    """Warn of a stall, and of a scale with which every step is skipped. This is called in skipped steps only."""
    # There are no strings on a DTensor mesh, and the workers of a parameter server share the counts.
    if isinstance(loss_scale.step_counts, tf.experimental.dtensor.DVariable) or replicas.workers_step_alone():
        return None
    return [_warn_of_stall(loss_scale), loss_scale._warn_in_skipped_step()]


def _warn_of_stall(loss_scale: Any) -> Any:
    """Warn once in each stall, when the last `STALL` steps were all skipped."""
    in_a_row = loss_scale.skipped_in_a_row
    if not tf.executing_eagerly():
        return print_unless(tf.not_equal(in_a_row, STALL), _STALLED, loss_scale._current())
    if as_number(in_a_row) == STALL:
        logging.warning("%s", _STALLED.format(f"{as_number(loss_scale._current()):g}"))
    return None


def print_unless(fine: Any, text: str, value: tf.Tensor) -> Any:
    """In a graph, print a warning with a value on stderr unless `fine` is True. XLA cannot print."""
    if fine is True or in_xla_context():
        return None

    def warn() -> tf.Operation:
        return tf.print(tf.strings.format(f"WARNING: {text}", value), output_stream=sys.stderr)

    return unless(fine, lambda: outside_xla(warn))
