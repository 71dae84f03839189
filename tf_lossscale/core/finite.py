"""Whether every value of every gradient is finite: exact, and one read of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import branches, groups
from tf_lossscale.core.origins import Scaled


def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Returns whether no gradient has an infinity or a NaN.

    A sum is finite only if all that is summed is: so large gradients are summed, which writes nothing, and looked at
    value by value, in a conditional, only where the sum is not finite. Small ones of a shape are looked at together.

    >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
    True
    >>> bool(all_finite([tf.constant([1.0, float("inf")])]))
    False

    Args:
        gradients: tensors or IndexedSlices of any floating dtype and shape; None is skipped. In place of a tensor there
            may be the `Scaled` that it is made from.
            Of IndexedSlices, rows with the same index count as their sum: that is what will be applied.

    Returns:
        A bool scalar tensor; True if there is no gradient at all.
    """
    given = [g for g in gradients if g is not None]
    together = groups.positions(given)
    flags = [_is_finite(groups.stacked(given, group)) for group in together]
    done = {i for group in together for i in group}
    summed = []
    for i, gradient in enumerate(given):
        if i not in done:
            if _is_worth_a_sum(gradient):
                summed.append(gradient)
            else:
                flags.append(_is_finite(gradient))
    if summed:
        flags.append(_unless(_sums_are_finite(summed), lambda one: _each_is_finite(summed, one)))
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


def _is_worth_a_sum(gradient: Any) -> bool:
    if isinstance(gradient, tf.IndexedSlices):
        return True
    if groups.compiled() and not branches.loops():
        return False
    return isinstance(gradient, Scaled) or not groups.fits_in_a_stack(gradient)


def _sums_are_finite(gradients: list[Any]) -> tf.Tensor:
    """A bool scalar that is True only if the gradients are finite."""
    sums = [tf.cast(_sum(g), tf.float32) for g in gradients]
    finite = tf.math.is_finite(sums[0] if len(sums) == 1 else tf.add_n(sums))
    # What is finite before it is divided by less than one need not be finite after.
    for scale in {id(g.by.scale): g.by.scale for g in gradients if isinstance(g, Scaled)}.values():
        finite = tf.logical_and(finite, scale >= 1)
    return finite


def _sum(gradient: Any) -> tf.Tensor:
    """A scalar that is finite only if the gradient is; of float32's range or more."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.reduce_sum(gradient.values if isinstance(gradient, Scaled) else gradient)
    values = gradient.values
    if values.dtype == tf.float16:
        sizes = tf.reduce_sum(tf.cast(tf.abs(values), tf.float32))
        return tf.where(sizes <= values.dtype.max, 0.0, float("inf"))
    # The squares' sum is finite up to 1e19: then so is every sum of rows.
    return tf.nn.l2_loss(values)


def _unless(known: tf.Tensor, function: branches.Branch) -> tf.Tensor:
    if branches.loops():
        return branches.at_most_once(tf.logical_not(known), function, tf.constant(True))
    return tf.cond(known, lambda: tf.constant(True), lambda: function(None))


def _each_is_finite(gradients: list[Any], one: tf.Tensor | None) -> tf.Tensor:
    return tf.reduce_all(tf.stack([_is_finite(g, one) for g in gradients]))


def _is_finite(gradient: Any, one: tf.Tensor | None = None) -> tf.Tensor:
    if isinstance(gradient, Scaled):
        values = gradient.unscaled(one)
    elif isinstance(gradient, tf.IndexedSlices):
        values = _sums_of_rows(gradient.values, gradient.indices)
    else:
        values = gradient
    if one is not None and not isinstance(gradient, Scaled):
        values *= tf.cast(one, values.dtype)
    return tf.reduce_all(tf.math.is_finite(values))


def _sums_of_rows(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    _, positions = tf.unique(tf.reshape(indices, [-1]))
    return tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0])
