"""compile and fit, Keras's options, callbacks and saving, in Keras 3 and tf_keras."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.families import FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer

families = pytest.mark.parametrize("family", FAMILIES, ids=IDS)
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
def test_the_guides_loop_trains_as_tf_keras_did(family):
    def loop(keras, optimizer):
        keras.utils.set_random_seed(0)
        weight = tf.Variable(np.random.default_rng(1).normal(size=(4, 1)).astype("float32"))
        x, y = (tf.constant(a) for a in data())

        @tf.function
        def train_step():
            with tf.GradientTape() as tape:
                predictions = tf.cast(x, tf.float16) @ tf.cast(weight, tf.float16)
                loss = tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)
                scaled_loss = optimizer.get_scaled_loss(loss)
            scaled_gradients = tape.gradient(scaled_loss, [weight])
            gradients = optimizer.get_unscaled_gradients(scaled_gradients)
            optimizer.apply_gradients(zip(gradients, [weight]))

        steps = []
        for _ in range(10):
            train_step()
            steps.append((weight.numpy(), float(optimizer.loss_scale)))
        return steps

    original = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5))
    for (a, scale_a), (b, scale_b) in zip(
        loop(tf_keras, original), loop(family.keras, LossScaleOptimizer(family.sgd()))
    ):
        np.testing.assert_array_equal(a, b)
        assert scale_a == scale_b


@families
def test_callbacks_that_look_into_the_optimizer_work(family, tmp_path):
    callbacks = family.keras.callbacks
    optimizer = LossScaleOptimizer(family.adam())
    model = model_of(family)
    model.compile(optimizer, "mse")
    rates = []
    model.fit(
        *data(),
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
    assert list(tmp_path.rglob("events*"))


FORMATS = {"keras3": ["keras", "h5"], "tf_keras": ["keras", "h5", "tf"], "tf_keras_legacy": ["keras", "h5", "tf"]}


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(f, kind, id=f"{f.name}-{kind}") for f in FAMILIES for kind in FORMATS[f.name]]
)
def test_models_are_checkpointed_in_every_format(family, kind, tmp_path):
    model = model_of(family)
    # Keras 3 does not find "mse" again in its own h5 files.
    loss = family.keras.losses.MeanSquaredError()
    model.compile(LossScaleOptimizer(family.adam(), dynamic_growth_steps=4), loss)
    path = tmp_path / {"keras": "model.keras", "h5": "model.h5", "tf": "saved"}[kind]
    model.fit(*data(), epochs=1, verbose=0, callbacks=[family.keras.callbacks.ModelCheckpoint(str(path))])
    assert path.exists()
    loaded = family.keras.models.load_model(str(path))
    np.testing.assert_allclose(loaded.predict(data(4)[0], verbose=0), model.predict(data(4)[0], verbose=0), rtol=1e-3)
    weights = tmp_path / "model.weights.h5"
    model.save_weights(str(weights))
    model.load_weights(str(weights))


def test_a_keras_file_keeps_scale_counter_and_slots_and_training_goes_on_the_same(tmp_path):
    x, y = data()
    model = model_of(KERAS3)
    model.compile(LossScaleOptimizer(KERAS3.adam(), initial_scale=64.0, dynamic_growth_steps=5), "mse")
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale) == 128.0
    assert int(loaded.optimizer.dynamic_counter) == int(model.optimizer.dynamic_counter) == 3
    for m in (model, loaded):
        m.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_array_equal(a, b)


def steps(optimizer, weight, gradients):
    for gradient in gradients:
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant([gradient]) * optimizer._factor()], [weight])
    return weight.numpy()


OPTIONS = [
    {"weight_decay": 0.1},
    {"clipnorm": 0.25},
    {"clipvalue": 0.25},
    {"global_clipnorm": 0.25},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_keras_3s_options_do_on_the_wrapper_what_they_do_on_the_inner_optimizer(options):
    gradients = [1.0, -0.5, 0.25, 2.0]
    bare, weight = KERAS3.optimizers.SGD(0.5, **options), tf.keras.Variable([1.0])
    for gradient in gradients:
        bare.apply([tf.constant([gradient])], [weight])
    wrapped = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, **options)
    np.testing.assert_array_equal(steps(wrapped, tf.keras.Variable([1.0]), gradients), np.asarray(weight))
    name = next(iter(options))
    assert getattr(wrapped.inner_optimizer, name) == options[name]
    again = type(wrapped).from_config(wrapped.get_config())
    assert getattr(again.inner_optimizer, name) == options[name]


def test_a_loss_scale_factor_multiplies_the_loss_and_cancels_in_the_step():
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, loss_scale_factor=4.0)
    assert float(optimizer.scale_loss(tf.constant(1.0))) == 32.0
    assert float(optimizer.get_scaled_loss(tf.constant(1.0))) == 32.0
    assert steps(optimizer, tf.Variable([1.0]), [1.0]) == 0.5


def test_the_inner_optimizers_own_loss_scale_factor_is_ignored_and_that_is_said(monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    optimizer = LossScaleOptimizer(KERAS3.optimizers.SGD(0.5, loss_scale_factor=8.0), initial_scale=8.0)
    assert "loss_scale_factor=8.0" in seen[0]
    assert float(optimizer.scale_loss(tf.constant(1.0))) == 8.0
    assert steps(optimizer, tf.Variable([1.0]), [1.0]) == 0.5


@pytest.mark.parametrize(
    ("inner", "options"),
    [
        ({"clipnorm": 1.0}, {"clipnorm": 2.0}),
        ({"clipnorm": 1.0}, {"clipvalue": 2.0}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}),
        ({"use_ema": True, "ema_momentum": 0.5}, {"ema_momentum": 0.9}),
        ({}, {"clipnorm": 1.0, "clipvalue": 1.0}),
        ({}, {"use_ema": True, "ema_momentum": 1.5}),
        ({}, {"gradient_accumulation_steps": 1}),
    ],
)
def test_an_option_that_contradicts_the_inner_optimizer_is_a_value_error(inner, options):
    optimizer = KERAS3.optimizers.SGD(0.5, **inner)
    with pytest.raises(ValueError, match="|".join(options)):
        LossScaleOptimizer(optimizer, **options)
    LossScaleOptimizer(optimizer)


def test_an_option_after_the_inner_optimizer_is_built_is_a_value_error():
    inner = KERAS3.sgd()
    inner.build([tf.keras.Variable([1.0])])
    with pytest.raises(ValueError, match="before the inner SGD is built"):
        LossScaleOptimizer(inner, use_ema=True)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        (FAMILIES[1], {"gradient_accumulation_steps": 2}),
        (FAMILIES[1], {"loss_scale_factor": 2.0}),
        (FAMILIES[2], {"weight_decay": 0.1}),
        (FAMILIES[2], {"use_ema": True}),
    ],
    ids=lambda value: getattr(value, "name", None) or next(iter(value)),
)
def test_an_option_that_the_family_does_not_have_is_a_value_error_that_says_so(family, option):
    with pytest.raises(ValueError, match="is not supported for SGD"):
        LossScaleOptimizer(family.sgd(), **option)


def test_a_skipped_micro_step_never_advances_iterations():
    weight = tf.keras.Variable([1.0])
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, gradient_accumulation_steps=2)
    optimizer.get_scaled_loss(0.0)
    optimizer.get_unscaled_gradients([])
    for gradient in (1.0, np.inf, 3.0):
        optimizer.apply_gradients([(tf.constant([gradient]), weight)])
    assert np.asarray(weight) == 1.0 - 0.5 * 2.0, "the mean of 1 and 3"


def test_multi_optimizer_is_wrapped_and_skips_in_all_its_parts():
    kernel, bias = tf.keras.Variable([1.0], name="kernel"), tf.keras.Variable([1.0], name="bias")
    optimizers = tf.keras.optimizers
    mapping = optimizers.OptimizerMap(optimizers.SGD(0.5), {"bias": optimizers.SGD(0.25)})
    optimizer = LossScaleOptimizer(optimizers.MultiOptimizer(mapping), initial_scale=8.0)
    for gradients in ((1.0, 1.0), (1.0, np.nan)):
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant([g * 8.0]) for g in gradients], [kernel, bias])
    assert np.asarray(kernel) == 0.5
    assert np.asarray(bias) == 0.75
    assert float(optimizer.loss_scale) == 4.0


def test_variables_that_are_overwritten_take_their_gradient_as_it_is():
    weight, amax = tf.keras.Variable([1.0]), tf.keras.Variable([0.0])
    amax.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0)
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant([8.0]), tf.constant([3.0])], [weight, amax])
    assert np.asarray(weight) == 0.5
    assert np.asarray(amax) == 3.0


def test_swap_ema_weights_works_with_the_wrapper():
    model = model_of(KERAS3)
    model.compile(LossScaleOptimizer(KERAS3.adam(), use_ema=True), "mse")
    callback = tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(*data(), epochs=2, verbose=0, callbacks=[callback], validation_data=data(8))
    assert float(model.evaluate(*data(8), verbose=0)) < 100
