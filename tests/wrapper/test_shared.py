"""Several optimizers that share one loss scale."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES, all_families
from tf_lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer, SharedLossScale

CALLS = ["eager", "function", "compiled"]


def pair(family, shared, **kwargs):
    return [LossScaleOptimizer(family.sgd(), loss_scale=shared, **kwargs) for _ in range(2)]


def together(shared, optimizers, weights, gradients):
    for optimizer in optimizers:
        optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
    pairs = [(o, [(gradient, weight)]) for o, weight, gradient in zip(optimizers, weights, tf.unstack(gradients))]
    return shared.apply_gradients(pairs)


@pytest.mark.parametrize("call", CALLS)
@all_families
def test_an_overflow_in_any_skips_all_and_moves_the_scale_once(family, call):
    if call == "compiled" and family.name not in ("keras3", "tf_keras"):
        pytest.skip("two families are enough for XLA")
    shared = SharedLossScale(64, 2)
    optimizers, weights = pair(family, shared), [tf.Variable(1.0), tf.Variable(1.0)]

    def step(gradients):
        return together(shared, optimizers, weights, gradients)

    function = step if call == "eager" else tf.function(step, jit_compile=call == "compiled")
    seen = []
    for gradients in ([1.0, np.inf], [np.nan, 1.0], [1.0, 2.0], [1.0, 0.0]):
        applied = bool(function(tf.constant(gradients)))
        seen.append((applied, float(optimizers[0].loss_scale), *(float(w) for w in weights)))
    assert seen == [(False, 32, 1, 1), (False, 16, 1, 1), (True, 16, 0.5, 0), (True, 32, 0, 0)]
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


def test_conditions_loops_and_inner_functions_hold_for_the_joint_step():
    shared = SharedLossScale(8)
    optimizers, weights = pair(FAMILIES[0], shared), [tf.Variable(0.0), tf.Variable(0.0)]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])
    inner = tf.function(lambda: together(shared, optimizers, weights, tf.constant([-2.0, -2.0])))

    @tf.function
    def step(train):
        if train:
            inner()
        for _ in tf.range(3):
            inner()

    step(tf.constant(False))
    assert [float(weight) for weight in weights] == [3.0, 3.0]
    step(tf.constant(True))
    assert [float(weight) for weight in weights] == [7.0, 7.0]
    assert int(shared.total_steps) == 7


def test_the_report_names_the_overflow_of_the_one_that_had_it():
    shared = SharedLossScale()
    optimizers = pair(FAMILIES[0], shared, diagnose=True)
    weights = [tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")]
    together(shared, optimizers, weights, [1.0, np.nan])
    assert optimizers[0].overflow_report() == ()
    assert [row.variable for row in optimizers[1].overflow_report()] == ["b"]


def test_gradients_that_are_summed_and_gradients_that_are_not():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        shared = SharedLossScale(8.0)
        optimizers, weights = pair(FAMILIES[0], shared), [tf.Variable(8.0), tf.Variable(8.0)]

    @tf.function
    def step(gradient, summed):
        for optimizer in optimizers:
            optimizer.scale_loss(0.0)
        pairs = [(optimizer, [(8.0 * gradient, weight)]) for optimizer, weight in zip(optimizers, weights)]
        shared.apply_gradients(pairs, skip_gradients_aggregation=summed)

    strategy.run(step, (tf.constant(1.0), False))
    assert [weight.numpy().item() for weight in weights] == [7.0, 7.0]
    strategy.run(step, (tf.constant(1.0), True))
    assert [weight.numpy().item() for weight in weights] == [6.5, 6.5]


def test_one_scaled_loss_of_two_optimizers_warns_of_nothing(warnings):
    shared, weights = SharedLossScale(64), [tf.Variable(1.0), tf.Variable(1.0)]
    optimizers = pair(FAMILIES[0], shared)
    with tf.GradientTape() as tape:
        loss = optimizers[0].get_scaled_loss(weights[0] + weights[1])
    gradients = [
        optimizer.get_unscaled_gradients([gradient])
        for optimizer, gradient in zip(optimizers, tape.gradient(loss, weights))
    ]
    shared.apply_gradients([(o, zip(g, [w])) for o, g, w in zip(optimizers, gradients, weights)])
    assert [float(weight) for weight in weights] == [0.5, 0.5]
    assert not warnings
    shared = SharedLossScale(64)
    shared.scale(tf.constant(1.0))
    forgetful = LossScaleOptimizer(FAMILIES[0].sgd(), loss_scale=shared)
    shared.apply_gradients([(forgetful, [(tf.constant(1.0), weights[0])])])
    assert "You forgot to call LossScaleOptimizer.get_unscaled_gradients()" in warnings[0]


def test_what_is_refused_changes_nothing():
    class Clipping(LossScaleOptimizer):
        def apply_gradients(self, grads_and_vars, **kwargs):
            return super().apply_gradients([(tf.clip_by_norm(g, 1.0), v) for g, v in grads_and_vars], **kwargs)

    shared, weight = SharedLossScale(), tf.Variable(1.0)
    member, clipping = LossScaleOptimizer(FAMILIES[0].sgd(), loss_scale=shared), None
    clipping = Clipping(FAMILIES[0].sgd(), loss_scale=shared)
    stranger = LossScaleOptimizer(FAMILIES[0].sgd())
    pairs = [(tf.constant(1.0), weight)]
    with pytest.raises(RuntimeError, match=r"shared\.apply_gradients\(\[\(optimizer, grads_and_vars\), \.\.\.\]\)"):
        member.minimize(lambda: weight * 1.0, [weight])
    with pytest.raises(ValueError, match="Each optimizer must be a LossScaleOptimizer"):
        shared.apply_gradients([(member, pairs), (stranger, pairs)])
    with pytest.raises(TypeError, match=r"Clipping overrides apply_gradients\(\)"):
        shared.apply_gradients([(member, pairs), (clipping, pairs)])
    with pytest.raises(ValueError, match="is empty"):
        shared.apply_gradients([])
    assert (weight.numpy(), member.state()["total_steps"]) == (1.0, 0)


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
def test_a_scale_that_moves_does_not_move_in_the_steps_of_two_optimizers(wrap):
    scale, weight = DynamicLossScale(8.0), tf.Variable(1.0)
    first, second = pair(FAMILIES[0], scale)
    steps = [wrap(lambda optimizer=o: optimizer.minimize(lambda: weight * 1.0, [weight])) for o in (first, second)]
    steps[0]()
    with pytest.raises(RuntimeError, match="Two optimizers step with the same DynamicLossScale"):
        steps[1]()
    assert (float(weight), int(scale.total_steps)) == (0.5, 1)
    del first, steps[0]
    gc.collect()
    second.minimize(lambda: weight * 1.0, [weight])
    assert float(weight) == 0.0


def test_a_scale_that_does_not_move_may_belong_to_several_optimizers():
    weight = tf.Variable(1.0)
    for optimizer in pair(FAMILIES[0], FixedLossScale(8.0)):
        optimizer.minimize(lambda: weight * 1.0, [weight])
    assert float(weight) == 0.0
