"""Which objects count as layers of Keras."""

import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import layers
from tf_lossscale.amp import WithLossCell


@pytest.mark.parametrize("library", [tf.keras, tf_keras], ids=["keras3", "tf_keras"])
def test_layers_and_models_are_layers_and_other_objects_of_keras_are_not(library):
    inputs = library.Input((1,))
    dense = library.layers.Dense(1)
    for layer in (dense, library.Sequential([dense]), library.Model(inputs, dense(inputs))):
        assert layers.is_layer(layer)
    for other in (library.optimizers.SGD(), library.losses.MeanSquaredError(), library.initializers.Zeros()):
        assert not layers.is_layer(other)


@pytest.mark.skipif(not hasattr(tf.keras, "Function"), reason="Keras 2 has no Function")
def test_a_keras_function_is_a_network_that_is_not_told_whether_it_trains():
    inputs = tf.keras.Input((1,))
    network = WithLossCell(tf.keras.Function(inputs, 2 * inputs), lambda output, label: output - label)
    assert network(tf.constant([[3.0]]), tf.constant([[1.0]])).numpy().item() == 5.0
