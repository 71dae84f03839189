"""Libraries that compute the gradients themselves. Each needs Keras 2 as `tf.keras`, and so a process of its own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

RECOMMENDERS = """
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_lossscale

keras = tf.keras


class Rating(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users = keras.layers.Embedding(20, 4, dtype="mixed_float16")
        self.films = keras.layers.Embedding(20, 4, dtype="mixed_float16")
        self.score = keras.layers.Dense(1, dtype="mixed_float16", kernel_regularizer=keras.regularizers.L2(1e-12))
        self.task = tfrs.tasks.Ranking(loss=lambda y_true, y_pred, sample_weight: 1e-7 * tf.reduce_mean(
            (tf.cast(y_pred, tf.float32) - y_true) ** 2))

    def compute_loss(self, features, training=False):
        score = self.score(self.users(features["user"]) * self.films(features["film"]))
        return self.task(labels=features["rating"], predictions=score)


class Scaled(Rating):
    def compute_loss(self, *args, **kwargs):
        return self.optimizer.scale_inside(super().compute_loss)(*args, **kwargs)


random = np.random.default_rng(0)
features = {name: random.integers(20, size=32) for name in ("user", "film")}
features["rating"] = random.normal(size=(32, 1)).astype("float32")
bad = {**features, "rating": features["rating"] * np.inf}


def trained(model_class):
    keras.utils.set_random_seed(0)
    model = model_class()
    optimizer = tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(2.0**20))
    model.compile(optimizer=optimizer)
    model.fit(bad, batch_size=32, verbose=0)  # creates the variables, and overflows
    assert float(optimizer.loss_scale) == 2.0**14
    before = model.get_weights()
    model.fit(bad, batch_size=32, verbose=0)
    assert float(optimizer.loss_scale) == 2.0**13
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
    losses = [model.evaluate(features, return_dict=True, verbose=0)["loss"]]
    model.fit(features, batch_size=32, epochs=10, verbose=0)
    return losses + [model.evaluate(features, return_dict=True, verbose=0)["loss"]]


before, after = trained(Scaled)
assert after < 0.95 * before, (before, after)
before, after = trained(Rating)
assert after > 0.999 * before, "the gradients do not vanish: this test shows nothing"
"""

AGENTS = """
import tensorflow as tf
import tf_lossscale
from tf_agents.agents.dqn import dqn_agent
from tf_agents.networks import network
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import time_step, trajectory

keras = tf.keras
keras.utils.set_random_seed(0)
observed = tensor_spec.TensorSpec([4], tf.float32)


class Net(network.Network):
    def __init__(self, input_tensor_spec, name="Net"):
        super().__init__(input_tensor_spec, state_spec=(), name=name)
        self.hidden = keras.layers.Dense(8, activation="relu", dtype="mixed_float16")
        self.out = keras.layers.Dense(2, dtype="mixed_float16")

    def call(self, observation, step_type=None, network_state=(), training=False):
        return tf.cast(self.out(self.hidden(observation)), tf.float32), network_state


class Scaled(dqn_agent.DqnAgent):
    def _loss(self, *args, **kwargs):
        return self._optimizer.scale_inside(super()._loss)(*args, **kwargs)


def trained(agent_class, weight):
    optimizer = tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    agent = agent_class(
        time_step.time_step_spec(observed),
        tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1),
        q_network=Net(observed),
        optimizer=optimizer,
        gradient_clipping=1.0,
        train_step_counter=tf.Variable(0, dtype=tf.int64),
    )
    agent.initialize()
    ones = tf.ones([8, 2], tf.int32)
    experience = trajectory.Trajectory(
        ones, tf.random.normal([8, 2, 4]), ones, (), ones, tf.ones([8, 2]), tf.ones([8, 2])
    )
    before = [variable.numpy() for variable in agent._q_network.trainable_weights]
    loss = agent.train(experience, weights=tf.fill([8], weight)).loss
    assert tf.math.is_finite(loss)
    same = all((a == b.numpy()).all() for a, b in zip(before, agent._q_network.trainable_weights))
    return same, float(optimizer.loss_scale)


assert trained(Scaled, 1e-8) == (False, 2.0**15)
assert trained(Scaled, 1e4) == (True, 2.0**14)
assert trained(dqn_agent.DqnAgent, 1e-8) == (True, 2.0**15), "the gradients do not vanish: this test shows nothing"
"""

SCRIPTS = {"tensorflow_recommenders": RECOMMENDERS, "tf_agents": AGENTS}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_model_of_a_library_that_never_scales_trains_in_float16(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    settings = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPTS[library]], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
