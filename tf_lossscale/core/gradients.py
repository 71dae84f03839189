"""Arithmetic on losses and gradients: scaling, unscaling, and the check for values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core.graphs import in_xla_context, optimization_barrier

# An operation on up to this many values takes longer to start than to run.
_SMALL = 2**13


def scale_loss(loss: Any, scale: tf.Tensor) -> Any:
    """Multiply a floating-point tensor, or a nested structure of them, by a float32 scale, in the loss's own dtype."""

    def scaled(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.with_flat_values(scaled(part.flat_values))
        part = tf.convert_to_tensor(part)
        if not part.dtype.is_floating:
            raise TypeError(
                f"`loss` must be a floating-point tensor, but got dtype {part.dtype.name}. "
                "Cast it first, for example with tf.cast(loss, tf.float32)."
            )
        return tf.raw_ops.Mul(x=part, y=tf.cast(scale, part.dtype))

    return tf.nest.map_structure(scaled, loss)


def unscale(gradients: Iterable[Any], scale: tf.Tensor) -> list[Any]:
    """Divide gradients by a float32 scale, and keep the graph optimizer from merging the division with the scaling.

    The results have the dtypes of the gradients. IndexedSlices stay sparse, and None stays None.
    """
    scale, compiled = optimization_barrier(tf.convert_to_tensor(scale)), in_xla_context()

    def unscaled(values: tf.Tensor) -> tf.Tensor:
        return divide(optimization_barrier(values), _opaque_to_xla(scale, values) if compiled else scale)

    result = floating(gradients)
    for positions in _alike(result):
        if len(positions) == 1:
            result[positions[0]] = over_values(unscaled, result[positions[0]])
        else:
            # A stack needs no barrier, because the graph optimizer merges no operations across it.
            quotients = divide(tf.stack([result[i] for i in positions]), scale)
            for i, quotient in zip(positions, tf.unstack(quotients)):
                result[i] = quotient
    return result


def _opaque_to_xla(scale: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return the scale, once for each value, in a form that XLA cannot recognize as a constant.

    XLA merges the multiplication by a constant with the division by it, so that an overflow between the two would go
    unnoticed. It also multiplies by the reciprocal of a constant, which is zero for large scales. XLA's own
    optimization barrier does not prevent this in TensorFlow 2.22.
    """
    always_true = tf.logical_or(tf.equal(values, values), tf.not_equal(values, values))
    return tf.where(always_true, scale, tf.cast(values, scale.dtype))


def _alike(gradients: list[Any]) -> list[list[int]]:
    """Group the positions of small tensors that can be stacked, because each operation takes longer than their values.

    Other tensors and IndexedSlices are groups of one. XLA fuses operations, so in its functions every group is of one.
    """
    groups: dict[Any, list[int]] = {}
    compiled = in_xla_context()
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        small = not isinstance(gradient, tf.IndexedSlices) and (gradient.shape.num_elements() or _SMALL + 1) <= _SMALL
        key = (gradient.dtype, tuple(gradient.shape.as_list()), gradient.device) if small and not compiled else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def divide(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Divide values by a float32 scale, and round the quotients to the dtype of the values.

    Float16 and bfloat16 values are divided in float32. Multiplication by the reciprocal of the scale is guaranteed to
    give the same bits only if the scale is a power of two up to 2**126. For larger scales the reciprocal is subnormal,
    and kernels treat it as zero. In float16 the reciprocal is zero for scales of 2**25 and above.
    """
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(tf.raw_ops.RealDiv(x=tf.cast(values, wide), y=tf.cast(scale, wide)), values.dtype)


def multiplied(gradient: Any, scale: tf.Tensor) -> Any:
    """Multiply a gradient by the scale, in float32, or in float64 if the gradient is float64."""

    def product(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32
        return tf.cast(values, wide) * tf.cast(scale, wide)

    return over_values(product, gradient)


def floating(gradients: Iterable[Any]) -> list[Any]:
    """Convert gradients to tensors, except IndexedSlices and None.

    Raise an error if one is not of a floating-point dtype.
    """
    kept = (tf.IndexedSlices, type(None))
    tensors = [g if isinstance(g, kept) else tf.convert_to_tensor(g) for g in gradients]
    for gradient in tensors:
        if gradient is not None and not gradient.dtype.is_floating:
            raise TypeError(
                f"A gradient must be a floating-point tensor, but got dtype {gradient.dtype.name}. "
                "Compute gradients only for floating-point variables."
            )
    return tensors


def over_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Apply a function to a gradient's values, or to the rows of IndexedSlices.

    If the gradient is None, return None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Return whether all values of all gradients are finite, as a bool scalar tensor.

    Rows of IndexedSlices with the same index are added up before the check, because their sum is what an optimizer
    applies.
    """
    each = [sums_of_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    to_check = [tf.stack([each[i] for i in at]) if len(at) > 1 else each[at[0]] for at in _alike(each)]
    # A sum of squares reads the values once and writes nothing, and proves them finite if it is finite. The values are
    # looked at one by one only if it is not. XLA fuses the check of the values, which is then as cheap.
    summed: list[tf.Tensor] = []
    others: list[tf.Tensor] = []
    for values in to_check:
        is_large = (values.shape.num_elements() or _SMALL + 1) > _SMALL
        (summed if is_large and values.dtype in (tf.float32, tf.float64) else others).append(values)
    if not summed or in_xla_context():
        return _every_value_is_finite(to_check)
    sums = tf.add_n([tf.cast(tf.nn.l2_loss(values), tf.float64) for values in summed])
    proven = tf.logical_and(tf.math.is_finite(sums), _every_value_is_finite(others))
    return tf.cond(proven, lambda: tf.constant(True), lambda: _every_value_is_finite(to_check))


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
    bad = tf.where(tf.reduce_any(tf.math.is_nan(values)), float("nan"), float("inf"))
    return tf.where(all_finite([gradient]), 0.0, bad)


def sums_of_rows(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Add up the rows of IndexedSlices that have the same index.

    The result has as many rows; those left over are zeros.
    """
    values = gradient.values
    _, positions = tf.unique(tf.reshape(gradient.indices, [-1]))
    return tf.math.unsorted_segment_sum(values, positions, tf.shape(values)[0])
