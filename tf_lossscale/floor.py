"""What happens when training no longer moves: every step is skipped, and the scale is as low as it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core.state import DynamicLossScale
from tf_lossscale.core.weights import plain

#: Steps skipped in a row, with the scale at its floor at their end, that make a stall.
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
                "It says what happens when every step is skipped although the loss scale is at its floor."
            )
        self.action = action
        self._acted = False

    def look(self, optimizer: Any, scale: Any) -> None:
        """Acts if training has stalled. Reads two variables, and so waits for the device; nothing in a graph.

        Args:
            optimizer: the one to speak of.
            scale: its loss scale; only a `DynamicLossScale` has a floor.

        Raises:
            FloatingPointError: training has stalled, and the action is "raise".
        """
        if not isinstance(scale, DynamicLossScale) or not tf.executing_eagerly():
            return
        in_a_row = plain(scale.last_step_skipped) and plain(scale.skipped_in_a_row)
        if in_a_row < PATIENCE:
            self._acted = False
        elif not self._acted and plain(scale()) <= scale.rules.min_scale:
            self._acted = True
            self._act(optimizer, in_a_row, scale.rules.min_scale)

    def _act(self, optimizer: Any, in_a_row: int, floor: float) -> None:
        if callable(self.action):
            self.action(optimizer)
            return
        message = (
            f"The last {in_a_row} steps were all skipped although the loss scale is at its floor of {floor:g}: the "
            f"gradients are not finite whatever the scale, and training does not move. {WHAT_TO_TRY}"
        )
        if self.action == "raise":
            raise FloatingPointError(message)
        logging.warning("%s", message)


WHAT_TO_TRY = (
    "Look for NaN in the data and in the loss; find the variables with LossScaleOptimizer(..., diagnose=True) and "
    "overflow_report(); lower the learning rate, keep the layers that overflow in float32 or bfloat16, or let the "
    "scale sink further with min_scale."
)
