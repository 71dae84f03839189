"""Threads that create wrappers and train with them do not disturb each other."""

import concurrent.futures
import sys

import pytest
import tensorflow as tf

from tests import loops
from tf_lossscale import LossScaleOptimizer


@pytest.fixture
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work, count=8):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.slow
def test_threads_create_wrappers_while_many_are_alive(frequent_switches):
    alive = [LossScaleOptimizer(tf.keras.optimizers.SGD()) for _ in range(100)]
    in_threads(lambda number: [LossScaleOptimizer(tf.keras.optimizers.SGD()) for _ in range(20)])
    assert len(alive) == 100


def test_threads_train_their_own_variables(frequent_switches):
    def train(number):
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=3)
        weight = tf.Variable(0.0)
        optimizer.build([weight])
        for _ in range(20):
            loops.step(optimizer, lambda: weight * float(number + 1), [weight])
        return weight.numpy().item(), optimizer.loss_scale.numpy().item()

    assert in_threads(train) == [(-10.0 * (number + 1), 8.0 * 2**6) for number in range(8)]
