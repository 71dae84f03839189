"""Several optimizers that share one loss scale."""

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES, all_families
from tf_lossscale import LossScaleOptimizer, SharedLossScale

CALLS = ["eager", "function", "compiled"]


def pair(family, shared, **kwargs):
    return [LossScaleOptimizer(family.sgd(), loss_scale=shared, **kwargs) for _ in range(2)]


def together(shared, optimizers, weights, gradients):
    with shared.together() as step:
        for optimizer, weight, gradient in zip(optimizers, weights, tf.unstack(gradients)):
            optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
            optimizer.apply_gradients([(gradient, weight)])
    return step


@pytest.mark.parametrize("call", CALLS)
@all_families
def test_an_overflow_in_any_skips_all_and_moves_the_scale_once(family, call):
    if call == "compiled" and family.name not in ("keras3", "tf_keras"):
        pytest.skip("two families are enough for XLA")
    shared = SharedLossScale(64, 2)
    optimizers, weights = pair(family, shared), [tf.Variable(1.0), tf.Variable(1.0)]

    def step(gradients):
        together(shared, optimizers, weights, gradients)

    function = step if call == "eager" else tf.function(step, jit_compile=call == "compiled")
    seen = []
    for gradients in ([1.0, np.inf], [np.nan, 1.0], [1.0, 2.0], [1.0, 0.0]):
        function(tf.constant(gradients))
        seen.append((float(optimizers[0].loss_scale), *(float(w) for w in weights)))
    assert seen == [(32, 1, 1), (16, 1, 1), (16, 0.5, 0), (32, 0, 0)]
    assert optimizers[0].state() == optimizers[1].state()
    assert optimizers[0].state()["total_steps"] == 4
    if family.counts:
        assert [int(optimizer.iterations) for optimizer in optimizers] == [4, 4]


@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f.distributes], ids=lambda f: f.name)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_nan_of_one_optimizer_on_one_replica_skips_all_on_all(family, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        shared = SharedLossScale(64, 2)
        optimizers, weights = pair(family, shared), [tf.Variable(1.0), tf.Variable(1.0)]

    def replica(gradients):
        mine = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
        together(shared, optimizers, weights, mine)

    step = lambda gradients: strategy.run(replica, args=(gradients,))  # noqa: E731
    function = tf.function(step) if compiled else step
    good = [0.5, 0.25]
    for bad in ([[0.5, np.nan], good], [good, [np.inf, 0.25]]):
        function(tf.constant(bad))
        assert [w.numpy() for w in weights] == [1.0, 1.0]
    function(tf.constant([good, good]))
    for variable, value in zip((*weights, shared.current_loss_scale), (0.5, 0.75, 16.0)):
        assert [float(c) for c in strategy.experimental_local_results(variable)] == [value] * 2


def test_in_a_session_the_step_has_an_operation():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        shared = SharedLossScale(64)
        optimizers, weights = pair(ALL_FAMILIES[3], shared), [tf.Variable(1.0), tf.Variable(1.0)]
        gradients = tf.compat.v1.placeholder(tf.float32, [2])
        step = together(shared, optimizers, weights, gradients)
        session.run(tf.compat.v1.global_variables_initializer())
        for value in (np.nan, 1.0):
            session.run(step.operation, {gradients: [value, 1.0]})
        assert session.run([*weights, optimizers[0].loss_scale]) == [0.5, 0.5, 32.0]


def test_the_report_names_the_overflow_of_the_one_that_had_it():
    shared = SharedLossScale()
    optimizers = pair(FAMILIES[0], shared, diagnose=True)
    weights = [tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")]
    together(shared, optimizers, weights, [1.0, np.nan])
    assert optimizers[0].overflow_report() == ()
    assert [row.variable for row in optimizers[1].overflow_report()] == ["b"]


def test_a_step_outside_of_the_block_is_refused_changes_nothing_and_can_be_taken_again_inside():
    shared = SharedLossScale()
    optimizer, weight = pair(FAMILIES[0], shared)[0], tf.Variable(1.0)
    optimizer.scale_loss(0.0)
    gradients_and_variables = [(shared(), weight)]
    with pytest.raises(RuntimeError, match=r"can only step inside `with shared\.together\(\):`"):
        optimizer.apply_gradients(gradients_and_variables)
    assert (weight.numpy(), optimizer.state()["total_steps"]) == (1.0, 0)
    with shared.together():
        optimizer.apply_gradients(gradients_and_variables)
    assert weight.numpy() == 0.5


def test_a_block_that_raises_applies_nothing_and_the_next_one_works():
    shared = SharedLossScale()
    optimizer, weight = pair(FAMILIES[0], shared)[0], tf.Variable(1.0)
    with pytest.raises(KeyError), shared.together():
        optimizer.minimize(lambda: weight * 1.0, [weight])
        raise KeyError
    assert weight.numpy() == 1.0
    with shared.together():
        optimizer.minimize(lambda: weight * 1.0, [weight])
    assert weight.numpy() == 0.5
    with pytest.raises(RuntimeError, match="cannot be nested"), shared.together(), shared.together():
        pass
    with shared.together():
        pass
    assert optimizer.state()["total_steps"] == 1, "a block without a step is none"


def test_gradients_that_are_summed_and_gradients_that_are_not_step_together():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        shared = SharedLossScale(8.0)
        optimizers, weights = pair(FAMILIES[0], shared), [tf.Variable(8.0), tf.Variable(8.0)]

    @tf.function
    def step(gradient):
        with shared.together():
            for optimizer, weight, summed in zip(optimizers, weights, (False, True)):
                optimizer.scale_loss(0.0)
                optimizer.apply_gradients([(8.0 * gradient, weight)], skip_gradients_aggregation=summed)

    strategy.run(step, (tf.constant(1.0),))
    assert [weight.numpy().item() for weight in weights] == [7.0, 7.5]


def test_one_scaled_loss_of_two_optimizers_warns_of_nothing(warnings):
    shared, weights = SharedLossScale(64), [tf.Variable(1.0), tf.Variable(1.0)]
    optimizers = pair(FAMILIES[0], shared)
    with shared.together():
        with tf.GradientTape() as tape:
            loss = optimizers[0].get_scaled_loss(weights[0] + weights[1])
        for optimizer, weight, gradient in zip(optimizers, weights, tape.gradient(loss, weights)):
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient]), [weight]))
    assert [float(weight) for weight in weights] == [0.5, 0.5]
    assert not warnings
    (forgetful, weight) = LossScaleOptimizer(FAMILIES[0].sgd(), loss_scale=shared), weights[0]
    with shared.together():
        forgetful.apply_gradients([(tf.constant(1.0), weight)])
    assert "You forgot to call LossScaleOptimizer.get_unscaled_gradients()" in warnings[0]
