"""Scaling a loss and unscaling gradients, against NumPy."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale.core import scaling
from tf_lossscale.core.graphs import optimization_barrier

SETTINGS = hypothesis.settings(max_examples=100)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
values = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=2), elements=st.floats(-1000, 1000, width=16))
exponents = st.integers(-8, 20)


@SETTINGS
@hypothesis.given(values, exponents)
def test_unscaling_what_was_scaled_by_a_power_of_two_gives_back_every_bit(array, exponent):
    scale = tf.constant(2.0**exponent)
    scaled = scaling.scale_loss(tf.constant(array), scale)
    np.testing.assert_array_equal(scaled, array * np.float32(2.0**exponent))
    (back,) = scaling.unscale([scaled], scale)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept(dtype):
    scale, loss = tf.constant(8.0), tf.constant([2.0, 0.5], dtype)
    scaled = scaling.scale_loss(loss, scale)
    (back,) = scaling.unscale([scaled], scale)
    assert scaled.dtype == back.dtype == dtype
    np.testing.assert_array_equal(tf.cast(scaled, tf.float32), [16.0, 4.0])
    np.testing.assert_array_equal(back, loss)


def test_structures_and_python_numbers():
    nested = scaling.scale_loss({"a": 1.0, "b": (tf.constant([2.0]), [tf.constant(3.0)])}, tf.constant(8.0))
    assert float(nested["a"]) == 8.0
    assert float(nested["b"][1][0]) == 24.0


@pytest.mark.parametrize(("dtype", "wide"), [*zip(DTYPES, ["float32", "float32", "float32", "float64"])])
def test_a_product_with_the_scale_is_exact_and_does_not_overflow_in_half_precision(dtype, wide):
    digits = 1 + 2.0 ** {"float16": -10, "bfloat16": -7, "float32": -23, "float64": -52}[dtype]
    product = scaling.multiplied(tf.constant([digits, 4.0], dtype), tf.constant(2.0**100))
    assert product.dtype == wide
    np.testing.assert_array_equal(product, [digits * 2.0**100, 2.0**102])


def test_none_and_indexed_slices_are_kept():
    slices = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([3]), tf.constant([5, 1]))
    none, sparse, dense = scaling.unscale(iter([None, slices, np.float32(16.0)]), tf.constant(8.0))
    assert none is None
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.values.numpy(), sparse.indices.numpy(), dense.numpy()) == ([[1.0]], [3], 2.0)
    assert sparse.dense_shape is slices.dense_shape


@pytest.mark.parametrize("wrong", [3, tf.constant([1, 2]), True, "loss", tf.constant(1j)], ids=repr)
def test_what_does_not_float_is_a_type_error_that_says_so(wrong):
    with pytest.raises(TypeError, match="must be a floating-point tensor, but got dtype"):
        scaling.scale_loss(wrong, tf.constant(8.0))
    with pytest.raises(TypeError, match="must be a floating-point tensor, but got dtype"):
        scaling.unscale([wrong], tf.constant(8.0))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("constant", [False, True], ids=["variable", "constant"])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["function", "xla"])
def test_an_overflow_between_scaling_and_unscaling_stays_an_overflow(options, constant, dtype):
    variable = tf.Variable(2.0**15)

    @tf.function(**options)
    def there_and_back(values):
        scale = tf.constant(2.0**15) if constant else variable.read_value()
        return scaling.unscale([scaling.scale_loss(values, scale)], scale)[0]

    values = tf.constant([1e36 if dtype == "float32" else 1e3, 1.0], dtype)
    np.testing.assert_array_equal(there_and_back(values), [np.inf, 1.0])
    if options:
        compiled = there_and_back.experimental_get_compiler_ir(values)(stage="optimized_hlo")
        assert " multiply(" in compiled
        assert " divide(" in compiled


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["function", "xla"])
def test_opaque_values_are_unchanged_in_eager_mode_and_let_gradients_of_gradients_through(options):
    tensor = tf.constant(1.0)
    assert optimization_barrier(tensor) is tensor

    @tf.function(**options)
    def second_derivative(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                scaled = x**3 * 8.0
            (unscaled,) = scaling.unscale([inner.gradient(scaled, x)], tf.constant(8.0))
        return outer.gradient(unscaled, x)

    assert float(second_derivative(tf.constant(2.0))) == 12.0
