"""A LossScaleOptimizer from the old argument `loss_scale`."""

from __future__ import annotations

from typing import Any

from tf_lossscale.legacy import loss_scale as loss_scale_lib
from tf_lossscale.optimizer import LossScaleOptimizer


def from_loss_scale(optimizer: Any, loss_scale: Any = "dynamic") -> Any:
    """Wraps an optimizer as `loss_scale` says, where that is known only when the program runs.

    >>> import tensorflow as tf
    >>> wrapped = from_loss_scale(tf.keras.optimizers.SGD(), 128)
    >>> wrapped.dynamic, wrapped.loss_scale.numpy().item()
    (False, 128.0)
    >>> inner = tf.keras.optimizers.SGD()
    >>> from_loss_scale(inner, None) is inner
    True

    Args:
        optimizer: an optimizer of a family that `LossScaleOptimizer` knows.
        loss_scale: "dynamic", a number, a LossScale, a config, or None for no loss scaling.

    Returns:
        A `LossScaleOptimizer`; `optimizer` itself if `loss_scale` is None.

    Raises:
        ValueError: `loss_scale` is none of these.
    """
    scale = loss_scale_lib.get(loss_scale)
    if scale is None:
        return optimizer
    return LossScaleOptimizer(optimizer, loss_scale_manager=scale)
