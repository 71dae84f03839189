"""Trains LeNet-5 on handwritten digits in a custom loop: in float32, and in float16 with and without loss scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_lossscale.libraries import optional
from tf_lossscale.precision.counts import ExponentCounts
from tf_lossscale.training.settings import Settings, Setup
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

#: The interval, in steps, at which the gradients' exponents are counted.
COUNTED_EVERY = 5

_BATCH = 64
_TEST_IMAGES = 360


class Record(NamedTuple):
    """The loss and loss scale of one step, whether the step was skipped, and the fraction of zeros in its gradients.

    >>> Record(loss=2.5, scale=1024.0, skipped=True, zeros=0.25).skipped
    True
    """

    loss: float
    scale: float
    skipped: bool
    zeros: float


class Digits:
    """scikit-learn's 1797 handwritten digits, scaled to 32 x 32 pixels. The training digits are shuffled into batches.

    Args:
        seed: the seed for the order of the training digits. The test digits are the same for every seed.
    """

    def __init__(self, seed: int):
        images, labels = optional.load("sklearn.datasets", "train").load_digits(return_X_y=True)
        images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((4, 4)))[..., np.newaxis].astype("float32")
        labels = labels.astype("int64")
        order = np.random.default_rng(0).permutation(len(labels))
        test, self._train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
        self._images, self._labels, self._seed = images, labels, seed
        self.test = tf.constant(images[test]), tf.constant(labels[test])

    def batches(self, first: int, last: int) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yield the batches for the steps `first` to `last - 1`. A batch depends only on the step and the seed."""
        per_epoch = len(self._train) // _BATCH
        for step in range(first, last):
            epoch, within = divmod(step, per_epoch)
            order = np.random.default_rng((self._seed, epoch)).permutation(self._train)
            chosen = order[within * _BATCH : (within + 1) * _BATCH]
            yield tf.constant(self._images[chosen]), tf.constant(self._labels[chosen])


def lenet5(policy: str) -> Any:
    """Return LeNet-5 for 32 x 32 images, with a dtype policy for its layers.

    Args:
        policy: the name of a Keras dtype policy. The logits are float32 with every policy.

    Returns:
        A Keras model.
    """
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((32, 32, 1)),
            layers.Conv2D(6, 5, activation="relu", dtype=policy),
            layers.AveragePooling2D(2, dtype=policy),
            layers.Conv2D(16, 5, activation="relu", dtype=policy),
            layers.AveragePooling2D(2, dtype=policy),
            layers.Flatten(dtype=policy),
            layers.Dense(120, activation="relu", dtype=policy),
            layers.Dense(84, activation="relu", dtype=policy),
            layers.Dense(10, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
    )


class Run:
    """One training run: the model, the optimizer, the compiled step and the records of its steps.

    Args:
        setup: the dtype policy, and whether the loss is scaled.
        settings: the run's settings.
    """

    def __init__(self, setup: Setup, settings: Settings):
        tf.keras.utils.set_random_seed(settings.seed)
        self.setup = setup
        self.model = lenet5(setup.policy)
        # In a run without loss scaling, the wrapper has a fixed scale of 1, so its steps equal the inner optimizer's.
        scale: dict[str, Any] = {"dynamic": False, "initial_scale": 1}
        if setup.scaled:
            scale = {"initial_scale": settings.initial_scale, "dynamic_growth_steps": settings.growth_steps}
            scale["diagnose"] = "exponents"
        self.optimizer: Any = LossScaleOptimizer(_inner_optimizer(settings), **scale)
        self.optimizer.build(self.model.trainable_variables)
        self.history: list[Record] = []
        self.exponents: list[ExponentCounts] = []
        self._weight = settings.loss_weight
        self._size = sum(int(np.prod(v.shape)) for v in self.model.trainable_variables)
        self._step = tf.function(self._one_step)

    def _one_step(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled_loss = self.optimizer.get_scaled_loss(loss * self._weight)
        scaled_gradients = tape.gradient(scaled_loss, variables)
        zeros = tf.add_n([tf.math.count_nonzero(tf.equal(g, 0)) for g in scaled_gradients])
        gradients = self.optimizer.get_unscaled_gradients(scaled_gradients)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return loss, zeros

    def step(self, images: tf.Tensor, labels: tf.Tensor) -> Record:
        """Take one step, and return its record. The record contains the loss scale that was used in this step."""
        scale = float(self.optimizer.loss_scale)
        counted = self.setup.scaled and len(self.history) % COUNTED_EVERY == 0
        if counted:
            self.optimizer.count_exponents()
        loss, zeros = self._step(images, labels)
        skipped = bool(self.optimizer.last_step_skipped)
        self.history.append(Record(float(loss), scale, skipped, float(zeros) / self._size))
        if counted:
            counts = self.optimizer.precision_report().counts
            # In a resumed run, the optimizer's own step number starts over, so the number of records is used instead.
            self.exponents.append(dataclasses.replace(counts, step=len(self.history)))
        return self.history[-1]

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return sum(record.skipped for record in self.history)

    def accuracy(self, test: tuple[tf.Tensor, tf.Tensor]) -> float:
        """Return the fraction of test digits that are classified correctly."""
        images, labels = test
        return float(np.mean(np.argmax(self.model(images, training=False), axis=-1) == labels.numpy()))


def _inner_optimizer(settings: Settings) -> Any:
    optimizers = tf.keras.optimizers
    if settings.optimizer == "sgd":
        # SGD's step is proportional to the gradient. The loss is multiplied by a small weight, so the learning rate is
        # divided by this weight.
        return optimizers.SGD(0.02 / settings.loss_weight, momentum=0.9)
    # Adam and RMSprop divide by the gradient's magnitude, so epsilon must be smaller than that magnitude.
    return {"adam": optimizers.Adam, "rmsprop": optimizers.RMSprop}[settings.optimizer](1e-3, epsilon=1e-16)
