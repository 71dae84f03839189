"""The check of gradients for values that are infinite or NaN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core.graphs import in_xla_context
from tf_lossscale.core.scaling import SMALL, alike, real_parts


def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Return whether all values of all gradients are finite, as a bool scalar tensor.

    Rows of IndexedSlices with the same index are added up before the check, because their sum is what an optimizer
    applies.
    """
    summed_up = [sums_of_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    dense = [part for values in summed_up for part in real_parts(values)]
    to_check = [_stacked([dense[i] for i in at]) for at in alike(dense)]
    # A sum of squares reads the values once and writes nothing, and proves them finite if it is finite. The values are
    # looked at one by one only if it is not. XLA fuses the check of the values, which is then as cheap, and in a graph
    # the check of few values is as cheap.
    few = 0 if tf.executing_eagerly() else SMALL
    summed: list[tf.Tensor] = []
    others: list[tf.Tensor] = []
    for values in to_check:
        is_large = (values.shape.num_elements() or SMALL + 1) > few
        (summed if is_large and values.dtype in (tf.float32, tf.float64) else others).append(values)
    if not summed or in_xla_context():
        return _every_value_is_finite(to_check)
    sums = tf.add_n([tf.cast(tf.nn.l2_loss(values), tf.float32) for values in summed])
    proven = tf.logical_and(tf.math.is_finite(sums), _every_value_is_finite(others))
    return tf.cond(proven, lambda: tf.constant(True), lambda: _every_value_is_finite(to_check))


def _stacked(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Stack tensors. If a traced function has just unstacked them from one tensor, return that tensor."""
    if len(tensors) == 1:
        return tensors[0]
    unstack = getattr(tensors[0], "op", None)
    if unstack is not None and unstack.type == "Unpack" and [*map(id, unstack.outputs)] == [*map(id, tensors)]:
        return unstack.inputs[0]
    return tf.stack(tensors)


def _every_value_is_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    flags = [tf.reduce_all(tf.math.is_finite(values)) for values in tensors]
    if len(flags) == 1:
        return flags[0]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def nonfinite_kind(gradient: Any) -> tf.Tensor:
    """Return a float32 scalar, which is NaN if a gradient contains NaN, and otherwise infinity if it contains infinity.

    If all values are finite, the scalar is 0.
    """
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    has_nan = [tf.reduce_any(tf.math.is_nan(part)) for part in real_parts(values)]
    bad = tf.where(tf.reduce_any(has_nan), float("nan"), float("inf"))
    return tf.where(all_finite([gradient]), 0.0, bad)


def is_zero(gradient: Any) -> bool:
    """Return whether a gradient is known to be zero in eager mode.

    TensorFlow hands out the same tensor of zeros as the gradients of several backward passes, so it tells nothing about
    the loss. Zeros are the same at each loss scale.
    """
    values = getattr(gradient, "values", gradient)
    is_eager = isinstance(values, tf.Tensor) and not tf.is_symbolic_tensor(values)
    return is_eager and not bool(tf.reduce_any(values != 0))


def sums_of_rows(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Add up the rows of IndexedSlices that have the same index.

    The result has as many rows; those left over are zeros.
    """
    values = gradient.values
    _, positions = tf.unique(tf.reshape(gradient.indices, [-1]))
    return tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0])
