"""Gradients counted by exponent, and the report on them."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations
from tests.diagnosis.made import row_of
from tf_lossscale import FixedLossScale
from tf_lossscale.diagnosis import exponent_counts, precision_report
from tf_lossscale.diagnosis.precision import COLUMNS

MODES = {
    "eager": lambda function: function,
    "function": tf.function,
    "compiled": lambda function: tf.function(function, jit_compile=True),
}
modes = pytest.mark.parametrize("mode", MODES)


def with_neighbours(powers):
    with np.errstate(over="ignore"):
        return np.concatenate([powers, -powers, np.nextafter(powers, np.inf), np.nextafter(powers, -np.inf)])


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan]
# Bits of NaNs that look most like infinity, and of the smallest and largest subnormal numbers.
BITS = np.array([0x7F800001, 0xFF800001, 1, 0x80000001, 0x007FFFFF], np.uint32)
with np.errstate(over="ignore"):
    FLOAT32 = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
VALUES = {
    "float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
    "bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "float32": np.concatenate([with_neighbours(FLOAT32), np.float32(SPECIAL), BITS.view(np.float32)]),
    "float64": np.concatenate([with_neighbours(np.ldexp(1.0, np.arange(-1074, 1024))), SPECIAL]),
}


@modes
@pytest.mark.parametrize("dtype", VALUES)
def test_each_value_counts_for_its_exact_exponent(dtype, mode):
    values = VALUES[dtype]
    found = MODES[mode](lambda gradient: exponent_counts([gradient]))(tf.constant(values))
    np.testing.assert_array_equal(found, [row_of(values)])


@pytest.mark.parametrize("mode", combinations(MODES, usual=["function", "eager"]))
def test_every_gradient_has_a_row_whatever_it_is(mode):
    def rows(values, half, rows_of_slices):
        slices = tf.IndexedSlices(rows_of_slices, tf.constant([7, 7]), tf.constant([9, 2]))
        return exponent_counts([values, None, slices, half, tf.cast(values, tf.float64), values[0, 0], values[:0]])

    values = np.float32([[0.5, -0.5, 0.0], [1e30, np.inf, np.nan]])
    # A cast inside the function would not do: XLA of TensorFlow 2.16 computes float16 with float32's exponents there.
    half = tf.cast(values, tf.float16)
    found = MODES[mode](rows)(tf.constant(values), half, tf.constant([[2.0, 0.0], [-2.0, 2.0**20]])).numpy()
    assert found.dtype == np.int64
    half = [0.5, -0.5, 0.0, np.inf, np.inf, np.nan]  # float16 has no 1e30
    expected = [values.ravel(), [], [2.0, 0.0, -2.0, 2.0**20], half, values.ravel(), [0.5], []]
    np.testing.assert_array_equal(found, [row_of(row) for row in expected])


@modes
def test_a_report_on_counts_of_a_function_is_the_report_on_the_gradients(mode):
    gradients = [tf.constant([1.0, 2.0**-20]), tf.constant([0.0, np.inf])]
    counts = MODES[mode](lambda *gradients: exponent_counts(gradients))(*gradients)
    report = precision_report(counts, ["kernel", "bias"], tf.constant(8.0), step=3)
    assert repr(report) == repr(precision_report(gradients, ["kernel", "bias"], 8, 3))
    assert (report.step, report.scale, report.rows[0].subnormal, report.rows[1].overflow) == (3, 8.0, 0.5, 1.0)


def test_counts_of_replicas_and_batches_can_be_added():
    first, second = (exponent_counts([tf.constant([value])]) for value in (1.0, 4.0))
    np.testing.assert_array_equal(first + second, [row_of([1.0, 4.0])])


def test_the_gradients_of_layers_in_float32_do_not_decide_the_best_scale():
    # The loss overflows in no layer. The layer in float32 has gradients that float16 could not hold at this scale.
    half, wide = tf.constant([2.0**-20, 2.0**-18], tf.float16), tf.constant([2.0**10])
    assert precision_report([half, wide], ["half", "float32"]).best_scale == 2.0**5
    assert precision_report([half], ["half"]).best_scale == 2.0**33


@pytest.mark.parametrize(
    ("gradients", "names", "scale", "error", "text"),
    [
        (
            [tf.constant([1.0])],
            [],
            1.0,
            ValueError,
            "`names` must have a name for each gradient, but got 0 names for 1",
        ),
        (np.zeros([1, COLUMNS - 1]), ["kernel"], 1.0, ValueError, "`names` must have"),
        ([tf.constant([1.0])], ["kernel"], 0.0, ValueError, "`scale` must be a finite float32 number above 0"),
        ([tf.constant([1])], ["kernel"], 1.0, TypeError, "floating-point or complex tensor, but got dtype int32"),
    ],
)
def test_what_cannot_be_reported_on_is_refused(gradients, names, scale, error, text):
    with pytest.raises(error, match=text):
        precision_report(gradients, names, scale)


def test_gradients_that_were_unscaled_are_reported_on_only_at_the_scale_1():
    gradients = FixedLossScale(8.0).unscale([tf.constant([2.0**-20]), None])
    with pytest.raises(ValueError, match=r"returned one of these. Pass the gradients of the scaled loss, or `scale=1`"):
        precision_report(gradients, ["kernel", "none"], 8.0)
    assert precision_report(gradients, ["kernel", "none"]).rows[0].subnormal == 1.0
