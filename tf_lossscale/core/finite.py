"""Whether every value of every gradient is finite: exact, and one read of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Returns whether no gradient has an infinity or a NaN.

    >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
    True
    >>> bool(all_finite([tf.constant([1.0, float("inf")])]))
    False

    Args:
        gradients: tensors or IndexedSlices of any floating dtype and shape; None is skipped.
            Of IndexedSlices the values are looked at, as they are, duplicates included.

    Returns:
        A bool scalar tensor; True if there is no gradient at all.
    """
    flags = [tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients if g is not None]
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
