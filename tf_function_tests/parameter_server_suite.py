"""What a coordinator alone can test, in the process that test_processes.py makes one: workers that step all at once.

Workers of ParameterServerStrategy share weights and loss scale, and do not wait for each other.
"""

import os
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES, keras_2_families
from tf_function_tests.cell import why_not
from tf_lossscale import LossScaleOptimizer

WORKERS = [int(each) for each in os.environ.get("WORKERS", "").split()]
ABLE = [family for family in ALL_FAMILIES if not why_not(family, "parameter_server", "function")]


class Shared:
    """A weight that all workers move, by a gradient of 1 or by an overflow.

    Args:
        family: of the optimizer.
        amid: called between the loss and the gradient of each step, with the optimizer.
        unscales: whether the loop unscales the gradients. Otherwise `apply_gradients` does.
    """

    def __init__(self, family, amid=lambda optimizer: None, unscales=True):
        self.coordinator = strategies.coordinator()
        with strategies.get("parameter_server").scope():
            self.weight = tf.Variable([0.0, 0.0])
            self.optimizer = LossScaleOptimizer(family.sgd(), initial_scale=2.0**10, dynamic_growth_steps=3)

        def replica(gradient):
            with tf.GradientTape() as tape:
                scale_loss = self.optimizer.get_scaled_loss if unscales else self.optimizer.scale_loss
                scaled = scale_loss(tf.reduce_sum(self.weight * gradient))
            amid(self.optimizer)
            gradients = tape.gradient(scaled, [self.weight])
            if unscales:
                gradients = self.optimizer.get_unscaled_gradients(gradients)
            self.optimizer.apply_gradients(zip(gradients, [self.weight]))

        self._step = tf.function(lambda gradient: strategies.get("parameter_server").run(replica, args=(gradient,)))

    def schedule(self, gradient):
        self.coordinator.schedule(self._step, args=(tf.constant(gradient),))

    def join(self):
        self.coordinator.join()


@pytest.mark.parametrize("unscales", [True, False], ids=["get_unscaled_gradients", "apply_gradients"])
@pytest.mark.parametrize("family", ABLE, ids=[family.name for family in ABLE])
def test_a_gradient_is_unscaled_by_what_its_loss_was_scaled_by_though_another_worker_moves_the_scale(family, unscales):
    shared = Shared(family, lambda optimizer: optimizer._loss_scale.current_loss_scale.assign(64.0), unscales)
    shared.schedule(1.0)
    shared.join()
    np.testing.assert_array_equal(shared.weight.numpy(), [-0.5, -0.5])
    assert float(shared.optimizer.loss_scale) == 64.0


@pytest.mark.parametrize("family", ABLE, ids=[family.name for family in ABLE])
def test_workers_step_at_the_same_time(family):
    shared = Shared(family)
    bad = np.random.default_rng(0).random(60) < 0.3
    for overflows in bad:
        shared.schedule(np.inf if overflows else 1.0)
    shared.join()
    # Each finite step is 0.5 times 1, whatever other workers did to the scale between its loss and its gradient.
    np.testing.assert_array_equal(shared.weight.numpy(), [-0.5 * np.sum(~bad)] * 2)
    if family.name == "keras3":  # reads its count and writes it, so that one of two counts at the same time is lost
        assert 1 <= int(shared.optimizer.iterations) <= 60
    elif family.counts:
        assert int(shared.optimizer.iterations) == 60
    scale = float(shared.optimizer.loss_scale)
    assert 1.0 <= scale <= 2.0**30
    assert scale == 2.0 ** round(np.log2(scale))
    shared.schedule(1.0)
    shared.join()
    assert not bool(shared.optimizer.last_step_skipped)


@keras_2_families
def test_fit_skips_batches_that_overflow(family):
    keras = family.keras
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[9] = 1e38
    with strategies.get("parameter_server").scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer = LossScaleOptimizer(family.adam(), initial_scale=64.0, dynamic_growth_steps=1000)
        model.compile(optimizer, "mse", jit_compile=False)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat(), steps_per_epoch=20, epochs=2, verbose=0)
    assert all(np.isfinite(weights).all() and weights.any() for weights in model.get_weights())
    assert int(np.asarray(optimizer.iterations)) == 40
    assert float(optimizer.loss_scale) < 64.0


def test_keras_3_cannot_fit_with_any_optimizer_and_the_wrapper_says_so(monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    Shared(FAMILIES[1])
    assert not seen
    Shared(FAMILIES[0])
    assert len(seen) == 1
    assert re.match(r"Keras 3's model\.fit fails under .*Strategy.*custom training loop.*tf_keras", seen[0])
    keras = FAMILIES[0].keras
    with strategies.get("parameter_server").scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"ClusterCoordinator\.create_per_worker_dataset"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


@pytest.mark.parametrize("family", ABLE, ids=[family.name for family in ABLE])
def test_checkpoints_are_restored_without_parameter_servers_and_with(family, tmp_path):
    shared = Shared(family)
    for gradient in (1.0, np.inf, 1.0):
        shared.schedule(gradient)
        shared.join()
    path = tf.train.Checkpoint(optimizer=shared.optimizer, weight=shared.weight).save(str(tmp_path / "ckpt"))

    alone = LossScaleOptimizer(family.sgd())
    weight = tf.Variable([9.0, 9.0])
    tf.train.Checkpoint(optimizer=alone, weight=weight).restore(path)
    again = Shared(family)
    tf.train.Checkpoint(optimizer=again.optimizer, weight=again.weight).restore(path)
    for optimizer in (alone, again.optimizer):
        assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter.numpy())) == (512.0, 1)
    assert weight.numpy().tolist() == again.weight.numpy().tolist() == [-1.0, -1.0]


def test_a_worker_that_dies_takes_nothing_with_it():  # the last one: its worker is gone
    shared = Shared(FAMILIES[1])
    shared.schedule(np.inf)
    shared.join()
    for i in range(40):
        shared.schedule(1.0)
        if i == 20:
            os.kill(WORKERS[1], signal.SIGKILL)
    shared.join()
    # A step that was under way may have been taken and then, unanswered, be taken once more by another worker.
    steps = int(shared.optimizer.iterations)
    assert steps in (41, 42)
    np.testing.assert_array_equal(shared.weight.numpy(), [-0.5 * (steps - 1)] * 2)
    assert float(shared.optimizer.loss_scale) >= 2.0**9
