"""Scale a loss, unscale gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def scale_loss(loss: Any, scale: Callable[[], tf.Tensor]) -> Any:
    """Returns the loss times the scale, in the loss's own dtype.

    >>> float(scale_loss(tf.constant(3.0), lambda: tf.constant(8.0)))
    24.0

    Args:
        loss: a floating tensor of any shape, a nested structure of them, or a function
            without arguments that returns one. A function is scaled when it is called.
        scale: returns the current scale, a float32 scalar.

    Returns:
        The scaled loss, of the same structure and dtype; a function if `loss` is one.

    Raises:
        TypeError: a loss is not of a floating dtype.
    """
    if callable(loss) and not tf.is_tensor(loss):
        return lambda: scale_loss(loss(), scale)
    factor = scale()
    return tf.nest.map_structure(lambda part: _scaled(part, factor), loss)


def unscale(gradients: Iterable[Any], scale: tf.Tensor, walled: bool = True) -> list[Any]:
    """Returns each gradient divided by the scale: multiplied by its reciprocal, as TensorFlow always did.

    >>> [g.numpy().tolist() for g in unscale([tf.constant([8.0, 16.0])], tf.constant(8.0))]
    [[1.0, 2.0]]

    Args:
        gradients: floating tensors, IndexedSlices (kept sparse) or None (kept).
        scale: float32 scalar.
        walled: False where the wall of `opaque` is not known, and not needed: on a DTensor mesh.

    Returns:
        A list as long as `gradients`.

    Raises:
        TypeError: a gradient is not of a floating dtype.
    """
    reciprocal = 1.0 / scale

    def times(values: tf.Tensor) -> tf.Tensor:
        return (opaque(values) if walled else values) * tf.cast(reciprocal, values.dtype)

    return _of_each(gradients, times)


def divide(gradients: Iterable[Any], scale: tf.Tensor, walled: bool = True) -> list[Any]:
    """Returns each gradient divided by the scale, as Keras 3 does: the reciprocal of 2**127 would be zero.

    >>> [g.numpy().tolist() for g in divide([tf.constant([8.0, 16.0])], tf.constant(8.0))]
    [[1.0, 2.0]]

    Args:
        gradients: floating tensors, IndexedSlices (kept sparse) or None (kept).
        scale: float32 scalar.
        walled: as in `unscale`.

    Returns:
        A list as long as `gradients`, of the same dtypes.

    Raises:
        TypeError: a gradient is not of a floating dtype.
    """

    def divided(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32  # float16 does not hold a scale of 2**16
        widened = tf.cast(values, wide)
        return tf.cast((opaque(widened) if walled else widened) / tf.cast(scale, wide), values.dtype)

    return _of_each(gradients, divided)


def _scaled(loss: Any, factor: tf.Tensor) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`loss` must be a floating tensor, but got dtype {loss.dtype.name}. "
            "Cast it first, for example with tf.cast(loss, tf.float32)."
        )
    return loss * tf.cast(factor, loss.dtype)


def _of_each(gradients: Iterable[Any], function: Callable[[tf.Tensor], tf.Tensor]) -> list[Any]:
    return [None if g is None else _of_values(g, function) for g in gradients]


def _of_values(gradient: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_of_values(gradient.values, function), gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    if not gradient.dtype.is_floating:
        raise TypeError(
            f"A gradient must be a floating tensor, but got dtype {gradient.dtype.name}. "
            "Take gradients of floating variables only."
        )
    return function(gradient)


def opaque(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, behind a wall for the graph optimizer.

    In a tf.function the optimizer would turn `g * scale * (1 / scale)` into `g * (scale * (1 / scale))`, and an
    overflow that only the scaling causes would go unseen.

    >>> opaque(tf.constant(1.0)).numpy().item()
    1.0

    Args:
        tensor: any tensor.

    Returns:
        The same values; in eager mode the same object.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
