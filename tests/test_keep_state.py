"""`keep_state`: the forward pass of a skipped step leaves nothing in a model's non-trainable variables."""

import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import tf_lossscale
from tests import strategies

KERAS = {"keras3": tf.keras, "tf_keras": tf_keras}
FINE = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OVERFLOWING = FINE.copy()
OVERFLOWING[5] = np.inf


def model_of(keras):
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def wrapped(keras):
    return tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8)


def state(model):
    return [np.array(weight) for weight in model.layers[0].get_weights()[2:]]


WAYS = {"eager": lambda step: step, "function": tf.function, "XLA": tf.function(jit_compile=True)}


class KeepStateTest(parameterized.TestCase):
    @parameterized.product(library=list(KERAS), way=list(WAYS))
    def test_a_skipped_step_leaves_no_trace_and_an_applied_step_does(self, library, way):
        keras = KERAS[library]
        model, optimizer = model_of(keras), wrapped(keras)

        @tf_lossscale.keep_state(model, optimizer)
        def step(x):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(model(x, training=True) ** 2))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        taken, start = WAYS[way](step), state(model)
        taken(tf.constant(OVERFLOWING))
        np.testing.assert_array_equal(state(model), start)
        taken(tf.constant(FINE))
        after = state(model)
        assert np.abs(np.subtract(after, start)).max() > 0
        taken(tf.constant(OVERFLOWING))
        np.testing.assert_array_equal(state(model), after)
        assert int(optimizer.skipped_steps) == 2

    @parameterized.product(library=list(KERAS), run_eagerly=[False, True])
    def test_fit_restores_the_state_and_keeps_metrics(self, library, run_eagerly):
        keras = KERAS[library]
        model = model_of(keras)
        model.compile(wrapped(keras), "mse", metrics=["mae"], run_eagerly=run_eagerly)
        model.train_step = tf_lossscale.keep_state(model)(model.train_step)
        x = np.concatenate([FINE, OVERFLOWING])
        history = model.fit(x, np.ones((16, 1), "float32"), batch_size=8, shuffle=False)
        assert int(model.optimizer.skipped_steps) == 1
        assert np.isfinite(state(model)).all()
        assert np.isnan(history.history["mae"][0])

    @parameterized.product(library=list(KERAS), replicas=[2])
    def test_the_state_of_every_replica_is_restored(self, library, replicas):
        keras, strategy = KERAS[library], strategies.get(f"mirrored_{replicas}")
        with strategy.scope():
            model = model_of(keras)
            model.compile(wrapped(keras), "mse")
            model.train_step = tf_lossscale.keep_state(model)(model.train_step)
        x = np.concatenate([FINE, OVERFLOWING]).repeat(replicas, axis=0)
        y = np.ones((16 * replicas, 1), "float32")
        model.fit(x[: 8 * replicas], y[: 8 * replicas], batch_size=8 * replicas, shuffle=False)
        before = state(model)
        # Only the rows of the second replica overflow.
        overflowing = np.concatenate([FINE, OVERFLOWING, *[FINE] * (replicas - 2)])
        model.fit(overflowing, y[: 8 * replicas], batch_size=8 * replicas, shuffle=False)
        assert int(model.optimizer.skipped_steps) == 1
        np.testing.assert_array_equal(state(model), before)

    def test_a_step_function_with_python_control_flow_on_tensors_is_still_converted(self):
        model, optimizer = model_of(tf.keras), wrapped(tf.keras)

        @tf.function
        @tf_lossscale.keep_state(model, optimizer)
        def step(x):
            if tf.reduce_sum(x) > 1e6:
                x = tf.zeros_like(x)
            optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

        step(tf.constant(OVERFLOWING))
        assert int(optimizer.skipped_steps) == 0

    def test_an_error_in_the_step_passes_through(self):
        model, optimizer = model_of(tf.keras), wrapped(tf.keras)
        with pytest.raises(KeyError), tf_lossscale.keep_state(model, optimizer):
            raise KeyError("data")

    def test_the_step_that_reports_a_stall_is_undone_too(self):
        model = model_of(tf.keras)
        optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), on_stall="raise", stall_steps=2)

        @tf_lossscale.keep_state(model, optimizer)
        def step(x):
            optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

        step(tf.constant(OVERFLOWING))
        with pytest.raises(FloatingPointError):
            step(tf.constant(OVERFLOWING))
        assert np.isfinite(state(model)).all()

    @parameterized.parameters("eager", "function")
    def test_a_step_after_which_on_stall_resets_the_counts_is_undone_too(self, way):
        def reset(optimizer):
            optimizer.set_state({"loss_scale": 8.0, "dynamic_counter": 0})

        model = model_of(tf.keras)
        optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), on_stall=reset, stall_steps=2)

        @tf_lossscale.keep_state(model, optimizer)
        def step(x):
            optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

        taken = WAYS[way](step)
        for _ in range(3):
            taken(tf.constant(OVERFLOWING))
            assert np.isfinite(state(model)).all()
        assert int(optimizer.skipped_steps) == 1

    def test_around_a_tf_function_it_restores_and_warns_of_nothing(self):
        model, optimizer = model_of(tf.keras), wrapped(tf.keras)

        @tf_lossscale.keep_state(model, optimizer)
        @tf.function
        def step(x):
            optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

        with self.assertNoLogs("absl", logging.WARNING):
            for _ in range(3):
                step(tf.constant(OVERFLOWING))
        assert np.isfinite(state(model)).all()

    def test_a_module_without_keras(self):
        class Module(tf.Module):
            def __init__(self):
                super().__init__()
                self.weight = tf.Variable(1.0)
                self.mean = tf.Variable(0.0, trainable=False)

        module, optimizer = Module(), wrapped(tf.keras)
        with tf_lossscale.keep_state(module, optimizer):
            module.mean.assign(np.inf)
            optimizer.minimize(lambda: module.weight * module.mean, [module.weight])
        assert module.mean.numpy() == 0.0

    def test_a_tf1_graph_is_refused(self):
        model, optimizer = model_of(tf.keras), wrapped(tf.keras)
        with (
            tf.Graph().as_default(),
            pytest.raises(RuntimeError, match="TF1 graph"),
            tf_lossscale.keep_state(model, optimizer),
        ):
            pass

    @parameterized.parameters(*KERAS)
    def test_a_model_that_is_not_built_is_refused(self, library):
        keras = KERAS[library]
        model, optimizer = keras.Sequential([keras.layers.Dense(1)]), wrapped(keras)
        with pytest.raises(ValueError, match="needs a built model"), tf_lossscale.keep_state(model, optimizer):
            pass

    def test_what_is_no_model_or_no_loss_scale_optimizer_is_refused(self):
        def train_step(x):
            return x

        with pytest.raises(TypeError, match=r"needs a Keras model.*Write @keep_state\(model, optimizer\)"):
            tf_lossscale.keep_state(train_step)
        model = model_of(tf.keras)
        for optimizer in (None, tf.keras.optimizers.SGD(0.1)):
            with (
                pytest.raises(TypeError, match="needs the LossScaleOptimizer"),
                tf_lossscale.keep_state(model, optimizer),
            ):
                pass

    @parameterized.parameters(*WAYS)
    def test_a_step_of_another_optimizer_is_not_passed_over_in_silence(self, way):
        model, watched, other = model_of(tf.keras), wrapped(tf.keras), wrapped(tf.keras)

        @tf_lossscale.keep_state(model, watched)
        def step(x):
            other.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

        with self.assertLogs("absl", logging.WARNING) as logs:
            WAYS[way](step)(tf.constant(FINE))
        assert "took no step inside" in logs.output[0]

    @parameterized.parameters(*KERAS)
    def test_without_it_the_monitor_names_the_variables_once(self, library):
        keras = KERAS[library]
        model = model_of(keras)
        model.compile(wrapped(keras), "mse")
        x = np.concatenate([FINE, OVERFLOWING])
        with self.assertLogs("absl", logging.WARNING) as logs:
            monitor = tf_lossscale.LossScaleMonitor()
            model.fit(x, np.ones((16, 1), "float32"), batch_size=8, epochs=3, shuffle=False, callbacks=[monitor])
        said = [message for message in logs.output if "keep_state" in message]
        assert len(said) == 1
        assert "moving_mean" in said[0]
        assert "moving_variance" in said[0]
