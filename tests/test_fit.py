"""compile and fit, the guide's loop, callbacks and saving, in Keras 3 and tf_keras."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
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


@pytest.mark.table("function-keras3", "function-tf_keras_legacy", every=7)
@families
@pytest.mark.parametrize("eagerly", [False, True], ids=["function", "eager"])
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
