"""Variables of tf_keras's layers under a mixed policy, which are cast when they are read."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.families import FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.legacy.policy import policies_of

keras_2 = pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])


@pytest.fixture(autouse=True)
def mixed_float16():
    policies_of("tf_keras").set_policy("mixed_float16")
    yield
    policies_of("tf_keras").set_policy("float32")


def built():
    layer = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 1))
    assert "AutoCast" in type(layer.kernel).__name__
    return layer


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@keras_2
def test_an_autocast_variable_is_trained_as_a_plain_one(family, kind, in_function):
    layer, plain = built(), tf.Variable([[1.0]])
    optimizer = LossScaleOptimizer(getattr(family.optimizers, kind)(1.0))

    def step():
        optimizer.minimize(lambda: tf.reduce_sum(layer.kernel + plain), [layer.kernel, plain])

    step = tf.function(step) if in_function else step
    step()
    assert plain.numpy().item() == pytest.approx(0.0, abs=1e-5)  # Adam's epsilon
    np.testing.assert_array_equal(layer.get_weights()[0], plain)


@keras_2
def test_a_learning_rate_below_float16_moves_the_float32_variable(family):
    layer = built()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-14))
    optimizer.minimize(lambda: tf.cast(layer(tf.ones([1, 1])), tf.float32), layer.trainable_variables)
    assert layer.get_weights()[0] == 1 - 2**-14


def test_slots_of_autocast_variables_are_saved_and_restored(tmp_path):
    def trained(steps):
        model = tf_keras.Sequential([built()])
        optimizer = LossScaleOptimizer(
            tf_keras.optimizers.legacy.SGD(1.0, momentum=1.0), dynamic=False, initial_scale=8
        )
        model.compile(optimizer, lambda _, output: tf.reduce_mean(output))
        model.fit(np.ones((steps, 1)), np.ones((steps, 1)), batch_size=1, verbose=0)
        slot = optimizer.get_slot(model.layers[0].kernel, "momentum")
        return model, slot

    model, slot = trained(2)
    assert slot.numpy().item() == -2
    model.save_weights(str(tmp_path / "weights"))
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    assert slot.numpy().item() == -3
    for loaded, loaded_slot in ((model, slot), trained(1)):
        loaded.load_weights(str(tmp_path / "weights"))
        assert loaded_slot.numpy().item() == -2
        assert loaded.get_weights()[0] == -2
