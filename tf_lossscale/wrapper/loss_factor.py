"""The factor by which a step multiplies its loss, and by which it later divides the gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas


class LossFactor:
    """Remembers the factor by which each thread multiplied its last loss.

    Under a ParameterServerStrategy, another worker may change the scale after a step has scaled its loss and before it
    unscales its gradients.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> LossFactor:
        return LossFactor()

    def for_loss(self, current: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return the factor to multiply a loss by."""
        factor = current()
        if replicas.workers_step_alone():
            self._thread.factor = factor
        return factor

    def for_gradients(self, current: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return the factor by which this step's loss was multiplied.

        It is the current factor, because the scale changes only at the end of a step. Under a ParameterServerStrategy,
        it is the factor that this thread remembers.
        """
        factor: Any = getattr(self._thread, "factor", None)
        if factor is None or not replicas.workers_step_alone():
            return current()
        if getattr(factor, "graph", None) is (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()):
            return factor
        logging.log_first_n(
            logging.WARNING,
            "The loss was scaled in a different tf.function from the one that unscales its gradients. The gradients "
            "are divided by the current loss scale, but another worker may have changed the scale in between. Scale "
            "the loss in the function that unscales the gradients.",
            1,
        )
        return current()
