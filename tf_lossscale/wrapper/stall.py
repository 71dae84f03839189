"""Reports when training has stalled, which means that many steps in a row were skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import in_xla_context
from tf_lossscale.core.loss_scale import current_scale
from tf_lossscale.core.variables import as_number, unless, value_or_zero

#: The default number of skipped steps in a row after which training counts as stalled.
PATIENCE = 100


class Stall:
    """Warns, raises an error or calls a function when training stalls, that is, when many steps in a row are skipped.

    Each stall is reported once. An applied step ends the stall.
    """

    def __init__(self, action: str | Callable[[Any], Any], steps: Any = PATIENCE):
        if action not in ("warn", "raise") and not callable(action):
            raise ValueError(
                f"`on_stall` must be 'warn', 'raise' or a function that takes the optimizer, but got: {action!r}. "
                "It determines what happens after `stall_steps` skipped steps in a row."
            )
        self.action = action
        self.steps: int = errors.whole_number("stall_steps", steps, "The default is 100.", least=1)
        # The number of the step before the stall that was reported last.
        self._reported: int | None = None
        # The number of the step before the stall in the state that was loaded last, until it is reported.
        self._loaded: int | None = None
        # Whether a step was traced that cannot report a stall itself, for example because XLA compiles it.
        self._traced_in_silence = False

    def after_step(self, optimizer: Any) -> None:
        """Report a stall that begins with the step just skipped, or a loaded one. Call this in eager mode."""
        in_a_row, began = self._now(optimizer)
        if in_a_row == self.steps or began == self._loaded:
            # The number in `_reported` may come from before `set_state` has reset the counts.
            self._reported = self._loaded = None
            self._report(optimizer)

    def after_set_state(self, optimizer: Any) -> None:
        """Warn if the state is that of a stalled run, because a tf.function only reports a stall that begins in it."""
        if not tf.executing_eagerly():
            return
        in_a_row, began = self._now(optimizer)
        if in_a_row < self.steps:
            self._reported = None
        elif began != self._reported and not optimizer._traced:
            self._loaded = began
            logging.warning("%s", self._message(optimizer, in_a_row))

    def in_graph(self, optimizer: Any) -> list[Any]:
        """Report a stall in the graph of a step. Call this in the branch that skips the step, after it was counted."""
        if not self._can_report_here(optimizer):
            self._traced_in_silence = True
            return []
        in_a_row = value_or_zero(optimizer._loss_scale.skipped_in_a_row)
        return unless(
            tf.not_equal(in_a_row, self.steps),
            lambda: _outside_xla(lambda: self._react_in_graph(optimizer, in_a_row)),
        )

    def report_silent_steps(self, optimizer: Any) -> None:
        """Report a stall of steps that could not report it. Reading the count waits for the device."""
        if self._traced_in_silence and tf.executing_eagerly():
            self._report(optimizer)

    def _report(self, optimizer: Any) -> None:
        if replicas.several_replicas() and not tf.distribute.in_cross_replica_context():
            return
        in_a_row, began = self._now(optimizer)
        if in_a_row < self.steps:
            self._reported = None
        elif began != self._reported:
            self._reported = began
            self._react(optimizer, in_a_row)

    def _now(self, optimizer: Any) -> tuple[int, int]:
        """Return how many steps in a row were skipped, and the number of the step before them."""
        in_a_row = as_number(optimizer._loss_scale.skipped_in_a_row)
        return in_a_row, as_number(optimizer._loss_scale.total_steps) - in_a_row

    def _can_report_here(self, optimizer: Any) -> bool:
        # Code that XLA compiles cannot print. The message would be a string tensor, which a DTensor mesh does not
        # support.
        if in_xla_context() or replicas.workers_step_alone():
            return False
        if isinstance(optimizer._loss_scale.skipped_in_a_row, tf.experimental.dtensor.DVariable):
            return False
        return not callable(self.action) or tf.compat.v1.executing_eagerly_outside_functions()

    def _react_in_graph(self, optimizer: Any, in_a_row: tf.Tensor) -> Any:
        if callable(action := self.action):

            def call() -> None:
                action(optimizer)

            return tf.numpy_function(call, [], [])
        message = tf.strings.format(MESSAGE.format("{}", "{}"), (in_a_row, current_scale(optimizer._loss_scale)))
        if self.action == "raise":
            return tf.debugging.Assert(False, [message])
        return tf.print(tf.strings.join(["WARNING: ", message]), output_stream=sys.stderr)

    def _message(self, optimizer: Any, in_a_row: int) -> str:
        return MESSAGE.format(in_a_row, f"{as_number(current_scale(optimizer._loss_scale)):g}")

    def _react(self, optimizer: Any, in_a_row: int) -> None:
        if callable(self.action):
            self.action(optimizer)
            return
        message = self._message(optimizer, in_a_row)
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
MESSAGE = f"The last {{}} steps were all skipped. The loss scale is {{}} now. {WHAT_TO_TRY}"
