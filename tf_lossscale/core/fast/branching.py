"""Conditional execution in the cheapest form for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, step, variables
from tf_lossscale.core.fast import tricks
from tf_lossscale.core.fast.packing import Packed, are_small
from tf_lossscale.core.graphs import finished, in_xla_context
from tf_lossscale.core.twins import faster


@faster(step.apply_or_skip)
def apply_or_skip(
    applied: tf.Tensor, gradients: list[Any], apply: Callable[[list[Any]], Any], skip: Callable[[], Any]
) -> list[Any]:
    """Apply or skip gradients with the cheapest conditional; see `core.step.apply_or_skip`."""
    packed = Packed(gradients)

    def unpack_and_apply(one: tf.Tensor | None = None) -> Any:
        unpacked = packed.unpacked(one)
        updates = apply(unpacked)
        if "one at a time" in tricks.in_use and not in_xla_context():
            packed.one_at_a_time(unpacked)
        return updates

    if loops():
        updated = at_most_once(applied, lambda one: finished(unpack_and_apply(one)), tf.constant(False))
        return [updated, tf.cond(applied, lambda: tf.constant(True), lambda: finished(skip()))]
    # The gradients are unpacked inside the branch, so an empty list is passed here.
    outcome: list[Any] = step.apply_or_skip.plain(applied, [], lambda _: unpack_and_apply(), skip)  # type: ignore[attr-defined]
    if "one call" in tricks.in_use and are_small(gradients):
        _call(outcome[0])
    return outcome


@faster(variables.unless)
def unless(fine: tf.Tensor, change: Callable[[], Any]) -> list[tf.Operation]:
    """Change variables in a conditional that runs as a single operation; see `core.variables.unless`."""
    operations: list[tf.Operation] = variables.unless.plain(fine, change)  # type: ignore[attr-defined]
    if "one call" in tricks.in_use:
        for operation in operations:
            _call(operation.outputs[0])
    return operations


def loops() -> bool:
    """Return whether to use `at_most_once` instead of `tf.cond`, which is slower if XLA compiles for the CPU.

    XLA turns a conditional into a selection between old and new values of all variables. For a simple optimizer the
    selection takes as long as the update itself. The body of a loop, by contrast, updates the variables in place.

    >>> loops()
    False
    """
    # A loop cannot contain collective operations. The inner optimizer might use them, unless each replica writes only
    # its own copies of the variables.
    no_collectives = not tf.distribute.has_strategy() or replicas.write_independently()
    return "loop" in tricks.in_use and compiled_for_the_cpu() and no_collectives


def compiled_for_the_cpu() -> bool:
    """Return True if XLA compiles the function being traced and the machine has no accelerators.

    >>> compiled_for_the_cpu()
    False
    """
    return in_xla_context() and _only_the_cpu()


def _only_the_cpu() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def at_most_once(predicate: tf.Tensor, function: Callable[[tf.Tensor], tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """Call a function if a predicate is true, and return the result of the call.

    The call is the body of a loop with at most one iteration.

    >>> at_most_once(tf.constant(True), lambda one: 2.0 * one, tf.constant(0.0)).numpy().item()
    2.0

    Args:
        predicate: bool scalar.
        function: a function that is called with a float32 scalar tensor of value 1. XLA does not know the value, so it
            cannot move products with this tensor out of the loop.
        otherwise: the tensor to return if the predicate is false. It has the same shape and dtype as the result of
            `function`.
    """

    def body(done: tf.Tensor, result: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del result
        return done + 1, function(tf.cast(1 - done, tf.float32))

    def go_on(done: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        del result
        return tf.logical_and(predicate, done < 1)

    return tf.while_loop(go_on, body, [tf.constant(0), otherwise])[1]


def _call(outcome: tf.Tensor) -> None:
    """Make TensorFlow run a tf.cond as one operation that calls a branch, instead of adding a switch for each input.

    A branch that is called in this way runs on a single device, so programs with several devices are left unchanged.
    TF1 graphs are left unchanged, too: if user code puts this tf.cond into another, a session cannot call the branch.
    """
    if in_xla_context() or tf.distribute.has_strategy() or len(tf.config.list_logical_devices()) > 1:
        return
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return
    operation = outcome.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if operation.type in ("If", "StatelessIf"):
        # `_lower_using_switch_merge` is private. A test fails if TensorFlow renames it.
        operation._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))
