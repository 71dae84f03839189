"""The factor of a loss, in case another worker changes the scale before the gradients are unscaled."""

import pytest
import tensorflow as tf
from absl import logging

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import replicas


@pytest.fixture
def optimizer(monkeypatch):
    monkeypatch.setattr(replicas, "workers_step_alone", lambda: True)
    return LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)


def by_another_worker(optimizer, scale):
    optimizer._loss_scale.current_loss_scale.assign(scale)


def test_gradients_are_divided_by_the_factor_of_their_loss(optimizer):
    optimizer.get_scaled_loss(tf.constant(1.0))
    by_another_worker(optimizer, 4.0)
    (gradient,) = optimizer.get_unscaled_gradients([tf.constant(8.0)])
    assert gradient.numpy() == 1.0


def test_a_loss_of_a_different_function_warns_since_its_factor_is_not_known(optimizer, monkeypatch):
    seen = []
    monkeypatch.setattr(logging, "log_first_n", lambda level, message, n: seen.append(message))
    scaled_loss = tf.function(optimizer.get_scaled_loss)

    @tf.function
    def gradient():
        scaled_loss(tf.constant(1.0))
        return optimizer.get_unscaled_gradients([tf.constant(8.0)])

    assert gradient()[0].numpy() == 1.0
    assert len(seen) == 1
    assert "another worker may have changed the scale in between" in seen[0]
