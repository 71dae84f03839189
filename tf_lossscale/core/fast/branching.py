"""Conditional execution in the cheapest form for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, step, variables
from tf_lossscale.core.fast import tricks
from tf_lossscale.core.fast.packing import Packed, are_small
from tf_lossscale.core.graphs import compiled, finished
from tf_lossscale.core.twins import faster


@faster(step.apply_or_skip)
def apply_or_skip(
    applied: tf.Tensor, gradients: list[Any], apply: Callable[[list[Any]], Any], skip: Callable[[], Any]
) -> list[Any]:
    """Apply gradients in the cheapest conditional: see `core.step.apply_or_skip`."""
    packed = Packed(gradients)
    small = are_small(gradients)

    def unpack_and_apply(one: tf.Tensor | None = None) -> Any:
        unpacked = packed.unpacked(one)
        done = apply(unpacked)
        if tricks.on("one at a time") and not compiled():
            packed.one_at_a_time(unpacked)
        return done

    if loops():
        done = at_most_once(applied, lambda one: finished(unpack_and_apply(one)), tf.constant(False))
        return [done, tf.cond(applied, lambda: tf.constant(True), lambda: finished(skip()))]
    outcome: list[Any] = step.apply_or_skip.plain(applied, [], lambda _: unpack_and_apply(), skip)  # type: ignore[attr-defined]
    if small and tricks.on("one call"):
        _call(outcome[0])
    return outcome


@faster(variables.unless)
def unless(fine: tf.Tensor, change: Callable[[], Any]) -> list[tf.Operation]:
    """Change variables in a conditional that is one operation: see `core.variables.unless`."""
    done: list[tf.Operation] = variables.unless.plain(fine, change)  # type: ignore[attr-defined]
    if tricks.on("one call"):
        for operation in done:
            _call(operation.outputs[0])
    return done


def loops() -> bool:
    """Return whether `at_most_once` is to take the place of a `tf.cond`: where XLA compiles for the CPU.

    XLA turns a conditional into a choice between old and new values of all variables, which costs a small optimizer as
    much as the step. The body of a loop stays in the loop, and works in place.

    >>> loops()
    False
    """
    alone = not tf.distribute.has_strategy() or replicas.write_independently()  # in a loop replicas cannot meet
    return tricks.on("loop") and compiled_for_the_cpu() and alone


def compiled_for_the_cpu() -> bool:
    """Return whether XLA compiles the function that is being traced, and there is no other device than the CPU.

    >>> compiled_for_the_cpu()
    False
    """
    return compiled() and _only_the_cpu()


def _only_the_cpu() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def at_most_once(predicate: tf.Tensor, function: Callable[[tf.Tensor], tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """Return what a function returns if a predicate is true, by a loop of one round or none.

    >>> at_most_once(tf.constant(True), lambda one: 2.0 * one, tf.constant(0.0)).numpy().item()
    2.0

    Args:
        predicate: bool scalar.
        function: receives an opaque 1, a float32 scalar; values multiplied by it cannot be hoisted out of the loop.
        otherwise: returned if the predicate is false; of the same shape and dtype.
    """

    def body(done: tf.Tensor, result: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del result
        return done + 1, function(tf.cast(1 - done, tf.float32))

    def go_on(done: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        del result
        return tf.logical_and(predicate, done < 1)

    return tf.while_loop(go_on, body, [tf.constant(0), otherwise])[1]


def _call(outcome: tf.Tensor) -> None:
    """Make a tf.cond one operation that calls one of two functions, not a switch in front of each input.

    A function that is called so runs on one device: only where there is but one.
    """
    if compiled() or tf.distribute.has_strategy() or len(tf.config.list_logical_devices()) > 1:
        return
    operation = outcome.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if operation.type in ("If", "StatelessIf"):
        # Private: a test fails where the attribute is called otherwise.
        operation._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))
