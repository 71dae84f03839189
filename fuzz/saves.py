"""Models that are saved after every training step, in one of several formats. Injected faults interrupt the saves."""

import functools
import pathlib

import numpy as np
import tensorflow as tf

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

STEPS = 6
BATCH = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
FORMATS = {
    "keras3": ("checkpoint", "keras", "h5", "weights"),
    "tf_keras": ("checkpoint", "keras", "h5", "weights", "saved_model"),
    "tf_keras_legacy": ("checkpoint", "keras", "h5", "saved_model"),
}
SUFFIX = {"keras": ".keras", "h5": ".h5", "weights": ".weights.h5", "saved_model": ""}


def batch(i):
    """Return the training batch for step `i`. Every third batch causes an overflow."""
    return BATCH * np.float32(np.inf if i % 3 == 1 else i + 1)


class Trainee:
    """A small model that takes the same training steps in every process. Every third step overflows.

    Args:
        name: the name of the optimizer's family.
    """

    def __init__(self, name):
        self.family = next(family for family in FAMILIES if family.name == name)
        keras = self.family.keras
        self.optimizer = LossScaleOptimizer(self.family.adam(), initial_scale=64.0, dynamic_growth_steps=2)
        self.model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones"), keras.layers.Dense(1)]
        )
        self.model.layers[1].set_weights([np.float32([[1.0], [-2.0]]), np.zeros(1, np.float32)])
        self.model.compile(self.optimizer, keras.losses.MeanSquaredError(), run_eagerly=True, jit_compile=False)

    def step(self, i):
        self.model.train_on_batch(batch(i), np.ones((4, 1), np.float32))

    def save(self, kind, directory, i):
        """Save the model in the format that `kind` names, such as "checkpoint". The file name contains `i`."""
        if kind == "checkpoint":
            self._manager(directory).save(checkpoint_number=i)
            return
        path = str(pathlib.Path(directory, f"{i}{SUFFIX[kind]}"))
        if kind == "weights":
            self.model.save_weights(path)
        else:
            self.model.save(path, **({"save_format": "tf"} if kind == "saved_model" else {}))

    def load(self, kind, directory, i):
        """Restore the model from the file or folder that `save` wrote with the same arguments."""
        if kind == "checkpoint":
            self._checkpoint().restore(str(pathlib.Path(directory, f"ckpt-{i}"))).assert_existing_objects_matched()
        elif kind == "weights":
            self.optimizer.build(self.model.trainable_variables)
            self.model.load_weights(str(pathlib.Path(directory, f"{i}{SUFFIX[kind]}")))
        else:
            self.model = self.family.keras.models.load_model(str(pathlib.Path(directory, f"{i}{SUFFIX[kind]}")))
            self.optimizer = self.model.optimizer

    def _checkpoint(self):
        return tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

    def _manager(self, directory):
        return tf.train.CheckpointManager(self._checkpoint(), str(directory), max_to_keep=None)

    def state(self):
        """Return the model's weights, the loss scale and the loss scale's counter."""
        numbers = (float(self.optimizer.loss_scale), int(self.optimizer.dynamic_counter))
        return [*map(np.asarray, self.model.get_weights()), *map(np.asarray, numbers)]

    def is_finite(self):
        """Return whether all model variables and optimizer variables are finite."""
        variables = [*self.model.get_weights(), *(np.asarray(v) for v in self.optimizer.variables)]
        return all(np.isfinite(np.asarray(value, np.float64)).all() for value in variables)


@functools.cache
def expected(name):
    """Return the states of an uninterrupted training run: the initial state, and the state after each step."""
    trainee = Trainee(name)
    states = [trainee.state()]
    for i in range(STEPS):
        trainee.step(i)
        states.append(trainee.state())
    return states


def train(begin, directory, name, kind, begins):
    """Train, and save after every step. Call `begin()` right before save number `begins`, counted from 1."""
    trainee = Trainee(name)
    for i in range(STEPS):
        trainee.step(i)
        if i + 1 == begins:
            begin()
        trainee.save(kind, directory, i + 1)


def saved_numbers(kind, directory):
    """Return the numbers of the saves in the directory. Some of them may have been interrupted."""
    if kind == "checkpoint":
        return sorted(int(path.stem.rpartition("-")[2]) for path in pathlib.Path(directory).glob("ckpt-*.index"))
    return sorted(int(path.name.partition(".")[0]) for path in pathlib.Path(directory).iterdir())


def assert_same(one, other, what):
    """Assert that two states are exactly equal."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=what)
