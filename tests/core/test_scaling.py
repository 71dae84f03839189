"""Scaling a loss and unscaling gradients: structures, products in half precision, overflows in graphs."""

import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale import FixedLossScale, LossScaleOptimizer
from tf_lossscale.core import scaling
from tf_lossscale.core.graphs import optimization_barrier

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def test_structures_and_python_numbers():
    nested = scaling.scale_loss({"a": 1.0, "b": (tf.constant([2.0]), [tf.constant(3.0)])}, tf.constant(8.0))
    assert float(nested["a"]) == 8.0
    assert float(nested["b"][1][0]) == 24.0


def test_the_gradient_of_a_single_variable_is_unscaled_as_the_tensor_that_it_is():
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    scale = FixedLossScale(8.0)
    for unscaled in (
        scale.unscale,
        LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=scale).get_unscaled_gradients,
    ):
        with tf.GradientTape() as tape:
            loss = scale.scale(tf.reduce_sum(variable**2))
        gradient = unscaled(tape.gradient(loss, variable))
        assert gradient.numpy().tolist() == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize(("dtype", "wide"), [*zip(DTYPES, ["float32", "float32", "float32", "float64"])])
def test_a_product_with_the_scale_is_exact_and_does_not_overflow_in_half_precision(dtype, wide):
    digits = 1 + 2.0 ** {"float16": -10, "bfloat16": -7, "float32": -23, "float64": -52}[dtype]
    product = scaling.multiplied(tf.constant([digits, 4.0], dtype), tf.constant(2.0**100))
    assert product.dtype == wide
    np.testing.assert_array_equal(product, [digits * 2.0**100, 2.0**102])


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
