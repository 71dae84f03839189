"""Scale a loss, unscale gradients."""

from __future__ import annotations

import functools
import operator
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
    """Returns each gradient divided by the scale, to one unit in the last place.

    A gradient is multiplied by the reciprocal, as TensorFlow always did, if the reciprocal is precise in the gradient's
    dtype. It is not above 2**126 in float32, for one, where it is subnormal and kernels take it for zero: then the
    gradient is divided.

    >>> [g.numpy().tolist() for g in unscale([tf.constant([8.0, 16.0])], tf.constant(8.0))]
    [[1.0, 2.0]]
    >>> unscale([tf.constant(2.0**127)], tf.constant(2.0**127))[0].numpy().item()
    1.0

    Args:
        gradients: floating tensors, IndexedSlices (kept sparse) or None (kept).
        scale: float32 scalar.
        walled: False where the wall of `opaque` is not known, and not needed: on a DTensor mesh.

    Returns:
        A list as long as `gradients`.

    Raises:
        TypeError: a gradient is not of a floating dtype.
    """
    if not walled:
        return divide(gradients, scale, walled)  # a mesh has no choice between two operations
    scale = _divisor(scale, walled)
    return _of_each(gradients, Unscaling(scale, _ByReciprocal(scale)), walled)


def divide(gradients: Iterable[Any], scale: tf.Tensor, walled: bool = True) -> list[Any]:
    """Returns each gradient divided by the scale, as Keras 3 does: the rounded quotient.

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
    scale = _divisor(scale, walled)
    return _of_each(gradients, Unscaling(scale, functools.partial(_quotient, scale=scale)), walled)


def _scaled(loss: Any, factor: tf.Tensor) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`loss` must be a floating tensor, but got dtype {loss.dtype.name}. "
            "Cast it first, for example with tf.cast(loss, tf.float32)."
        )
    return _product(loss, factor)


def _product(values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    if factor.dtype != values.dtype:
        factor = tf.cast(factor, values.dtype)
    return tf.raw_ops.Mul(x=values, y=factor)


def _divisor(scale: tf.Tensor, walled: bool) -> tf.Tensor:
    """The scale; the graph optimizer would make a product with the reciprocal of a division by a constant."""
    scale = tf.convert_to_tensor(scale)
    return opaque(scale) if walled else scale


class _ByReciprocal:
    """Divides tensors by a scale: a product with the reciprocal, or a quotient where the product would be wrong.

    Args:
        scale: float32 scalar.
    """

    def __init__(self, scale: tf.Tensor):
        self._scale, self._wide = scale, 1.0 / scale
        self._known: dict[tf.DType, tuple[tf.Tensor, Any]] = {}

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        dtype = values.dtype
        if dtype == tf.float64:
            return _quotient(values, self._scale)  # a float32 reciprocal is not precise here
        if dtype not in self._known:
            # Made outside of the branches that use it later.
            reciprocal = self._wide if dtype == tf.float32 else tf.cast(self._wide, dtype)
            self._known[dtype] = reciprocal, _is_precise(reciprocal, self._scale)
        reciprocal, precise = self._known[dtype]
        if tf.executing_eagerly():
            return _product(values, reciprocal) if precise else _quotient(values, self._scale)
        if branches.compiled_for_the_cpu() and dtype == tf.float16:
            # float32 holds each product; a conversion to float64 would be a call for each value.
            exact = tf.maximum(self._wide, 2.0**-126)  # an infinity times zero would be NaN
            factor = tf.where(precise, tf.cast(reciprocal, tf.float32), exact)
            return tf.cast(tf.cast(values, tf.float32) * factor, dtype)
        if branches.compiled_for_the_cpu():
            exact = 1.0 / tf.cast(self._scale, tf.float64)
            return _float64_product(values, tf.where(precise, tf.cast(reciprocal, tf.float64), exact))
        if groups.compiled():
            return tf.where(precise, _product(values, reciprocal), _quotient(values, self._scale))
        # A function that is traced once: a conditional for each gradient takes seconds to trace in a large model.
        # Behind it the graph optimizer does not make gradient * (reciprocal * learning rate) of what follows, either:
        # that product may be too small a number.
        either = _product_or_quotient.get_concrete_function(
            tf.TensorSpec(None, dtype), tf.TensorSpec([], dtype), tf.TensorSpec([]), tf.TensorSpec([], tf.bool)
        )
        result = either(values, reciprocal, self._scale, precise)
        result.set_shape(values.shape)
        return result


def _conditional(values: tf.Tensor, reciprocal: tf.Tensor, scale: tf.Tensor, precise: tf.Tensor) -> tf.Tensor:
    return tf.cond(precise, lambda: _product(values, reciprocal), lambda: _quotient(values, scale))


_product_or_quotient: Any = tf.function(_conditional, autograph=False)


def _is_precise(reciprocal: tf.Tensor, scale: tf.Tensor) -> Any:
    """Whether a reciprocal is off by no more than half a unit in the last place; a bool in eager mode.

    A normal number is. A subnormal one may have lost bits, and kernels take it for zero in float32 and bfloat16; they
    do not in float16, where that of a power of two is exact.
    """
    wide: Callable[[Any], Any] = functools.partial(tf.cast, dtype=tf.float64)
    equal, both = tf.equal, tf.logical_and
    if tf.executing_eagerly():
        wide, equal, both = float, operator.eq, operator.and_  # one read costs less than a few operations
    known = wide(reciprocal)
    half = reciprocal.dtype == tf.float16
    normal = both(known >= (2.0**-14 if half else 2.0**-126), known < float("inf"))
    return normal | equal(known * wide(scale), 1.0) if half else normal


def _quotient(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.float64:
        return tf.raw_ops.RealDiv(x=values, y=tf.cast(scale, values.dtype))
    if values.dtype != tf.float32:
        return tf.cast(_quotient(tf.cast(values, tf.float32), scale), values.dtype)  # float16 does not hold 2**16
    if branches.compiled_for_the_cpu():
        return _float64_product(values, 1.0 / tf.cast(scale, tf.float64))
    return tf.raw_ops.RealDiv(x=values, y=scale)


def _float64_product(values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """The product with a float64 factor, rounded to the dtype of the values.

    If the factor is a number of that dtype, these are the bits of the plain product, which float64 holds.

    If it is a reciprocal in float64, these are the bits of the float32 quotient, without a division for each value,
    which costs a fused step a quarter more. (XLA makes a product of a division by a constant, too: by zero for 2**127.)
    The product of a float32 number with such a reciprocal is within 2**-52 of the quotient, in proportion. What
    rounds to another float32 number is further away: a quotient of two numbers of 24 bits is at least 2**-49 from
    the middle between two. (That holds for normal numbers; XLA takes smaller ones on the CPU for zero.)
    """
    return tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)


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
