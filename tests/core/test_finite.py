"""Whether gradients are finite, against NumPy."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations, named
from tf_lossscale.core.finite import all_finite

SETTINGS = hypothesis.settings(max_examples=150)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
INF, NAN = float("inf"), float("nan")

arrays = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements={"allow_nan": True, "allow_infinity": True},
)


@SETTINGS
@hypothesis.given(st.lists(st.one_of(st.none(), arrays), max_size=4))
def test_it_says_what_numpy_says(gradients):
    expected = all(np.all(np.isfinite(g)) for g in gradients if g is not None)
    assert bool(all_finite([None if g is None else tf.constant(g) for g in gradients])) == expected


modes = pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "function", "xla"])


def checking(compiled):
    return all_finite if compiled is None else tf.function(all_finite, jit_compile=compiled)


@pytest.mark.parametrize(
    ("compiled", "value", "dtype"),
    combinations(
        named({"eager": None, "function": False, "xla": True}),
        [INF, -INF, NAN],
        DTYPES,
        usual=["eager--inf-float16", "function-nan-bfloat16", "xla-nan-float64", "eager-inf-float32"],
    ),
)
def test_one_bad_value_anywhere_is_found(dtype, value, compiled):
    check = checking(compiled)
    for place in (0, 500, 999):
        gradient = np.ones(1000)
        gradient[place] = value
        bad, fine = tf.cast(gradient, dtype), tf.ones([3, 3], dtype)
        assert not check([fine, bad, fine])
        assert check([fine, fine])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_are_finite_though_their_squares_and_sums_are_not(dtype):
    largest = tf.cast(tf.constant(np.float64(tf.as_dtype(dtype).max)), dtype)
    assert all_finite([tf.fill([4096], largest)])
    assert all_finite([tf.stack([largest, -largest, tf.zeros([], dtype)])])


def slices(values, indices, dtype="float32"):
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant(indices), tf.constant([8, 2]))


@modes
@pytest.mark.parametrize(
    ("values", "indices", "finite"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [0, 1], True),
        ([[1.0, NAN], [3.0, 4.0]], [0, 0], False),
        ([[3.0, 4.0], [INF, 4.0]], [0, 1], False),
        ([[INF, 0.0], [-INF, 0.0]], [5, 5], False),
        # Rows with the same index are summed before they are applied.
        ([[3e38, 0.0], [3e38, 0.0]], [5, 5], False),
        ([[3e38, 0.0], [3e38, 0.0]], [5, 6], True),
        ([[3e38, 0.0], [-3e38, 0.0]], [5, 5], True),
    ],
)
def test_sparse_rows(values, indices, finite, compiled):
    assert bool(checking(compiled)([slices(values, indices)])) == finite


def test_sparse_gradients_without_a_shape_or_without_rows():
    assert all_finite([tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 1]))])
    assert not all_finite([tf.IndexedSlices(tf.constant([[NAN]]), tf.constant([0]))])
    assert all_finite([tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int64), tf.constant([8, 2]))])
    assert all_finite([None, tf.zeros([0])])


@SETTINGS
@hypothesis.given(
    hnp.arrays(np.float16, (6, 2), elements={"allow_nan": True, "allow_infinity": True}),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_random_sparse_rows_count_as_their_sum(values, indices):
    with np.errstate(all="ignore"):
        sums, sizes = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
        np.add.at(sums, indices, values.astype(np.float32))
        np.add.at(sizes, indices, np.abs(values).astype(np.float32))
    # Where sizes go beyond float16 and their sum does not, the order in which rows are summed decides.
    hypothesis.assume(not ((sizes > 65000) & (np.abs(sums) < 66000)).any())
    expected = bool(np.all(np.isfinite(sums)) and np.all(np.abs(sums) <= 65504))
    assert bool(all_finite([slices(values, indices, "float16")])) == expected


def running_sum(values):
    """What tf_keras applies of sparse rows with the same index."""
    return tf.math.unsorted_segment_sum(values, tf.zeros([len(values)], tf.int32), 1)


@pytest.mark.parametrize("compiled", [None, False], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("first", "row", "count"),
    # In the running sum each row is rounded, up to 32 in the first case: its result is what is applied.
    [(32768.0, 17.0, 1024), (-32768.0, -17.0, 1024), (16384.0, 8.5, 2200), (32768.0, 16.0, 3000), (60000.0, 1.0, 5000)],
)
def test_a_sum_of_float16_rows_is_judged_as_it_is_rounded_when_it_is_applied(first, row, count, compiled):
    values = tf.cast(tf.concat([[[first]], tf.fill([count, 1], row)], 0), tf.float16)
    applied = bool(tf.reduce_all(tf.math.is_finite(running_sum(values))))
    rows = tf.IndexedSlices(values, tf.zeros([count + 1], tf.int32), tf.constant([4, 1]))
    assert bool(checking(compiled)([rows])) == applied


@SETTINGS
@hypothesis.given(
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 400),
    st.floats(0.001, 4.0),
)
def test_random_rows_near_the_largest_number_are_judged_as_they_are_applied(dtype, seed, count, size):
    # One sign, so that sums come near the largest number and each rounding matters.
    random = np.random.default_rng(seed).uniform(0.1, 1.0, (count, 1))
    values = tf.cast(random * (size / random.sum()) * float(tf.as_dtype(dtype).max), dtype)
    applied = bool(tf.reduce_all(tf.math.is_finite(running_sum(values))))
    rows = tf.IndexedSlices(values, tf.fill([count], 3), tf.constant([4, 1]))
    assert bool(all_finite([rows])) == applied


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_a_function_has_just_unstacked_are_not_stacked_again(axis, bad):
    @tf.function
    def check(stack):
        return all_finite(tf.unstack(stack, axis=axis))

    stack = tf.linalg.diag([1.0, 2.0, 3.0, NAN if bad else 4.0])
    assert bool(check(stack)) != bad
    assert "Pack" not in [operation.type for operation in check.get_concrete_function(stack).graph.get_operations()]
