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
            Of IndexedSlices, rows with the same index count as their sum: that is what will be applied.

    Returns:
        A bool scalar tensor; True if there is no gradient at all.
    """
    flags = [_is_finite(g) for g in gradients if g is not None]
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def kind(gradient: Any) -> tf.Tensor:
    """Returns what is in a gradient: 0 if it is finite, NaN if it has one, else infinity.

    >>> [kind(tf.constant([1.0, x])).numpy().item() for x in (2.0, -float("inf"), float("nan"))]
    [0.0, inf, nan]

    Args:
        gradient: a tensor or IndexedSlices; of the latter, a sum of rows that overflows is an infinity.

    Returns:
        A float32 scalar tensor.
    """
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    bad = tf.where(tf.reduce_any(tf.math.is_nan(values)), float("nan"), float("inf"))
    return tf.where(all_finite([gradient]), 0.0, bad)


def _is_finite(gradient: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return _rows_are_finite(gradient.values, gradient.indices)
    return tf.reduce_all(tf.math.is_finite(gradient))


def _rows_are_finite(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    def sums_are_finite() -> tf.Tensor:
        _, positions = tf.unique(tf.reshape(indices, [-1]))
        sums = tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0])
        return tf.reduce_all(tf.math.is_finite(sums))

    # If all sizes together fit, every sum of rows does: one read, and no search for equal rows.
    wide = values.dtype if values.dtype == tf.float64 else tf.float32
    sizes = tf.reduce_sum(tf.cast(tf.abs(values), wide))
    return tf.cond(sizes <= tf.cast(values.dtype.max, wide), lambda: tf.constant(True), sums_are_finite)
