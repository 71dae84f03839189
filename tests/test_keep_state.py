"""`keep_state`: the forward pass of a skipped step leaves nothing in a model's non-trainable variables."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import strategies

FINE = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OVERFLOWING = FINE.copy()
OVERFLOWING[5] = np.inf
BOTH = np.concatenate([FINE, OVERFLOWING])
WAYS = {"eager": lambda step: step, "function": tf.function, "XLA": tf.function(jit_compile=True)}
libraries = pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras3", "tf_keras"])


def model_of(keras=tf.keras):
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def wrapped(keras=tf.keras, **options):
    return tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8, **options)


def step_of(model, optimizer):
    """Returns a function that takes a training step."""

    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

    return step


def state(model):
    return [np.array(weight) for weight in model.layers[0].get_weights()[2:]]


def warnings_in(caplog):
    return [message for message in caplog.messages if "keep_state" in message]


def fit(model, x, batch_size=8):
    return model.fit(x, np.ones((len(x), 1), "float32"), batch_size=batch_size, shuffle=False, verbose=0)


@libraries
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_leaves_no_trace_and_an_applied_step_does(keras, way, caplog):
    model, optimizer = model_of(keras), wrapped(keras)
    step = WAYS[way](tf_lossscale.keep_state(model, optimizer)(step_of(model, optimizer)))
    start = state(model)
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), start)
    step(tf.constant(FINE))
    after = state(model)
    assert np.abs(np.subtract(after, start)).max() > 0
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), after)
    assert int(optimizer.skipped_steps) == 2
    assert not warnings_in(caplog)


@libraries
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_restores_the_state_and_keeps_metrics(keras, run_eagerly):
    model = model_of(keras)
    model.compile(wrapped(keras), "mse", metrics=["mae"], run_eagerly=run_eagerly)
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    history = fit(model, BOTH)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite(state(model)).all()
    assert np.isnan(history.history["mae"][0])


@libraries
def test_the_states_of_a_stateful_rnn_layer_are_restored(keras):
    cell = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 2)), cell, keras.layers.Dense(1)])
    model.compile(wrapped(keras), "mse")
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    x = np.ones((12, 3, 2), "float32")
    x[4] = np.inf
    fit(model, x, batch_size=2)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite([np.array(each) for each in cell.states]).all()


@libraries
def test_a_tensorflow_variable_in_a_layer_is_restored(keras):
    class Centered(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable(tf.zeros(4), trainable=False)

        def call(self, x, training=False):
            if training:
                self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
            return x - self.mean

    layer = Centered()
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile(wrapped(keras), "mse")
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    fit(model, np.concatenate([BOTH, FINE]))
    assert int(model.optimizer.skipped_steps) == 1
    np.testing.assert_allclose(layer.mean, 0.75 * FINE.mean(0), rtol=1e-6)


@libraries
def test_a_metric_of_the_model_keeps_what_a_skipped_step_added(keras):
    class Tracking(keras.Model):
        def __init__(self):
            super().__init__()
            self.tracker, self.dense = keras.metrics.Sum(), keras.layers.Dense(1)

        def call(self, x, training=False):
            self.tracker.update_state(1.0)
            return self.dense(x)

    model, optimizer = Tracking(), wrapped(keras)
    step = tf_lossscale.keep_state(model, optimizer)(step_of(model, optimizer))
    model(FINE)
    for x in (FINE, OVERFLOWING, OVERFLOWING):
        step(tf.constant(x))
    assert (int(optimizer.skipped_steps), float(model.tracker.result())) == (2, 4.0)


@libraries
def test_the_state_of_every_replica_is_restored(keras):
    with strategies.get("mirrored_2").scope():
        model = model_of(keras)
        model.compile(wrapped(keras), "mse")
        model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    fit(model, np.concatenate([FINE, FINE]), batch_size=16)
    before = state(model)
    fit(model, BOTH, batch_size=16)  # only the rows of the second replica overflow
    assert int(model.optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(state(model), before)


def test_a_step_function_with_python_control_flow_on_tensors_is_still_converted():
    model, optimizer = model_of(), wrapped()

    @tf.function
    @tf_lossscale.keep_state(model, optimizer)
    def step(x):
        if tf.reduce_sum(x) > 1e6:
            x = tf.zeros_like(x)
        step_of(model, optimizer)(x)

    step(tf.constant(OVERFLOWING))
    assert int(optimizer.skipped_steps) == 0


def test_an_error_in_the_step_passes_through():
    with pytest.raises(KeyError), tf_lossscale.keep_state(model_of(), wrapped()):
        raise KeyError("data")


def test_around_a_tf_function_it_restores_and_warns_of_nothing(caplog):
    model, optimizer = model_of(), wrapped()
    step = tf_lossscale.keep_state(model, optimizer)(tf.function(step_of(model, optimizer)))
    for _ in range(3):
        step(tf.constant(OVERFLOWING))
    assert np.isfinite(state(model)).all()
    assert not warnings_in(caplog)


def test_a_module_without_keras():
    module, optimizer = tf.Module(), wrapped()
    module.weight, module.mean = tf.Variable(1.0), tf.Variable(0.0, trainable=False)
    with tf_lossscale.keep_state(module, optimizer):
        module.mean.assign(np.inf)
        optimizer.minimize(lambda: module.weight * module.mean, [module.weight])
    assert module.mean.numpy() == 0.0


def test_a_tf1_graph_is_refused():
    keeping = tf_lossscale.keep_state(model_of(), wrapped())
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="TF1 graph"), keeping:
        pass


@libraries
def test_a_model_that_is_not_built_is_refused(keras):
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="needs a built model"), tf_lossscale.keep_state(model, wrapped(keras)):
        pass


def test_what_is_no_model_or_no_loss_scale_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"needs a Keras model.*Write @keep_state\(model, optimizer\)"):
        tf_lossscale.keep_state(lambda x: x)
    for optimizer in (None, tf.keras.optimizers.SGD(0.1)):
        keeping = tf_lossscale.keep_state(model_of(), optimizer)
        with pytest.raises(TypeError, match="needs the LossScaleOptimizer"), keeping:
            pass


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_another_optimizer_is_not_passed_over_in_silence(way, caplog):
    model = model_of()
    WAYS[way](tf_lossscale.keep_state(model, wrapped())(step_of(model, wrapped())))(tf.constant(FINE))
    (said,) = warnings_in(caplog)
    assert "took no step inside" in said


@libraries
def test_without_it_the_monitor_names_the_variables_once(keras, caplog):
    model = model_of(keras)
    model.compile(wrapped(keras), "mse")
    monitor = tf_lossscale.LossScaleMonitor()
    model.fit(BOTH, np.ones((16, 1)), batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[monitor])
    (said,) = warnings_in(caplog)
    assert "moving_mean" in said
    assert "moving_variance" in said
