"""Scaling losses and unscaling gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core.graphs import optimization_barrier
from tf_lossscale.core.twins import has_faster_twin


def scale_loss(loss: Any, scale: tf.Tensor) -> Any:
    """Return the loss times the scale, in the loss's own dtype.

    >>> scale_loss(tf.constant(3.0), tf.constant(8.0)).numpy().item()
    24.0

    Args:
        loss: a floating-point tensor of any shape, or a nested structure of such tensors.
        scale: float32 scalar.

    Returns:
        The scaled loss, with the same structure and dtypes.

    Raises:
        TypeError: a loss does not have a floating-point dtype.
    """
    return tf.nest.map_structure(lambda part: _scaled(part, scale), loss)


def _scaled(loss: Any, factor: tf.Tensor) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`loss` must be a floating-point tensor, but got dtype {loss.dtype.name}. "
            "Cast it first, for example with tf.cast(loss, tf.float32)."
        )
    return tf.raw_ops.Mul(x=loss, y=tf.cast(factor, loss.dtype))


# A call to this function runs its faster version in core/fast/packing.py.
@has_faster_twin
def unscale(gradients: Iterable[Any], scale: tf.Tensor) -> list[Any]:
    """Divide gradients by the scale, and prevent the graph optimizer from merging the division with the scaling.

    >>> [g.numpy().tolist() for g in unscale([tf.constant([8.0, 16.0])], tf.constant(8.0))]
    [[1.0, 2.0]]

    Args:
        gradients: floating-point tensors, IndexedSlices or None. IndexedSlices stay sparse, and None stays None.
        scale: float32 scalar.

    Returns:
        A list as long as `gradients`, with the same dtypes.

    Raises:
        TypeError: a gradient does not have a floating-point dtype.
    """
    scale = optimization_barrier(tf.convert_to_tensor(scale), for_xla=True)

    def unscaled(values: tf.Tensor) -> tf.Tensor:
        return divide(optimization_barrier(values), scale)

    return [over_values(unscaled, gradient) for gradient in floating(gradients)]


# A call to this function runs its faster version in core/fast/checks.py.
@has_faster_twin
def divide(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Divide values by the scale, and round the quotients to the dtype of the values.

    Float16 and bfloat16 values are divided in float32. Multiplication by the reciprocal of the scale is guaranteed to
    give the same bits only if the scale is a power of two up to 2**126. For larger scales the reciprocal is subnormal,
    and kernels treat it as zero. In float16 the reciprocal is zero for scales of 2**25 and above.

    >>> divide(tf.constant(2.0**127), tf.constant(2.0**127)).numpy().item()
    1.0

    Args:
        values: a floating-point tensor.
        scale: float32 scalar.

    Returns:
        A tensor of the same shape and dtype.
    """
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(tf.raw_ops.RealDiv(x=tf.cast(values, wide), y=tf.cast(scale, wide)), values.dtype)


def multiplied(gradient: Any, scale: tf.Tensor) -> Any:
    """Multiply a gradient by the scale. If the gradient is None, return None.

    The product is float64 if the gradient is float64, and float32 otherwise.

    >>> multiplied(tf.constant(2.0, tf.float16), tf.constant(2.0**16)).numpy().item()
    131072.0

    Args:
        gradient: a tensor, IndexedSlices or None.
        scale: float32 scalar.
    """

    def product(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32
        return tf.cast(values, wide) * tf.cast(scale, wide)

    return over_values(product, gradient)


def floating(gradients: Iterable[Any]) -> list[Any]:
    """Convert gradients to tensors, except IndexedSlices and None.

    >>> floating([None, 2.0])[1].numpy().item()
    2.0

    Args:
        gradients: values that TensorFlow can convert to tensors, IndexedSlices or None.

    Raises:
        TypeError: a gradient does not have a floating-point dtype.
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
    """Apply a function to a gradient's values, or to the rows of IndexedSlices. If the gradient is None, return None.

    >>> over_values(tf.abs, tf.IndexedSlices(tf.constant([-2.0]), tf.constant([7]))).values.numpy().tolist()
    [2.0]

    Args:
        function: a function of a tensor that returns a tensor of the same shape.
        gradient: a tensor, IndexedSlices or None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
