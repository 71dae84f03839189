"""Sonnet 2: either contract through `apply`, its own Replicator, checkpoints, attributes."""

import numpy as np
import pytest
import tensorflow as tf

from tests import loops
from tf_lossscale import LossScaleOptimizer

sonnet = pytest.importorskip("sonnet")


def gradients(optimizer, weight):
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(tf.reduce_sum(weight**2))
    return tape.gradient(scaled, [weight])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_apply_takes_scaled_updates_and_those_that_were_just_unscaled(compiled, unscales):
    weight, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(sonnet.optimizers.SGD(0.25))

    def step():
        updates = gradients(optimizer, weight)
        optimizer.apply(optimizer.get_unscaled_gradients(updates) if unscales else updates, [weight])

    function = tf.function(step) if compiled else step
    for _ in range(3):
        function()
    np.testing.assert_array_equal(weight, [0.125, 0.25])


def test_the_callers_reduction_is_kept_and_nan_on_one_replica_skips_the_step_on_all():
    strategy = sonnet.distribute.Replicator(["cpu:2", "cpu:3"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(sonnet.optimizers.Momentum(0.5, 0.9), initial_scale=8.0)

    @tf.function
    def step(factors):
        def replica():
            context = tf.distribute.get_replica_context()
            factor = tf.gather(factors, context.replica_id_in_sync_group)
            (unscaled,) = loops.unscaled_gradients(optimizer, lambda: weight * factor, [weight])
            optimizer.apply([context.all_reduce("mean", unscaled)], [weight])

        strategy.run(replica)

    for factors, scale in (([1.0, 2.0], 8.0), ([1.0, np.nan], 4.0), ([np.inf, 1.0], 2.0)):
        step(tf.constant(factors))
        assert [float(copy) for copy in strategy.experimental_local_results(weight)] == [0.25, 0.25]
        assert float(optimizer.loss_scale) == scale


def test_a_skip_leaves_moments_and_step_and_checkpoints_hold_all(tmp_path):
    weight, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(sonnet.optimizers.Adam(0.1))
    optimizer.apply(gradients(optimizer, weight), [weight])
    before = [v.numpy() for v in optimizer.weights]
    optimizer.apply_gradients([(tf.constant([np.nan, 1.0]), weight)])
    for variable, value in zip(optimizer.weights, before):
        np.testing.assert_array_equal(variable, value)
    assert int(optimizer.iterations) == 1

    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "ckpt"))
    again = LossScaleOptimizer(sonnet.optimizers.Adam(0.1))
    again.build([weight])
    tf.train.Checkpoint(optimizer=again).read(path).assert_consumed()
    assert float(again.loss_scale) == float(optimizer.loss_scale) == 2.0**14
    bare = sonnet.optimizers.Adam(0.1)
    bare._initialize([weight])
    tf.train.Checkpoint(optimizer=bare).read(path).expect_partial()
    for mine, theirs in zip((again.inner_optimizer, bare), (optimizer.inner_optimizer,) * 2):
        np.testing.assert_array_equal(mine.m[0], theirs.m[0])


def test_hyperparameters_are_read_and_set_through_the_wrapper():
    optimizer = LossScaleOptimizer(sonnet.optimizers.Adam(0.1, beta1=0.5))
    assert (optimizer.learning_rate, optimizer.beta1) == (0.1, 0.5)
    optimizer.beta1 = 0.75
    assert optimizer.inner_optimizer.beta1 == 0.75
    assert repr(optimizer).startswith("<LossScaleOptimizer loss_scale=32768")
    assert isinstance(optimizer, sonnet.Optimizer)
    with pytest.raises(NotImplementedError, match=r"tf\.train\.Checkpoint"):
        optimizer.get_config()
    with pytest.raises(TypeError, match="unexpected keyword"):
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))], clip=1)
