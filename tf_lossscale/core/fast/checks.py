"""Faster versions of core functions. They check gradients by their sums and replace divisions with multiplications.

A finite sum proves that all values of a gradient are finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import finite, scaling
from tf_lossscale.core.fast import tricks
from tf_lossscale.core.fast.branching import at_most_once, compiled_for_the_cpu, loops
from tf_lossscale.core.fast.packing import Packed, Scaled, fit_in_a_stack, in_stacks, is_small, kept_inside
from tf_lossscale.core.graphs import in_xla_context
from tf_lossscale.core.twins import faster

_WIDE = (tf.float32, tf.float64)


@faster(scaling.divide)
def divide(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """If XLA compiles for the CPU, compute float32 quotients as float64 products, which round to the same bits.

    Divisions make a fused step a quarter slower. The product of a float32 number and the float64 reciprocal of the
    scale has a relative error of at most 2**-52. That is too little to change the rounding to float32, because a
    quotient of two 24-bit numbers is at least 2**-49 away from the midpoint of two adjacent 24-bit numbers. This holds
    for normal numbers; on the CPU, XLA flushes subnormal numbers to zero.
    """
    gains = values.dtype == tf.float32 and not is_small(values) and compiled_for_the_cpu()
    if gains and "product" in tricks.in_use:
        return tf.cast(tf.cast(values, tf.float64) * (1.0 / tf.cast(scale, tf.float64)), tf.float32)
    return scaling.divide.plain(values, scale)  # type: ignore[attr-defined]


@faster(finite.all_finite)
def all_finite(gradients: Iterable[Any]) -> tf.Tensor:
    """Check small gradients together, and large gradients by their sums; see `core.finite.all_finite`.

    A sum is finite only if all summands are finite. Checking each value of a large gradient would create a second large
    tensor, but summing the values does not. The values of large gradients are checked only if a sum is not finite.
    """
    present = [g for g in gradients if g is not None]
    if tf.executing_eagerly():
        return _all_finite_eagerly(in_stacks(present))
    to_check = in_stacks(Packed(present).tensors)
    if in_xla_context() and "one check" in tricks.in_use:
        to_check = _concatenated(to_check)
    summed = _worth_a_sum(to_check) if "sum first" in tricks.in_use else []
    ids_of_summed = {id(gradient) for gradient in summed}
    flags = [_is_finite(gradient) for gradient in to_check if id(gradient) not in ids_of_summed]
    if summed:
        flags.append(_finite_by_sums(summed))
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def _all_finite_eagerly(gradients: list[Any]) -> tf.Tensor:
    """Check the sum of each gradient's values first, which takes one operation for each gradient instead of two."""
    sums: list[Any] = []
    others: list[Any] = []
    for gradient in gradients:
        is_wide = isinstance(gradient, tf.IndexedSlices) or gradient.dtype in _WIDE
        if is_wide and "sum first" in tricks.in_use:
            sums.append(tf.cast(_sum(gradient, squares=True), tf.float32))
        else:
            others.append(gradient)
    if sums and not tf.math.is_finite(tf.add_n(sums)):
        return finite.all_finite.plain(gradients)  # type: ignore[attr-defined]
    return finite.all_finite.plain(others) if others else tf.constant(True)  # type: ignore[attr-defined]


def _concatenated(gradients: list[Any]) -> list[Any]:
    """Concatenate small gradients of the same dtype and scale, because XLA compiles a kernel for each check."""
    alike: dict[Any, tuple[tf.Tensor | None, list[tf.Tensor]]] = {}
    result = []
    for gradient in gradients:
        values, scale = gradient if isinstance(gradient, Scaled) else (gradient, None)
        if isinstance(values, tf.Tensor) and is_small(values):
            alike.setdefault((values.dtype, id(scale)), (scale, []))[1].append(tf.reshape(values, [-1]))
        else:
            result.append(gradient)
    for scale, flat in alike.values():
        together = tf.concat(flat, 0)
        result.append(together if scale is None else Scaled(together, scale).unscaled())
    return result


def _worth_a_sum(gradients: list[Any]) -> list[Any]:
    """Return the gradients that should be checked by their sums. All other gradients are checked value by value."""
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in gradients if isinstance(g, tf.Tensor)]
    if in_xla_context() and not loops():
        return sparse
    late = [g for g in gradients if isinstance(g, Scaled)]
    return sparse + late + ([] if fit_in_a_stack(dense) else [g for g in dense if not is_small(g)])


def _sums_are_finite(gradients: list[Any]) -> tf.Tensor:
    """Return a bool scalar. If it is True, the gradients are finite; if it is False, their values must be checked."""
    # Outside XLA a sum of squares is one operation. In XLA a sum of squares takes four times as long as a plain sum.
    squares = not in_xla_context()
    sums = [tf.cast(_sum(gradient, squares), tf.float32) for gradient in gradients]
    are_finite = tf.math.is_finite(sums[0] if len(sums) == 1 else tf.add_n(sums))
    # A finite value may overflow when it is divided by a scale below one.
    for scale in {id(g.scale): g.scale for g in gradients if isinstance(g, Scaled)}.values():
        are_finite = tf.logical_and(are_finite, scale >= 1)
    return are_finite


def _sum(gradient: Any, squares: bool) -> tf.Tensor:
    """Return a scalar that is finite only if all values of the gradient are finite."""
    if isinstance(gradient, Scaled):
        # The values are not squared, because squares of scaled gradients could overflow with loss scales above about
        # 1e19, the square root of the largest scale.
        return tf.reduce_sum(gradient.values)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.nn.l2_loss(gradient) if squares and gradient.dtype in _WIDE else tf.reduce_sum(gradient)
    values = gradient.values
    if values.dtype == tf.float16:
        sizes = tf.reduce_sum(tf.cast(tf.abs(values), tf.float32))
        # If float16 values are added one after another, the rounded result is at most twice the exact sum of their
        # absolute values. If they are added in parallel, this limit is slightly higher. Sums of rows therefore cannot
        # overflow if the absolute values add up to at most a quarter of the float16 maximum.
        return tf.where(sizes <= values.dtype.max / 4, 0.0, float("inf"))
    # If the sum of squares is finite, all absolute values are below 3e19, so the sums of rows with the same index are
    # also finite.
    return tf.nn.l2_loss(values)


def _finite_by_sums(gradients: list[Any]) -> tf.Tensor:
    """Return whether gradients are finite. The values are checked only if a sum is not finite."""
    sums_are_finite = _sums_are_finite(gradients)

    def check_values(one: tf.Tensor | None = None) -> tf.Tensor:
        return tf.reduce_all(tf.stack([_is_finite(gradient, one) for gradient in gradients]))

    if loops():
        return at_most_once(tf.logical_not(sums_are_finite), check_values, tf.constant(True))
    return tf.cond(sums_are_finite, lambda: tf.constant(True), check_values)


def _is_finite(gradient: Any, one: tf.Tensor | None = None) -> tf.Tensor:
    if isinstance(gradient, Scaled):
        gradient = gradient.unscaled(one)
    else:
        gradient = scaling.over_values(lambda values: kept_inside(values, one), gradient)
    return finite.is_finite(gradient)
