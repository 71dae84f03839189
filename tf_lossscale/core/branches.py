"""Doing a thing only if a tensor says so, in the form that costs the least where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import groups

#: What a branch does; it is given the number 1, or None where it needs none: see `at_most_once`.
Branch = Callable[[tf.Tensor | None], Any]


def loops() -> bool:
    """Returns whether `at_most_once` is to take the place of a `tf.cond`: where XLA compiles for the CPU.

    XLA makes a conditional of its own accord into a choice between old and new values of all variables, which costs a
    small optimizer as much as the step. What is in a loop it leaves there, and works on in place.

    >>> loops()
    False
    """
    return compiled_for_the_cpu() and not tf.distribute.has_strategy()


def compiled_for_the_cpu() -> bool:
    """Returns whether XLA compiles the function that is being traced, and there is no other device than the CPU.

    >>> compiled_for_the_cpu()
    False
    """
    return groups.compiled() and _only_the_cpu()


def at_most_once(predicate: tf.Tensor, function: Callable[[tf.Tensor], tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """Returns what a function returns if a predicate is true, by a loop of one round or none.

    >>> at_most_once(tf.constant(True), lambda one: 2.0 * one, tf.constant(0.0)).numpy().item()
    2.0

    Args:
        predicate: bool scalar.
        function: takes a float32 scalar, which is 1, though a compiler does not see that. What it multiplies by it is
            not taken out of the loop, and done whether or not there is a round.
        otherwise: what is returned if the predicate is false; of the same shape and dtype.
    """

    def body(done: tf.Tensor, result: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del result
        return done + 1, function(tf.cast(1 - done, tf.float32))

    def go_on(done: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        del result
        return tf.logical_and(predicate, done < 1)

    return tf.while_loop(go_on, body, [tf.constant(0), otherwise])[1]


def either(predicate: tf.Tensor, branch: Branch, other: Branch, as_one_call: bool) -> list[Any]:
    """Runs one of two branches in a graph, and returns what a later operation has to wait for.

    >>> @tf.function
    ... def positive(x):
    ...     with tf.control_dependencies(either(x > 0, lambda _: tf.print("yes"), lambda _: tf.print("no"), False)):
    ...         return tf.identity(x)
    >>> positive.get_concrete_function(tf.constant(1.0)).output_shapes
    TensorShape([])

    Args:
        predicate: bool scalar.
        branch: what to do if it is true.
        other: what to do if it is false; something small.
        as_one_call: whether the operations in the branches are so small that taking up what they use is what costs.
    """
    if loops():
        done = at_most_once(predicate, lambda one: _finished(branch, one), tf.constant(False))
        return [done, tf.cond(predicate, lambda: tf.constant(True), lambda: _finished(other))]
    outcome = tf.cond(predicate, lambda: _finished(branch), lambda: _finished(other))
    return [_called(outcome) if as_one_call else outcome]


def _finished(branch: Branch, one: tf.Tensor | None = None) -> tf.Tensor:
    with tf.control_dependencies(operations(branch(one))):
        return tf.constant(True)


def _called(outcome: tf.Tensor) -> tf.Tensor:
    """Has a tf.cond run as an operation that calls one of two functions, not as a switch in front of each input.

    With hundreds of variables that is a good part of a small step. A function that is called so runs on one device:
    only where there is but one.
    """
    if groups.compiled() or tf.distribute.has_strategy() or len(tf.config.list_logical_devices()) > 1:
        return outcome
    operation = outcome.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if operation.type in ("If", "StatelessIf"):
        # Private: a test fails where the attribute is called otherwise.
        operation._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))
    return outcome


def _only_the_cpu() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


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
