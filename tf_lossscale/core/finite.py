"""Whether every value of every gradient is finite: exact, and one read of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import groups


def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Returns whether no gradient has an infinity or a NaN.

    A sum is finite only if all that is summed is: so large gradients are summed, which writes nothing, and looked at
    value by value, in a conditional, only where the sum is not finite. Small ones of a shape are looked at together.

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
    given = [g for g in gradients if g is not None]
    together = groups.positions(given)
    flags = [_is_finite(groups.stacked(given, group)) for group in together]
    done = {i for group in together for i in group}
    alone = [g for i, g in enumerate(given) if i not in done]
    summed = [g for g in alone if isinstance(g, tf.IndexedSlices) or not (groups.compiled() or groups.is_small(g))]
    flags += [_is_finite(g) for g in alone if not any(g is one for one in summed)]
    if summed:
        sums = [tf.cast(_sum(g), tf.float32) for g in summed]
        sums_are_finite = tf.math.is_finite(sums[0] if len(sums) == 1 else tf.add_n(sums))
        flags.append(tf.cond(sums_are_finite, lambda: tf.constant(True), lambda: _each_is_finite(summed)))
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


def _sum(gradient: Any) -> tf.Tensor:
    """A scalar that is finite only if the gradient is; of float32's range or more."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.reduce_sum(gradient)
    values = gradient.values
    if values.dtype == tf.float16:
        sizes = tf.reduce_sum(tf.cast(tf.abs(values), tf.float32))
        return tf.where(sizes <= values.dtype.max, 0.0, float("inf"))
    # The squares' sum is finite up to 1e19: then so is every sum of rows.
    return tf.nn.l2_loss(values)


def _each_is_finite(gradients: list[Any]) -> tf.Tensor:
    flags = [
        _rows_are_finite(g.values, g.indices) if isinstance(g, tf.IndexedSlices) else _is_finite(g) for g in gradients
    ]
    return tf.reduce_all(tf.stack(flags))


def _is_finite(gradient: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(gradient))


def _rows_are_finite(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    _, positions = tf.unique(tf.reshape(indices, [-1]))
    return _is_finite(tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0]))
