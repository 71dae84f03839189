"""compile and fit, the guide's loop, callbacks and saving, in Keras 3 and tf_keras."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import FAMILIES, families, tf_keras
from tf_lossscale import LossScaleOptimizer

KERAS3 = FAMILIES[0]


@pytest.fixture(autouse=True)
def mixed_precision():
    for keras in (tf.keras, tf_keras):
        keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    for keras in (tf.keras, tf_keras):
        keras.mixed_precision.set_global_policy("float32")


def model_of(family):
    family.keras.utils.set_random_seed(0)
    layers = family.keras.layers
    return family.keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1, dtype="float32")])


def data(n=64):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("eagerly", "family"),
    combinations([False, True], FAMILIES, usual=["False-keras3", "False-tf_keras_legacy"]),
)
def test_compile_does_not_wrap_again_and_fit_learns_skips_and_grows(family, eagerly):
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=2.0**30, dynamic_growth_steps=8)
    model = model_of(family)
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    assert model.optimizer is optimizer
    history = model.fit(*data(), batch_size=8, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert int(optimizer.skipped_steps) > 0, "a scale of 2**30 overflows float16"
    assert float(optimizer.loss_scale) < 2.0**30
    expected = 32 - int(optimizer.skipped_steps) if family is KERAS3 else 32
    assert int(optimizer.iterations) == expected


@families
def test_fit_equals_fit_with_the_librarys_own_wrapper(family):
    weights = []
    for ours in (True, False):
        model = model_of(family)
        inner = family.sgd()
        model.compile(LossScaleOptimizer(inner) if ours else inner, "mse")
        assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
        model.fit(*data(), batch_size=8, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for a, b in zip(*weights):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def dense_model(family, weights=None):
    """The guide's model, small; in mixed_float16 but for the last layer, as the guide has it."""
    layers = family.keras.layers
    inputs = family.keras.Input(shape=(4,))
    x = layers.Dense(16, activation="relu", name="dense_1")(inputs)
    x = layers.Dense(16, activation="relu", name="dense_2")(x)
    x = layers.Dense(3, name="dense_logits")(x)
    outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
    model = family.keras.Model(inputs=inputs, outputs=outputs)
    assert model.layers[1].compute_dtype == "float16"
    if weights is not None:
        model.set_weights(weights)
    return model


def guide_loop(keras, model, optimizer, steps):
    """The custom training loop of TensorFlow's mixed precision guide; yields the weights and the scale."""
    loss_object = keras.losses.SparseCategoricalCrossentropy()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, 16, 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, (x.argmax(axis=2) % 3).astype("int32")))

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x)
            loss = loss_object(y, predictions)
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for x, y in dataset:
        train_step(x, y)
        yield model.get_weights(), float(optimizer.loss_scale)


@pytest.mark.parametrize("family", combinations(FAMILIES, usual=["keras3"]))
def test_the_guides_loop_trains_step_by_step_as_tf_keras_did(family):
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=w.shape).astype("float32") / 2 for w in dense_model(family).get_weights()]
    original = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.25), initial_scale=2.0**17)
    ours = LossScaleOptimizer(family.optimizers.SGD(0.25), initial_scale=2.0**17)
    tf_keras_family = FAMILIES[1]
    theirs = guide_loop(tf_keras, dense_model(tf_keras_family, weights), original, steps=20)
    mine = guide_loop(family.keras, dense_model(family, weights), ours, steps=20)
    scales = []
    for step, ((expected, expected_scale), (got, scale)) in enumerate(zip(theirs, mine)):
        assert scale == expected_scale, step
        scales.append(scale)
        for a, b in zip(expected, got):
            np.testing.assert_array_equal(a, b, err_msg=f"step {step}")
    assert scales[0] < 2.0**17, "the first steps overflow"
    assert int(ours.skipped_steps) < 10


@families
def test_no_warning_comes_from_fit_or_compile(family, monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = model_of(family)
        model.compile(LossScaleOptimizer(family.adam()), "mse")
        model.fit(*data(), verbose=0)
    assert not [w for w in caught if "loss" in str(w.message).lower() and "scale" in str(w.message).lower()]
    assert not seen


@families
def test_callbacks_that_look_into_the_optimizer_work_and_tensorboard_counts_iterations(family, tmp_path):
    callbacks = family.keras.callbacks
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=64.0)
    model = model_of(family)
    model.compile(optimizer, "mse")
    rates = []
    model.fit(
        *data(),
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
            callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9, factor=0.5),
            callbacks.LambdaCallback(on_epoch_end=lambda e, logs: rates.append(float(optimizer.learning_rate))),
            callbacks.TensorBoard(tmp_path, update_freq=1),
        ],
        validation_data=data(8),
    )
    assert rates[-1] < rates[0] < 0.1
    assert float(optimizer.inner_optimizer.learning_rate) == rates[-1]
    steps = {}
    for path in tmp_path.rglob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    assert steps["evaluation_loss_vs_iterations"] == [8, 16, 24]


@pytest.mark.slow
def test_swap_ema_weights_works_with_the_wrapper():
    model = model_of(KERAS3)
    model.compile(LossScaleOptimizer(KERAS3.adam(), use_ema=True), "mse")
    callback = tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(*data(), epochs=2, verbose=0, callbacks=[callback], validation_data=data(8))
    assert float(model.evaluate(*data(8), verbose=0)) < 100


def test_keras_3s_accumulation_on_several_replicas_is_an_error_before_the_step():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        keras = KERAS3.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), "mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match="do not support `gradient_accumulation_steps` on several replicas"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=4)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


@families
def test_a_model_without_trainable_variables_fits_as_with_the_bare_optimizer(family):
    model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Rescaling(2.0)])
    model.compile(LossScaleOptimizer(family.sgd()), "mse")
    history = model.fit(np.ones((4, 2)), np.zeros((4, 2)))
    assert history.history["loss"] == [4.0]
