"""Adafactor's update of a stack of parameters, as pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# For each dtype, the distance from 1 to the next larger number.
_SPACING = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23, tf.float64: 2.0**-52}


def moment_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a parameter's second moments: n + m numbers for an (n, m) matrix.

    >>> moment_shapes((1000, 500))
    {'row_var': (1000, 1), 'col_var': (1, 500)}
    >>> moment_shapes((500,))
    {'variance': (500,)}

    Args:
        shape: the parameter's shape.

    Returns:
        A dict from names to shapes. With two or more dimensions, the names are `row_var` and `col_var`, for the rows
        and columns of the last two dimensions. With fewer dimensions, the only name is `variance`.
    """
    shape = tuple(shape)
    # PyTorch's Adafactor uses these names in its state dict.
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def compute_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype that a parameter's update is computed in: float64 for float64 parameters, otherwise float32.

    >>> compute_dtype(tf.float16)
    tf.float32

    Args:
        dtype: the parameter's dtype.
    """
    return tf.float64 if dtype == tf.float64 else tf.float32


def step_sizes(steps: tf.Tensor, lr: tf.Tensor, beta2_decay: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the weight of the newest gradient and the relative step size for each of several step numbers.

    A weight w of at least 1/2 is returned as w - 1. With this value, `update` can interpolate without rounding errors
    if w is 1.

    >>> weight, rate = step_sizes(tf.constant([1.0, 16.0]), tf.constant(0.5), -0.5)
    >>> weight.numpy().tolist(), rate.numpy().round(6).tolist()
    ([0.0, 0.25], [0.5, 0.25])

    Args:
        steps: the step numbers, counted from 1; a floating-point tensor.
        lr: the learning rate, a scalar of the same dtype.
        beta2_decay: an exponent, at most 0. The weight is the step number to this power.

    Returns:
        Two tensors with the shape and dtype of `steps`.
    """
    # A weight that underflows to 0 would be taken for a weight of 1, which is returned as 0.
    weight = tf.maximum(steps**beta2_decay, np.finfo(steps.dtype.as_numpy_dtype).tiny)
    return tf.where(weight < 0.5, weight, weight - 1), tf.minimum(lr, tf.math.rsqrt(steps))


def update(
    parameters: tf.Tensor,
    gradients: tf.Tensor,
    moments: Sequence[tf.Tensor],
    weights: tf.Tensor,
    rates: tf.Tensor,
    *,
    shrink: Any = None,
    eps: Sequence[Any] = (None, 1e-3),
    d: float = 1.0,
    maximize: Any = False,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the amounts that one step of Adafactor subtracts from a stack of parameters, and the new second moments.

    The first axis of every tensor except `shrink` has an entry for each of n parameters of the same shape. The
    equations are in `tf_lossscale.optimizers.Adafactor`.

    >>> weights, rates = step_sizes(tf.constant([1.0]), tf.constant(0.25), -0.8)
    >>> moments = [tf.zeros([1, 2, 1]), tf.zeros([1, 1, 3])]
    >>> changes, moments = update(tf.ones([1, 2, 3]), tf.ones([1, 2, 3]), moments, weights, rates)
    >>> round(changes.numpy()[0, 0, 0].item(), 6), [moment.shape.num_elements() for moment in moments]
    (0.25, [2, 3])

    Args:
        parameters: the parameters X, a floating-point tensor of shape (n, ...).
        gradients: the gradients G, of the same shape and dtype.
        moments: the second moments, in the order of `moment_shapes` and in the parameters' dtype.
        weights: the first result of `step_sizes`, of shape (n,) and of the `compute_dtype`.
        rates: the second result of `step_sizes`, of shape (n,) and of the `compute_dtype`.
        shrink: the fraction of X that the weight decay subtracts, a scalar of the `compute_dtype`, or None for no
            weight decay.
        eps: (eps1, eps2). If eps1 is None, the distance from 1 to the next larger number of the dtype is used.
        d: clipping threshold, at least 1.
        maximize: whether to ascend the gradient.

    Returns:
        The amounts, with the shape and dtype of `parameters`, and the new moments, with the shapes and dtypes of
        `moments`.
    """
    dtype, wide = parameters.dtype, compute_dtype(parameters.dtype)
    shape = parameters.shape[1:]
    if not shape.num_elements():
        return tf.zeros_like(parameters), list(moments)
    if parameters.shape[0] > 1:
        weights, rates = (tf.reshape(each, [-1] + [1] * shape.rank) for each in (weights, rates))
    eps1 = _SPACING[dtype] if eps[0] is None else eps[0]
    x, g = tf.cast(parameters, wide), tf.cast(gradients, wide)

    squared = tf.square(g)
    if shape.rank >= 2:
        means = [tf.reduce_mean(squared, -1, keepdims=True), tf.reduce_mean(squared, -2, keepdims=True)]
        row, column = new = [_toward(tf.cast(old, wide), mean, weights) for old, mean in zip(moments, means)]
        # PyTorch multiplies before it divides, and so does this code: if the product overflows, the estimate is
        # infinite, and the parameter does not change.
        estimate = row * column / tf.maximum(tf.reduce_mean(row, -2, keepdims=True), eps1)
    else:
        new = [_toward(tf.cast(moments[0], wide), squared, weights)]
        estimate = new[0]
    direction = g * tf.math.rsqrt(tf.maximum(estimate, eps1 * eps1))
    length = _larger(_mean_square(x), eps[1] ** 2)
    length /= _larger(_mean_square(direction) / d**2, 1.0)
    length = rates * tf.sqrt(length)
    change = (-length if maximize else length) * direction
    if shrink is not None:
        change += shrink * x
    return tf.cast(change, dtype), [_narrowed(each, dtype) for each in new]


def _mean_square(stack: tf.Tensor) -> tf.Tensor:
    """Return the mean square of each entry of a stack, in a shape that broadcasts to the stack."""
    if stack.shape[0] == 1:
        # `l2_loss` reads the values once, without creating a tensor of the same size.
        return tf.nn.l2_loss(stack) * (2 / stack.shape.num_elements())
    return tf.reduce_mean(tf.square(stack), list(range(1, stack.shape.rank)), keepdims=True)


def _larger(value: tf.Tensor, least: float) -> tf.Tensor:
    # As in PyTorch, NaN is replaced with `least`, so that an RMS of NaN does not make all elements of the update NaN.
    return tf.where(value > least, value, least)


def _toward(old: tf.Tensor, new: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    # If a weight w is at least 1/2, `step_sizes` returns w - 1 instead. The interpolation then starts at `new`, so that
    # a w of 1 gives exactly `new`, however large `old` is.
    return tf.where(weight > 0, old, new) + weight * (new - old)


def _narrowed(moment: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # The square of a float16 number above 255 can exceed the largest float16 number. Clip the second moment, because an
    # infinite value would make the parameter NaN in the next step.
    return moment if moment.dtype == dtype else tf.cast(tf.minimum(moment, float(dtype.max)), dtype)


def update_bytes(shape: Sequence[int], dtype: tf.DType) -> int:
    """Estimate how many bytes the update of a stack of parameters needs at its peak.

    At the peak there are five tensors of the parameter's size: the parameter, the gradient, the squared gradient, the
    estimate of the second moment and the change.

    >>> update_bytes((10, 1000), tf.float32)
    200000

    Args:
        shape: the shape of the stack.
        dtype: the parameters' dtype.
    """
    return 5 * math.prod(shape) * compute_dtype(dtype).size
