"""Gradients counted by exponent: the counts of values, and which steps are counted."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.diagnosis.made import row_of
from tf_lossscale.diagnosis.exponents import Exponents, table
from tf_lossscale.diagnosis.precision import column

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
    found = MODES[mode](lambda gradient: table([gradient]))(tf.constant(values))
    np.testing.assert_array_equal(found, [row_of(values)])


@pytest.mark.table("function", "eager", every=1)
@modes
def test_every_gradient_has_a_row_whatever_it_is(mode):
    def rows(values, half, rows_of_slices):
        slices = tf.IndexedSlices(rows_of_slices, tf.constant([7, 7]), tf.constant([9, 2]))
        return table([values, None, slices, half, tf.cast(values, tf.float64), values[0, 0], values[:0]])

    values = np.float32([[0.5, -0.5, 0.0], [1e30, np.inf, np.nan]])
    # A cast inside the function would not do: XLA of TensorFlow 2.16 computes float16 with float32's exponents there.
    half = tf.cast(values, tf.float16)
    found = MODES[mode](rows)(tf.constant(values), half, tf.constant([[2.0, 0.0], [-2.0, 2.0**20]])).numpy()
    assert found.dtype == np.int64
    half = [0.5, -0.5, 0.0, np.inf, np.inf, np.nan]  # float16 has no 1e30
    expected = [values.ravel(), [], [2.0, 0.0, -2.0, 2.0**20], half, values.ravel(), [0.5], []]
    np.testing.assert_array_equal(found, [row_of(row) for row in expected])


def record(exponents, value=1.0):
    return exponents.record(lambda: ("kernel",), lambda: [tf.fill([3], value)], lambda: tf.constant(8.0))


@pytest.mark.table("function", every=1)
@modes
def test_the_first_step_is_counted_then_every_third_and_on_demand_the_next(mode):
    exponents = Exponents(every=3)

    def take(value):
        record(exponents, value)
        return value

    step, found = MODES[mode](take), []
    for number in range(1, 11):
        if number == 6:
            exponents.count_next()
        step(tf.constant(2.0**number))
        last = exponents.last()
        assert (last.names, last.scale) == (("kernel",), 8.0)
        assert last.counts[0, column(last.step)] == last.counts.sum() == 3, "the counts of that step alone"
        found.append(last.step)
    assert found == [1, 1, 1, 4, 4, 6, 6, 6, 9, 9]


def test_eager_steps_and_those_of_functions_share_one_count():
    exponents = Exponents(every=3)
    function = tf.function(lambda: record(exponents) and None)
    found = []
    for take in (record, function, record, record, function, function, record):
        take(exponents) if take is record else take()
        found.append(exponents.last().step)
    assert found == [1, 1, 1, 4, 4, 4, 7]


def test_the_variables_of_the_last_counted_step_are_shown_if_they_change():
    exponents = Exponents(every=1)
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        gradient = tf.constant([value])
        exponents.record(lambda name=name: (name,), lambda g=gradient: [g], lambda: tf.constant(1.0))
        last = exponents.last()
        assert last.names == (name,)
        assert last.counts[0, column(int(np.log2(value)))] == 1
    assert exponents.last().step == 3


def test_nothing_was_counted_before_the_first_step_and_no_count_is_saved(tmp_path):
    exponents = Exponents(every=1)
    assert exponents.last() is None
    exponents.count_next()
    record(exponents)
    assert exponents.last().step == 1
    assert exponents.variables == ()
    path = tf.train.Checkpoint(exponents=exponents).write(str(tmp_path / "checkpoint"))
    assert not [name for name, _ in tf.train.list_variables(path) if name.startswith("exponents")]
