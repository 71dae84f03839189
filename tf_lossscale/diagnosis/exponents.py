"""Counts the values of gradients by binary exponent, and reports what float16 loses of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import origins
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.scaling import floating
from tf_lossscale.diagnosis.precision import COLUMNS, INFINITE, NAN, ZEROS, ExponentCounts, PrecisionReport, column


@do_not_convert
def exponent_counts(gradients: Iterable[Any]) -> tf.Tensor:
    """Count the values of each gradient by binary exponent, in eager mode, in a `tf.function` or compiled by XLA.

    >>> from tf_lossscale.diagnosis.precision import ZEROS, column
    >>> counts = exponent_counts([tf.constant([1.0, 1.5, 0.0])])
    >>> counts[0, column(0)].numpy().item(), counts[0, ZEROS].numpy().item()
    (2, 1)

    The counts of several replicas or batches can be added.

    Args:
        gradients: floating-point tensors, IndexedSlices or None, usually the gradients of the scaled loss.

    Returns:
        An int64 tensor of shape [gradients, columns], which `precision_report` reads. A row has the numbers of zeros,
        of finite values with each exponent, of infinite values and of NaNs.

    Raises:
        TypeError: a gradient does not have a floating-point dtype.
    """
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in floating(gradients)]
    return tf.stack([tf.zeros([COLUMNS], tf.int64) if value is None else _row(value) for value in values])


def precision_report(
    gradients_or_counts: Any, names: Iterable[str], scale: Any = 1.0, step: int = 1
) -> PrecisionReport:
    """Report how much of each gradient vanishes or overflows in float16. Call this function in eager mode.

    >>> gradients = [tf.constant([2.0**-20, 0.0])]  # of a loss that was multiplied by 8
    >>> report = precision_report(gradients, ["kernel"], scale=8)
    >>> report.rows[0].zeros, report.rows[0].subnormal
    (0.5, 1.0)

    Choose the gradients to report on. The gradients of layers that compute in float32 lose nothing in float16.

    Args:
        gradients_or_counts: the gradients of the scaled loss, before they are unscaled, or the result of
            `exponent_counts`, for example from a `tf.function`.
        names: a name for each gradient, such as the paths of the variables.
        scale: the loss scale that the gradients are multiplied by, a number or a scalar tensor.
        step: the number of the step, for titles and plots.

    Returns:
        A report that contains plain data and prints as a table.

    Raises:
        TypeError: a gradient does not have a floating-point dtype, or `scale` is not a number.
        ValueError: `scale` is not a finite number above 0, the number of names does not match, or a gradient is
            already unscaled.

    Source: Micikevicius et al., Mixed Precision Training, figure 3, https://arxiv.org/abs/1710.03740
    """
    are_counts = tf.is_tensor(gradients_or_counts) or isinstance(gradients_or_counts, np.ndarray)
    gradients = [] if are_counts else list(gradients_or_counts)
    counts = np.asarray(gradients_or_counts if are_counts else exponent_counts(gradients))
    rows = tuple(names)
    if counts.shape != (len(rows), COLUMNS):
        raise ValueError(
            f"`names` must have a name for each gradient, but got {len(rows)} names for {len(counts)} gradients."
        )
    checked = errors.positive_number("scale", scale, "Pass the loss scale, for example optimizer.loss_scale.")
    if checked != 1 and any(origins.marked_by(each)[1] is False for each in gradients):
        raise ValueError(
            f"The gradients of a report at the scale {checked:g} must be multiplied by it, but "
            "get_unscaled_gradients() or unscale() returned one of these. Pass the gradients of the scaled loss, or "
            "`scale=1`."
        )
    return PrecisionReport(ExponentCounts(rows, counts, checked, step))


def _row(values: tf.Tensor) -> tf.Tensor:
    # The exponent is read from the bits of a value, so it is exact for powers of two and for subnormal numbers. Float32
    # represents all values of float16 and bfloat16. The bits are compared as unsigned integers, because TensorFlow
    # compares int32 tensors of a GPU on the host.
    if values.dtype == tf.float64:
        signed, unsigned, mantissa, exponent = tf.int64, tf.uint64, 52, 11
    else:
        values = tf.cast(values, tf.float32)
        signed, unsigned, mantissa, exponent = tf.int32, tf.uint32, 23, 8
    bits = tf.bitcast(tf.reshape(values, [-1]), unsigned)
    magnitude = tf.bitwise.bitwise_and(bits, tf.constant(signed.max, unsigned))
    infinite_or_nan = 2**exponent - 1
    kinds = tf.bitcast(tf.bitwise.right_shift(magnitude, tf.constant(mantissa, unsigned)), signed)
    for special, kind in ((0, infinite_or_nan + 1), (infinite_or_nan << mantissa, infinite_or_nan + 2)):
        kinds = tf.where(tf.equal(magnitude, tf.constant(special, unsigned)), tf.constant(kind, signed), kinds)
    bias = 2 ** (exponent - 1) - 1
    columns = [*(column(kind - bias) for kind in range(infinite_or_nan)), NAN, ZEROS, INFINITE]
    # The raw operation is faster than tf.math.bincount, which also computes the maximum of all values.
    histogram = tf.raw_ops.DenseBincount(
        input=kinds, size=tf.constant(len(columns), signed), weights=tf.constant([], tf.int32)
    )
    # TensorFlow cannot stack int32 tensors on a GPU.
    return tf.cast(tf.math.unsorted_segment_sum(histogram, np.array(columns), COLUMNS), tf.int64)
