"""The recorded calls on this package."""

import tensorflow as tf
import tf_keras

import tf_lossscale
from tests.conformance import replay
from tests.conformance.record import calls


class Bench(calls.Bench):
    """A bench of this package's wrapper with the optimizers of a recording."""

    LossScaleOptimizer = tf_lossscale.LossScaleOptimizer

    def __init__(self, recording):
        super().__init__()
        self.optimizers = replay.OPTIMIZERS[recording]
        self.library = tf.keras if self.optimizers is tf.keras.optimizers else tf_keras
