"""The global norm of a step's gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Return the global norm of the gradients.

    >>> global_norm([tf.constant([3.0]), None, tf.constant([4.0])]).numpy().item()
    5.0

    Args:
        gradients: tensors, IndexedSlices or None.

    Returns:
        A float32 scalar tensor, which is infinite or NaN if any gradient contains infinity or NaN.
    """
    wide = [tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float32) for g in gradients if g is not None]
    return tf.linalg.global_norm(wide) if wide else tf.constant(0.0)
