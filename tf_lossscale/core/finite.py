"""Checks whether a step is finite: every value of every reduced gradient must be finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.scaling import over_values
from tf_lossscale.core.twins import has_faster_twin


# A call to this function runs its faster version in core/fast/checks.py.
@has_faster_twin
def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Return whether all values of all gradients are finite.

    >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
    True
    >>> bool(all_finite([tf.constant([1.0, float("inf")])]))
    False

    Args:
        gradients: tensors or IndexedSlices of any floating-point dtype and shape, or None. Rows of IndexedSlices with
            the same index are added up before the check, because their sum is what an optimizer applies.

    Returns:
        A bool scalar tensor, which is True if there is no gradient at all.
    """
    flags = [is_finite(gradient) for gradient in gradients if gradient is not None]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def is_finite(gradient: Any) -> tf.Tensor:
    """Return whether every value of one gradient is finite.

    >>> bool(is_finite(tf.constant([1.0, float("nan")])))
    False

    Args:
        gradient: a tensor or IndexedSlices.

    Returns:
        A bool scalar tensor.
    """
    values = _sums_of_rows(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_all(tf.math.is_finite(values))


def nonfinite_kind(gradient: Any) -> tf.Tensor:
    """Return NaN if a gradient contains NaN; otherwise infinity if it contains infinity; otherwise 0.

    >>> [nonfinite_kind(tf.constant([1.0, x])).numpy().item() for x in (2.0, -float("inf"), float("nan"))]
    [0.0, inf, nan]

    Args:
        gradient: a tensor or IndexedSlices. If the sum of rows with the same index overflows, it counts as infinity.

    Returns:
        A float32 scalar tensor.
    """
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    bad = tf.where(tf.reduce_any(tf.math.is_nan(values)), float("nan"), float("inf"))
    return tf.where(all_finite([gradient]), 0.0, bad)


def consensus(gradients: list[Any], *, exactly: bool, all_values: bool) -> list[Any]:
    """Return tensors that tell all replicas whether the gradients are finite.

    The tensors are equal on all replicas. They are finite if and only if the gradients of all replicas are finite.

    >>> gradients = [tf.constant([float("inf")])]
    >>> [each.numpy().item() for each in consensus(gradients, exactly=True, all_values=False)]
    [inf]

    Args:
        gradients: this replica's tensors, IndexedSlices or None.
        exactly: whether to return the `nonfinite_kind` of each gradient. If both this argument and `all_values` are
            False, a single 0 or NaN is returned for all gradients.
        all_values: whether to return this replica's gradients, which the caller must have summed over the replicas. If
            a gradient contains infinity or NaN on any replica, infinity or NaN is added to it on all replicas.

    Returns:
        If `exactly` and `all_values` are False, a list with a single tensor. Otherwise, a list with an item for each
        gradient; the item is None if the gradient is None.
    """
    if not exactly and not all_values:
        return replicas.all_reduce([tf.where(all_finite(gradients), 0.0, float("nan"))])
    [summed] = replicas.all_reduce([tf.stack([nonfinite_kind(g) for g in gradients if g is not None])])
    each = iter(tf.unstack(summed))
    kinds = [None if g is None else next(each) for g in gradients]
    if not all_values:
        return kinds

    def with_kind(gradient: Any, kind: Any) -> Any:
        return over_values(lambda values: values + tf.cast(kind, values.dtype), gradient)

    return list(map(with_kind, gradients, kinds))


def _sums_of_rows(gradient: tf.IndexedSlices) -> tf.Tensor:
    values = gradient.values
    _, positions = tf.unique(tf.reshape(gradient.indices, [-1]))
    return tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0])
