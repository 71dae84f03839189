"""Runs a recorded training trace on this package."""

import tensorflow as tf
import tf_keras

import tf_lossscale
from tests.conformance.record import training

# Recording -> the optimizers that it was made with.
OPTIMIZERS = {
    "lso_tf24": tf_keras.optimizers.legacy,
    "lso_tf28": tf_keras.optimizers.legacy,
    "lso_tfkeras221_legacy": tf_keras.optimizers.legacy,
    "lso_tfkeras221_new": tf_keras.optimizers,
    "keras3_lso": tf.keras.optimizers,
}


def stands_still(recording, scale):
    """Whether the original's weights stand still at a scale: its reciprocal is zero. Keras 3 divides.

    From then on weights are not compared with the recording; tests/core/test_quotients.py compares such steps with
    those of a bare optimizer.
    """
    return recording != "keras3_lso" and 2.0**126 < scale < float("inf")


def wrapped(recording, case):
    """Returns the wrapped optimizer of a recorded case."""
    inner = getattr(OPTIMIZERS[recording], case["optimizer_class"])(**case["optimizer_kwargs"])
    return tf_lossscale.LossScaleOptimizer(inner, **case["config"])


class OfThisPackage:
    """Makes the optimizer of a replay; a subclass of `training.Replay` has it as a base."""

    def __init__(self, recording, case, initial):
        self.recording, self.keras3 = recording, recording == "keras3_lso"
        super().__init__(case, initial)

    def wrap(self, case):
        return wrapped(self.recording, case)


class Replay(OfThisPackage, training.Replay):
    """Variables, optimizer and step of one recorded case."""


class GraphReplay(OfThisPackage, training.GraphReplay):
    """The same in a TF1 graph with a Session."""
