"""Gradients are divided by the factor that multiplied their loss, although the scale has moved since."""

import gc
import weakref

import pytest
import tensorflow as tf

from tests.families import FAMILIES, families
from tf_lossscale import DynamicLossScale, LossScaleOptimizer
from tf_lossscale.core import replicas


def test_another_worker_changes_the_scale_between_the_loss_and_its_gradients(monkeypatch):
    monkeypatch.setattr(replicas, "workers_step_alone", lambda: True)
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer._loss_scale.current_loss_scale.assign(4.0)
    (gradient,) = optimizer.get_unscaled_gradients([tf.constant(8.0)])
    assert gradient.numpy() == 1.0


@pytest.mark.table("keras3-function-tf_keras", "keras3-eager-tf_keras_legacy", "tf2-eager-tf_keras", every=1)
@families
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("contract", ["tf2", "keras3"])
def test_one_scaled_loss_and_two_updates_though_the_first_moves_the_scale(family, compiled, contract):
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), initial_scale=1024.0, dynamic_growth_steps=1)
    optimizer.build([a, b])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = 0.25 * a + 0.25 * b
            scaled = optimizer.get_scaled_loss(loss) if contract == "tf2" else optimizer.scale_loss(loss)
        for weight in (a, b):
            gradients = tape.gradient(scaled, [weight])
            if contract == "tf2":
                optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [weight]))
            else:
                optimizer.apply(gradients, [weight])

    (tf.function(step) if compiled else step)()
    assert (a.numpy(), b.numpy()) == (0.75, 0.75)


def test_an_abandoned_scaled_loss_lends_its_factor_to_no_gradients_of_a_function():
    optimizer, weight = (
        LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0, dynamic_growth_steps=1),
        tf.Variable(4.0),
    )

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(weight)
        return tape.gradient(loss, weight)

    for _ in range(3):
        optimizer.get_scaled_loss(0.0)  # for a log
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient()]), [weight]))
    assert weight.numpy() == 4.0 - 3 * 0.5


def test_a_loss_scaled_in_a_loop_and_gradients_outside_of_it():
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)

    @tf.function
    def gradients():
        total = tf.constant(0.0)
        for _ in tf.range(2):
            total += optimizer.get_scaled_loss(1.0)
        return optimizer.get_unscaled_gradients([total])

    assert gradients()[0].numpy() == 2.0


def test_a_traced_function_is_not_kept_alive_by_its_factors():
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)
    function = tf.function(lambda: optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(1.0)]))
    graph = weakref.ref(function.get_concrete_function().graph)
    del function
    gc.collect()
    assert graph() is None


def test_two_optimizers_share_a_scale_that_the_first_ones_step_halves():
    scale = DynamicLossScale(8.0)
    one, two = (LossScaleOptimizer(FAMILIES[0].sgd(), loss_scale=scale) for _ in range(2))
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        losses = one.get_scaled_loss(float("inf") * first), two.get_scaled_loss(0.25 * second)
    one.apply_gradients(zip(one.get_unscaled_gradients([tape.gradient(losses[0], first)]), [first]))
    assert scale().numpy() == 4.0
    (gradient,) = two.get_unscaled_gradients([tape.gradient(losses[1], second)])
    assert gradient.numpy() == 0.25


def test_a_traced_step_moves_the_scale_between_an_eager_loss_and_its_gradients():
    optimizer, weight = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0), tf.Variable(1.0)

    @tf.function
    def overflow():
        optimizer.apply_gradients([(tf.constant(float("inf")), weight)])

    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(0.25 * weight)
    overflow()
    (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])
    assert optimizer.loss_scale.numpy() == 4.0 and gradient.numpy() == 0.25
