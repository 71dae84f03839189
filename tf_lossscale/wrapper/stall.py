"""Reports when training has stalled, which means that 100 steps in a row were skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import in_xla_context, operations
from tf_lossscale.core.variables import as_number, unless, value_or_zero

#: The number of skipped steps in a row after which training counts as stalled.
PATIENCE = 100


class Stall:
    """Warns, raises an error or calls a function when training stalls, that is, when 100 steps in a row are skipped.

    Each stall is reported once. An applied step ends the stall.

    >>> Stall("warn").action
    'warn'

    Args:
        action: "warn", "raise", or a function that takes the optimizer.

    Raises:
        ValueError: `action` has any other value.
    """

    def __init__(self, action: str | Callable[[Any], Any]):
        if action not in ("warn", "raise") and not callable(action):
            raise ValueError(
                f"`on_stall` must be 'warn', 'raise' or a function that takes the optimizer, but got: {action!r}. "
                "It determines what happens after 100 skipped steps in a row."
            )
        self.action = action

    def prepare(self, scale: Any) -> None:
        """Create the variable that records whether a stall was reported, so that no step has to create it.

        Args:
            scale: the optimizer's loss scale.
        """
        if scale.lowest is not None:
            scale.stall_reported(self.action)

    def report(self, optimizer: Any) -> None:
        """Check for a stall in eager mode, and report it. The check reads variables, and so waits for the device.

        Args:
            optimizer: the LossScaleOptimizer. If its loss scale has no lower bound (`lowest` is None), the method does
                nothing.

        Raises:
            FloatingPointError: training has stalled, and the action is "raise".
        """
        scale = optimizer._loss_scale
        in_a_replica = replicas.several_replicas() and not tf.distribute.in_cross_replica_context()
        if scale.lowest is None or not tf.executing_eagerly() or in_a_replica:
            return
        in_a_row = as_number(scale.last_step_skipped) and as_number(scale.skipped_in_a_row)
        reported = scale.stall_reported(self.action)
        if in_a_row >= PATIENCE and not as_number(reported):
            reported.assign(True)
            self._react(optimizer, in_a_row)

    def before_skip(self, optimizer: Any) -> list[Any]:
        """Return operations for the step's graph that report a stall, if training had stalled before this step.

        Call this method in the branch that skips a step. In eager mode and under XLA, the method only updates the flag
        that marks the current stall as reported: eager steps call `report` when they end, and code compiled by XLA
        cannot print.

        Args:
            optimizer: the LossScaleOptimizer that skips the step.

        Returns:
            The operations to run before this step changes anything.
        """
        scale = optimizer._loss_scale
        if scale.lowest is None:
            return []
        reported = scale.stall_reported(self.action)
        in_a_row = scale.skipped_before()
        was_reported = tf.logical_and(value_or_zero(reported), in_a_row >= PATIENCE)
        reset = reported.assign(was_reported)
        if tf.executing_eagerly():
            return []
        if not self._can_report_here(reported):
            return operations(reset)
        with tf.control_dependencies(operations(reset)):
            return unless(
                tf.logical_or(was_reported, in_a_row < PATIENCE),
                lambda: _outside_xla(lambda: self._react_in_graph(optimizer, in_a_row)),
            )

    def _can_report_here(self, reported: tf.Variable) -> bool:
        if in_xla_context() or replicas.workers_step_alone():
            return False
        # A stall cannot be reported on a DTensor mesh: the message would be a string tensor, which a mesh does not
        # support.
        if isinstance(reported, tf.experimental.dtensor.DVariable):
            return False
        return not callable(self.action) or tf.compat.v1.executing_eagerly_outside_functions()

    def _react_in_graph(self, optimizer: Any, in_a_row: tf.Tensor) -> Any:
        scale = optimizer._loss_scale
        with tf.control_dependencies(operations(scale.stall_reported(self.action).assign(True))):
            if callable(action := self.action):

                def call() -> None:
                    action(optimizer)

                return tf.numpy_function(call, [], [])
            message = MESSAGE.format("{}", "{}", f"{scale.lowest:g}")
            message = tf.strings.format(message, (in_a_row, scale()))
            if self.action == "raise":
                return tf.debugging.Assert(False, [message])
            return tf.print(tf.strings.join(["WARNING: ", message]), output_stream=sys.stderr)

    def _react(self, optimizer: Any, in_a_row: int) -> None:
        if callable(self.action):
            self.action(optimizer)
            return
        scale = optimizer._loss_scale
        message = MESSAGE.format(in_a_row, f"{as_number(scale()):g}", f"{scale.lowest:g}")
        if self.action == "raise":
            raise FloatingPointError(message)
        logging.warning("%s", message)


def _outside_xla(act: Callable[[], Any]) -> tf.Tensor:
    """Call `act` in a branch of the graph that is not run under XLA. Return a tensor that depends on the branch.

    Under XLA, the `DeviceIndex` operation always returns the length of its list of devices. That index selects the
    default branch, which does nothing.
    """

    def acted() -> tf.Tensor:
        with tf.control_dependencies([act()]):
            return tf.constant(True)

    with tf.device("cpu:0"):
        return tf.switch_case(tf.raw_ops.DeviceIndex(device_names=["CPU"]), [acted], default=lambda: tf.constant(True))


WHAT_TO_TRY = (
    "Look for NaN in the data and in the loss; find the variables with LossScaleOptimizer(..., diagnose=True) and "
    "overflow_report(); lower the learning rate, keep the layers that overflow in float32 or bfloat16, lower "
    "initial_scale if the scale is fixed, or lower min_scale."
)
MESSAGE = (
    "The last {} steps were all skipped. The loss scale is {} now, and is never lowered below {}. The gradients are "
    f"not finite. {WHAT_TO_TRY}"
)
