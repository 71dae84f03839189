"""Steps without variables, without gradients and with empty batches, in each family."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import MODES
from tests.families import all_families
from tf_lossscale import LossScaleOptimizer

modes = pytest.mark.parametrize("compiled", MODES)


def outcome(step, compiled):
    """Return the name of the error of a step, or None."""
    try:
        (tf.function(step) if compiled else step)()
    except (ValueError, TypeError) as error:
        return type(error).__name__
    return None


@all_families
@modes
def test_a_step_without_variables_is_an_error_except_around_legacy_optimizers_as_in_tf_keras(family, compiled):
    optimizer = LossScaleOptimizer(family.sgd())
    expected = None if family.name == "tf_keras_legacy" else "ValueError"
    assert outcome(lambda: optimizer.apply_gradients([]), compiled) == expected


@all_families
@modes
def test_without_any_gradient_an_error_says_so_and_no_step_is_counted(family, compiled):
    weights, optimizer = [tf.Variable(1.0), tf.Variable(2.0)], LossScaleOptimizer(family.sgd())
    assert outcome(lambda: optimizer.apply_gradients([(None, weight) for weight in weights]), compiled) == "ValueError"
    assert (int(optimizer.total_steps), float(optimizer.loss_scale)) == (0, 2.0**15)


@all_families
@modes
def test_a_variable_without_a_gradient_is_left_alone(family, compiled):
    weights, optimizer = [tf.Variable(1.0), tf.Variable(2.0)], LossScaleOptimizer(family.sgd(), initial_scale=8.0)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(3.0 * weights[0])
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, weights))
        optimizer.apply_gradients(zip(gradients, weights))

    assert outcome(step, compiled) is None
    assert [weight.numpy() for weight in weights] == [-0.5, 2.0]
    assert (int(optimizer.total_steps), int(optimizer.skipped_steps)) == (1, 0)


@all_families
@modes
def test_the_mean_of_an_empty_batch_skips_the_step_and_its_sum_moves_nothing(family, compiled):
    weight, optimizer = tf.Variable([[1.0]]), LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    for reduce in (tf.reduce_mean, tf.reduce_sum):

        def step(reduce=reduce):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(reduce((tf.zeros([0, 1]) @ weight) ** 2))
            optimizer.apply_gradients([(optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])[0], weight)])

        assert outcome(step, compiled) is None
    np.testing.assert_array_equal(weight, [[1.0]])
    assert int(optimizer.total_steps) == 2
