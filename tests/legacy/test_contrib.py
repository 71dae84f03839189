"""contrib's managers: the variables they keep, and an optimizer that asks one of the user's own."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale import legacy
from tf_lossscale.legacy import contrib

train = tf.compat.v1.train


def test_an_overridden_manager_is_asked():
    class Bold(legacy.ExponentialUpdateLossScaleManager):
        def get_loss_scale(self):
            return 2 * super().get_loss_scale()

    optimizer = contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), Bold(64.0, 2))
    assert float(optimizer.loss_scale) == 128.0


def test_a_fixed_manager_skips_an_overflow_and_does_not_move():
    weight, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
    optimizer = contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), legacy.FixedLossScaleManager(8))
    for gradient, after in ((np.nan, (1.0, 0)), (1.0, (0.5, 1))):
        optimizer.apply_gradients(iter([(tf.constant(gradient), weight)]), global_step=step)
        assert (weight.numpy(), step.numpy()) == after
    assert float(optimizer.loss_scale) == 8.0
    with pytest.raises(ValueError, match="at least 1"):
        legacy.FixedLossScaleManager(0.5)


def test_an_update_of_a_manager_in_a_graph_is_a_tensor_as_in_tensorflow_1():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        manager = legacy.ExponentialUpdateLossScaleManager(64.0, 5, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        update = manager.update_loss_scale(tf.constant(False))
        in_a_branch = tf.cond(tf.constant(True), lambda: manager.update_loss_scale(tf.constant(False)), lambda: False)
        session.run(tf.compat.v1.global_variables_initializer())
        for number, tensor in enumerate([tf.identity(update), in_a_branch]):
            session.run(tensor)
            assert session.run(manager.get_loss_scale()) == 32 / 2**number


def test_a_slow_finite_update_in_a_session_does_not_undo_a_quick_overflow():
    def slow(value):
        time.sleep(0.2)
        return value

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        manager = contrib.ExponentialUpdateLossScaleManager(64.0, 2000, 1, 2.0, 0.5)
        finite = tf.ensure_shape(tf.numpy_function(slow, [tf.constant(True)], tf.bool), [])
        quick = manager.get_loss_scale() < 16.0
        updates = [manager.update_loss_scale(finite), manager.update_loss_scale(quick)]
        session.run(tf.compat.v1.global_variables_initializer())
        scales = []
        for _ in range(4):
            session.run(updates)
            scales.append(session.run(manager.get_loss_scale()))
        assert scales == [32.0, 16.0, 8.0, 8.0]


def test_a_users_own_manager_works_without_deriving_from_ours():
    class Manager:
        def __init__(self):
            self.scale = tf.Variable(8.0)

        def get_loss_scale(self):
            return self.scale

        def update_loss_scale(self, finite_grads):
            return self.scale.assign(tf.where(finite_grads, self.scale + 1, 1.0))

    weight = tf.Variable(1.0)
    optimizer = contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), Manager())
    optimizer.minimize(lambda: 1.0 * weight, var_list=[weight])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 9.0)
    optimizer.apply_gradients([(tf.constant(np.nan), weight)])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 1.0)
    with pytest.raises(TypeError, match="get_loss_scale"):
        contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), "dynamic")
