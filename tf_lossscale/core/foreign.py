"""Loss scales that are not of our classes: whatever has the two methods that TensorFlow's had."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core.branches import operations
from tf_lossscale.core.state import LossScale


def adopted(value: Any) -> LossScale | None:
    """Returns an object as a loss scale, or None if it cannot be one.

    >>> class Constant:
    ...     def __call__(self):
    ...         return tf.constant(4.0)
    ...     def update(self, grads):
    ...         return None, True
    >>> adopted(Constant())().numpy().item()
    4.0
    >>> adopted(1024) is None
    True

    Args:
        value: a LossScale, or an object that is called for the scale and whose `update(grads)` moves it and returns
            an operation (None in eager mode) and whether to apply the gradients.
    """
    if isinstance(value, LossScale):
        return value
    return _Adopted(value) if callable(value) and callable(getattr(value, "update", None)) else None


class _Adopted(LossScale):
    may_skip = True
    initial_scale = float("nan")

    def __init__(self, loss_scale: Any):
        super().__init__()
        self.loss_scale = loss_scale

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.loss_scale())

    def check(self, gradients: Iterable[Any]) -> tf.Tensor:
        update, apply = self.loss_scale.update(list(gradients))
        with tf.control_dependencies([] if tf.executing_eagerly() else operations(update)):
            return tf.identity(tf.convert_to_tensor(apply))
