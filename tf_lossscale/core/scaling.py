"""Scale a loss, unscale gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import branches, groups, origins
from tf_lossscale.core.origins import Unscaling


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
    """Returns each gradient divided by the scale: the rounded quotient.

    A product with the reciprocal of the scale has the same bits if the scale is a power of two up to 2**126. Above that
    the reciprocal is subnormal, and kernels take it for zero; in float16 it is zero from 2**25 on.

    >>> [g.numpy().tolist() for g in unscale([tf.constant([8.0, 16.0])], tf.constant(8.0))]
    [[1.0, 2.0]]
    >>> unscale([tf.constant(2.0**127)], tf.constant(2.0**127))[0].numpy().item()
    1.0

    Args:
        gradients: floating tensors, IndexedSlices (kept sparse) or None (kept).
        scale: float32 scalar.
        walled: False where the wall of `opaque` is not known, and not needed: on a DTensor mesh.

    Returns:
        A list as long as `gradients`, of the same dtypes.

    Raises:
        TypeError: a gradient is not of a floating dtype.
    """
    # The graph optimizer would make a product with the reciprocal of a division by a constant.
    scale = opaque(tf.convert_to_tensor(scale)) if walled else tf.convert_to_tensor(scale)
    return _of_each(gradients, Unscaling(scale, _quotient), walled)


def _scaled(loss: Any, factor: tf.Tensor) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`loss` must be a floating tensor, but got dtype {loss.dtype.name}. "
            "Cast it first, for example with tf.cast(loss, tf.float32)."
        )
    return tf.raw_ops.Mul(x=loss, y=tf.cast(factor, loss.dtype))


def _quotient(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.float64:
        return tf.raw_ops.RealDiv(x=values, y=tf.cast(scale, values.dtype))
    if values.dtype != tf.float32:
        return tf.cast(_quotient(tf.cast(values, tf.float32), scale), values.dtype)  # float16 does not hold 2**16
    if branches.compiled_for_the_cpu():
        return _quotient_by_product(values, scale)
    return tf.raw_ops.RealDiv(x=values, y=scale)


def _quotient_by_product(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """The float32 quotient by a product in float64, which rounds to the same bits.

    A division for each value costs a fused step a quarter more. The product of a float32 number with the float64
    reciprocal is within 2**-52 of the quotient, in proportion. What rounds to another float32 number is further away: a
    quotient of two numbers of 24 bits is at least 2**-49 from the middle between two. (That holds for normal numbers;
    XLA takes smaller ones on the CPU for zero.)
    """
    return tf.cast(tf.cast(values, tf.float64) * (1.0 / tf.cast(scale, tf.float64)), tf.float32)


def _of_each(gradients: Iterable[Any], by: Unscaling, walled: bool) -> list[Any]:
    """Each gradient unscaled: small ones in one call, where the stack is the wall."""
    found = [g if g is None or isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g in gradients]
    for gradient in found:
        if gradient is not None and not gradient.dtype.is_floating:
            raise TypeError(
                f"A gradient must be a floating tensor, but got dtype {gradient.dtype.name}. "
                "Take gradients of floating variables only."
            )
    grouped = groups.positions(found) if walled else []
    done = {i for group in grouped for i in group}
    result = [g if g is None or i in done else _of_one(g, by, walled) for i, g in enumerate(found)]
    for group in grouped:
        stack = by(groups.stacked(found, group))
        for i, part in zip(group, origins.shares(stack)):
            result[i] = part
    return result


def _of_one(gradient: Any, by: Unscaling, walled: bool) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = by(opaque(gradient.values) if walled else gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if not walled or tf.executing_eagerly():
        return by(gradient)
    behind = opaque(gradient)
    result = by(behind)
    if gradient.dtype != tf.float16 and (groups.compiled() or not groups.is_small(gradient)):
        # Not float16: sums of it often overflow before it is unscaled.
        origins.note(result, origins.Scaled(behind, by))
    return result


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
