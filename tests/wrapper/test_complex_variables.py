"""Complex variables are trained as by the bare optimizer, and an overflow of either part skips the step."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer

WAYS = {
    "eager": lambda step: step,
    "function": tf.function,
    "compiled": lambda step: tf.function(step, jit_compile=True),
}


@pytest.mark.parametrize("scale", [64.0, 2.0**100])  # the square of the second one is infinite
@pytest.mark.parametrize(
    ("family", "way"),
    combinations(
        [family for family in ALL_FAMILIES if family.name != "sonnet"],
        WAYS,
        usual=["keras3-function", "tf_keras-eager", "tf1-function", "keras3-compiled"],
        others=slow_one_in(3),
    ),
)
def test_complex_variables_train_and_an_infinite_part_skips_the_step(family, way, scale):
    # Real variables of one shape are stacked, complex ones are not.
    variables = [tf.Variable(tf.complex([3.0, 1.0], [2.0, 0.0])) for _ in range(5)]
    variables += [tf.Variable([1.0, 2.0]) for _ in range(5)]
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=scale)
    optimizer.build(variables)

    @WAYS[way]
    def step(factor):
        with tf.GradientTape() as tape:
            squares = [tf.reduce_sum(tf.math.real(v * tf.math.conj(v)) * factor) for v in variables]
            loss = optimizer.get_scaled_loss(tf.add_n(squares))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables))

    step(tf.constant(0.25))
    for variable in variables:
        wanted = [2.25 + 1.5j, 0.75] if variable.dtype.is_complex else [0.75, 1.5]
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6)
    before = [variable.numpy() for variable in variables]
    step(tf.constant(float("inf")))
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (scale / 2, 1)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("part", [1.0, 1j])
@pytest.mark.parametrize("way", ["eager", "function"])
def test_rows_of_a_complex_table_are_unscaled_and_checked(way, part):
    table = tf.Variable(tf.ones([4, 2], tf.complex64))
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=64.0)

    @WAYS[way]
    def step(factor):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [1, 1, 3])
            loss = optimizer.get_scaled_loss(tf.reduce_sum(tf.math.real(rows * factor)))
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(tape.gradient(loss, [table])), [table]))

    step(tf.constant(part, tf.complex64))
    np.testing.assert_allclose(table[:, 0], [1, 1 - np.conj(part), 1, 1 - 0.5 * np.conj(part)])
    step(tf.constant(3e38 * part, tf.complex64))
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_allclose(table[:, 0], [1, 1 - np.conj(part), 1, 1 - 0.5 * np.conj(part)])
