"""A model file with a wrapped optimizer loads the class that was saved, and not the library's of the same name."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tf_lossscale import LossScaleOptimizer

LEGACY = tf_keras.optimizers.legacy


@tf.keras.utils.register_keras_serializable("mine", "SGD")
class SGDOfKeras3(tf.keras.optimizers.SGD):
    """A user's own class, under a name that the library has too."""


@tf_keras.utils.register_keras_serializable("mine", "SGD")
class SGD(tf_keras.optimizers.SGD):
    """The same for tf_keras."""


@tf_keras.utils.register_keras_serializable("mine", "Adam")
class Adam(LEGACY.Adam):
    """The same for its legacy optimizers."""


CASES = {
    "keras3-adafactor": (tf.keras, lambda: tf_lossscale.optimizers.keras3.Adafactor(lr=0.05)),
    "tf_keras-adafactor": (tf_keras, lambda: tf_lossscale.optimizers.tf_keras.Adafactor(lr=0.05)),
    "keras3-own": (tf.keras, SGDOfKeras3),
    "tf_keras-own": (tf_keras, SGD),
    "tf_keras_legacy-own": (tf_keras, Adam),
}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".h5", ".keras"])
@pytest.mark.parametrize("case", CASES)
def test_it_loads_what_was_saved(case, suffix, tmp_path):
    keras, make = CASES[case]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(make(), initial_scale=64.0), keras.losses.MeanSquaredError())
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model.train_on_batch(x, y)
    model.save(tmp_path / f"model{suffix}")
    loaded = keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert type(loaded.optimizer.inner_optimizer) is type(model.optimizer.inner_optimizer)
    assert float(loaded.optimizer.loss_scale) == 64.0
    # tf_keras keeps nothing of its legacy optimizers in .keras files but their config.
    lost = (case, suffix) == ("tf_keras_legacy-own", ".keras")
    assert int(loaded.optimizer.iterations) == (0 if lost else 1)
