"""The graph rewrite: what it tells TensorFlow, and what the optimizer it returns still answers."""

import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer, legacy

train = tf.compat.v1.train


@pytest.fixture
def enable():
    yield legacy.enable_mixed_precision_graph_rewrite
    legacy.disable_mixed_precision_graph_rewrite()


def rewrites(config):
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return session._config.graph_options.rewrite_options.auto_mixed_precision == 1


@pytest.mark.parametrize("config", [None, tf.compat.v1.ConfigProto()], ids=["no config", "a config"])
def test_sessions_rewrite_their_graphs_while_it_is_enabled(enable, config):
    enable(train.GradientDescentOptimizer(0.1))
    assert rewrites(config)
    legacy.disable_mixed_precision_graph_rewrite()
    assert not rewrites(config)


@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras3", "tf_keras"])
def test_the_wrapped_keras_optimizer_keeps_its_learning_rate_for_callbacks(enable, keras):
    optimizer = enable(keras.optimizers.SGD(0.5))
    assert isinstance(optimizer, LossScaleOptimizer)
    assert float(optimizer.loss_scale()) == float(optimizer.loss_scale) == 2.0**15
    assert float(optimizer.lr) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), epochs=2, callbacks=[halve], verbose=0)
    assert float(optimizer.inner_optimizer.learning_rate) == 0.0625


@pytest.mark.parametrize("make", [train.GradientDescentOptimizer, tf.keras.optimizers.SGD])
def test_a_wrapped_optimizer_is_refused(enable, make):
    optimizer = enable(make(0.1))
    with pytest.raises(ValueError, match="must not already be"):
        enable(optimizer)
    with pytest.raises(TypeError, match="None"):
        enable(make(0.1), None)
    with pytest.raises(ValueError, match="must be an instance"):
        enable("x", 8)
