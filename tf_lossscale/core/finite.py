"""Whether every value of every gradient is finite: exact, and one read of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import branches, groups
from tf_lossscale.core.origins import Scaled

_WIDE = (tf.float32, tf.float64)


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
    done = {i for group in together for i in group}
    stacks = [groups.stacked(given, group) for group in together]
    looked_at = [*stacks, *(g for i, g in enumerate(given) if i not in done)]
    summed = _worth_a_sum(looked_at)
    these = {id(gradient) for gradient in summed}
    flags = [_is_finite(gradient) for gradient in looked_at if id(gradient) not in these]
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


def _worth_a_sum(gradients: list[Any]) -> list[Any]:
    """Those that are summed; the others are looked at value by value, which needs no conditional."""
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in gradients if isinstance(g, tf.Tensor)]
    if tf.executing_eagerly():
        return sparse + [g for g in dense if g.dtype in _WIDE]  # one operation in place of two
    if groups.compiled() and not branches.loops():
        return sparse
    late = [g for g in gradients if isinstance(g, Scaled)]
    return sparse + late + ([] if groups.fit_in_a_stack(dense) else [g for g in dense if not groups.is_small(g)])


def _sums_are_finite(gradients: list[Any]) -> tf.Tensor:
    """A bool scalar that is True only if the gradients are finite."""
    sums = [each if each.dtype == tf.float32 else tf.cast(each, tf.float32) for each in map(_sum, gradients)]
    finite = tf.math.is_finite(sums[0] if len(sums) == 1 else tf.add_n(sums))
    # What is finite before it is divided by less than one need not be finite after.
    for scale in {id(g.by.scale): g.by.scale for g in gradients if isinstance(g, Scaled)}.values():
        finite = tf.logical_and(finite, scale >= 1)
    return finite


def _sum(gradient: Any) -> tf.Tensor:
    """A scalar that is finite only if the gradient is; of float32's range or more."""
    if isinstance(gradient, Scaled):
        return tf.reduce_sum(gradient.values)  # of squares it would overflow at half the scale's exponent
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.nn.l2_loss(gradient) if gradient.dtype in _WIDE else tf.reduce_sum(gradient)
    values = gradient.values
    if values.dtype == tf.float16:
        sizes = tf.reduce_sum(tf.cast(tf.abs(values), tf.float32))
        # A sum that is rounded after each row grows by up to twice a row's size; a parallel sum rounds a little more.
        return tf.where(sizes <= values.dtype.max / 4, 0.0, float("inf"))
    # The squares' sum is finite up to 1e19: then so is every sum of rows.
    return tf.nn.l2_loss(values)


def _unless(known: tf.Tensor, function: branches.Branch) -> tf.Tensor:
    if tf.executing_eagerly():
        return known if known else function(None)
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
