"""Sonnet 2: its own Replicator, and its optimizers' attributes."""

import numpy as np
import pytest
import tensorflow as tf

from tests import loops
from tf_lossscale import LossScaleOptimizer

sonnet = pytest.importorskip("sonnet")


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


def test_hyperparameters_are_read_and_set_and_steps_counted_through_the_wrapper():
    weight, optimizer = tf.Variable(1.0), LossScaleOptimizer(sonnet.optimizers.Adam(0.1, beta1=0.5))
    assert (optimizer.learning_rate, optimizer.beta1) == (0.1, 0.5)
    optimizer.beta1 = 0.75
    assert optimizer.inner_optimizer.beta1 == 0.75
    assert repr(optimizer).startswith("<LossScaleOptimizer loss_scale=32768")
    assert isinstance(optimizer, sonnet.Optimizer)
    for gradient in (1.0, np.nan):
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
        assert int(optimizer.iterations) == int(optimizer.step) == 1
    with pytest.raises(NotImplementedError, match=r"tf\.train\.Checkpoint"):
        optimizer.get_config()
    with pytest.raises(TypeError, match="unexpected keyword"):
        optimizer.apply_gradients([(tf.constant(1.0), weight)], clip=1)
