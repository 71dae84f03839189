"""Report a stall: a hundred skipped steps in a row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import compiled, operations
from tf_lossscale.core.state import DynamicLossScale
from tf_lossscale.core.variables import plain, unless, value_or_zero

#: Steps skipped in a row that make a stall, wherever the scale stands.
PATIENCE = 100


class OnFloor:
    """Warns, raises or calls a function, once for each stall; a step that succeeds ends one.

    >>> OnFloor("warn").action
    'warn'

    Args:
        action: "warn", "raise", or a function of the optimizer.

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, action: str | Callable[[Any], Any]):
        if action not in ("warn", "raise") and not callable(action):
            raise ValueError(
                f"`on_floor` must be 'warn', 'raise' or a function of the optimizer, but got: {action!r}. "
                "It says what happens when 100 steps in a row were skipped."
            )
        self.action = action

    def prepare(self, scale: Any) -> None:
        """Makes the variable that notes whether it has acted: no step has to make it.

        Args:
            scale: the optimizer's loss scale.
        """
        if isinstance(scale, DynamicLossScale):
            scale.told_of_stall(self.action)

    def look(self, optimizer: Any, scale: Any) -> None:
        """Acts if training has stalled. Reads variables, and so waits for the device; nothing in a graph.

        Args:
            optimizer: the one to speak of.
            scale: its loss scale; only a `DynamicLossScale` is looked at.

        Raises:
            FloatingPointError: training has stalled, and the action is "raise".
        """
        if not isinstance(scale, DynamicLossScale) or not tf.executing_eagerly() or replicas.in_one_of_several():
            return
        in_a_row = plain(scale.last_step_skipped) and plain(scale.skipped_in_a_row)
        told = scale.told_of_stall(self.action)
        if in_a_row >= PATIENCE and not plain(told):
            told.assign(True)
            self._act(optimizer, in_a_row, scale)

    def watch(self, optimizer: Any, scale: Any) -> list[Any]:
        """Acts, in a graph, if training has stalled before this step; called in the branch that skips it.

        Where XLA compiles nothing leaves the device, and eager steps are looked at when they are complete: there it
        only notes that a new stall has not been told of.

        Args:
            optimizer: the one to speak of.
            scale: its loss scale.

        Returns:
            The operations that do it: what this step changes has to wait for them.
        """
        if not isinstance(scale, DynamicLossScale):
            return []
        told = scale.told_of_stall(self.action)
        in_a_row = scale.skipped_before()
        was_told = tf.logical_and(value_or_zero(told), in_a_row >= PATIENCE)
        noted = told.assign(was_told)
        if tf.executing_eagerly():
            return []
        if not self._acts_in_this_graph(told):
            return operations(noted)
        with tf.control_dependencies(operations(noted)):
            return unless(
                tf.logical_or(was_told, in_a_row < PATIENCE),
                lambda: _outside_xla(lambda: self._act_in_graph(optimizer, scale, in_a_row)),
            )

    def _acts_in_this_graph(self, told: tf.Variable) -> bool:
        if compiled() or replicas.workers_step_alone():
            return False
        if isinstance(told, tf.experimental.dtensor.DVariable):  # a mesh takes no text
            return False
        return not callable(self.action) or tf.compat.v1.executing_eagerly_outside_functions()

    def _act_in_graph(self, optimizer: Any, scale: DynamicLossScale, in_a_row: tf.Tensor) -> Any:
        with tf.control_dependencies(operations(scale.told_of_stall(self.action).assign(True))):
            if callable(self.action):
                return tf.numpy_function(lambda: self.action(optimizer), [], [])
            message = MESSAGE.format("{}", "{}", f"{scale.rules.min_scale:g}")
            message = tf.strings.format(message, (in_a_row, scale()))
            if self.action == "raise":
                return tf.debugging.Assert(False, [message])
            return tf.print(tf.strings.join(["WARNING: ", message]), output_stream=sys.stderr)

    def _act(self, optimizer: Any, in_a_row: int, scale: DynamicLossScale) -> None:
        if callable(self.action):
            self.action(optimizer)
            return
        message = MESSAGE.format(in_a_row, f"{plain(scale()):g}", f"{scale.rules.min_scale:g}")
        if self.action == "raise":
            raise FloatingPointError(message)
        logging.warning("%s", message)


def _outside_xla(act: Callable[[], Any]) -> tf.Tensor:
    """Does something unless a function that was traced without XLA is called in one that XLA compiles.

    There `DeviceIndex` is by its definition the length of the list, and XLA leaves out the case that is not taken.
    """

    def acted() -> tf.Tensor:
        with tf.control_dependencies([act()]):
            return tf.constant(True)

    with tf.device("cpu:0"):
        return tf.switch_case(tf.raw_ops.DeviceIndex(device_names=["CPU"]), [acted], default=lambda: tf.constant(True))


WHAT_TO_TRY = (
    "Look for NaN in the data and in the loss; find the variables with LossScaleOptimizer(..., diagnose=True) and "
    "overflow_report(); lower the learning rate, keep the layers that overflow in float32 or bfloat16, or let the "
    "scale sink further with min_scale."
)
MESSAGE = (
    "The last {} steps were all skipped. The loss scale is {} now, and is never lowered below {}. The gradients are "
    f"not finite, and training does not move. {WHAT_TO_TRY}"
)
