"""`scale_gradient`: for a library that runs the model, computes a loss of its outputs, and calls `apply_gradients`."""

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import ALL_FAMILIES, Family, families, with_keras_3
from tf_lossscale import LossScaleOptimizer

INF = float("inf")
X, Y = np.linspace(-1.0, 1.0, 24, dtype="float32").reshape(8, 3), np.ones([8, 1], "float32")
WAYS = {
    "eager": lambda step: step,
    "function": tf.function,
    "compiled": lambda step: tf.function(step, jit_compile=True),
    "mirrored": lambda step: tf.function(
        lambda: strategies.get("mirrored_2").reduce("SUM", strategies.get("mirrored_2").run(step), None),
        autograph=False,
    ),
}


def library_step(model, loss_of, optimizer, variables):
    """What a library does; returns the loss that it logs."""
    with tf.GradientTape() as tape:
        loss = loss_of(Y, model(X))
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


def squared_error(labels, predictions):
    return tf.reduce_mean((labels - predictions) ** 2)


@pytest.mark.parametrize(
    ("family", "way"),
    combinations(
        ALL_FAMILIES,
        WAYS,
        usual=["keras3-function", "tf_keras-eager", "tf1-eager", "sonnet-compiled", "keras3-mirrored"],
        others=pytest.mark.slow,
    ),
)
def test_losses_and_weights_are_those_of_the_bare_optimizer(family, way):
    if way == "mirrored" and not family.distributes:
        pytest.skip("Sonnet leaves it to the caller to sum gradients over replicas")
    bare = trained(family, way, lambda inner: inner, lambda _, outputs: outputs)
    wrap = lambda inner: LossScaleOptimizer(inner, dynamic_growth_steps=2)  # noqa: E731
    wrapped = trained(family, way, wrap, lambda optimizer, outputs: optimizer.scale_gradient(outputs))
    assert bare[:-1] == wrapped[:-1]
    assert float(wrapped[-1].loss_scale) == 2.0**17


def trained(family, way, wrap, scale):
    """Return the losses of five steps of a library, the weights, and the optimizer."""
    strategy = strategies.get("mirrored_2") if way == "mirrored" else tf.distribute.get_strategy()
    with strategy.scope():
        kernel, bias = tf.Variable([[0.5], [-1.0], [2.0]]), tf.Variable([0.25])
        optimizer = wrap(family.sgd())
    # A wrapper has `apply_gradients` in every family.
    apply = Family.apply if hasattr(optimizer, "scaler") else type(family).apply
    if hasattr(optimizer, "build"):
        optimizer.build([kernel, bias])

    def step():
        with tf.GradientTape() as tape:
            loss = squared_error(Y, scale(optimizer, X @ kernel + bias))
        apply(family, optimizer, tape.gradient(loss, [kernel, bias]), [kernel, bias])
        return loss

    step = WAYS[way](step)
    return [float(step()) for _ in range(5)], kernel.numpy().tolist(), bias.numpy().tolist(), optimizer


@pytest.mark.parametrize("way", ["eager", "function"])
def test_gradients_that_vanish_in_float16_arrive_and_an_overflow_skips_the_step(way):
    weight, factor = tf.Variable(0.0), tf.Variable(2.0**-26)  # zero in float16
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))
    optimizer.build([weight])

    def model():
        return optimizer.scale_gradient(tf.cast(tf.cast(weight, tf.float16), tf.float32))

    @WAYS[way]
    def step():
        with tf.GradientTape() as tape:
            loss = factor * model()
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    step()
    assert weight.numpy() == -0.5 * 2.0**-26
    factor.assign(4.0)  # 2**15 times 4 is infinite in float16
    step()
    assert (weight.numpy(), float(optimizer.loss_scale)) == (-0.5 * 2.0**-26, 2.0**14)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_several_outputs_have_one_factor_and_others_stay_as_they_are(way):
    weight, tokens = tf.Variable([1.0, 2.0]), tf.constant([1, 2])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([weight])

    @WAYS[way]
    def gradients_and_outputs():
        with tf.GradientTape(persistent=True) as tape:
            outputs = optimizer.scale_gradient({"a": weight * 2.0, "b": [weight * 3.0, tokens, "text"]})
            first, both = tf.reduce_sum(outputs["a"]), tf.reduce_sum(outputs["a"]) + tf.reduce_sum(outputs["b"][0])
        gradients = tape.gradient(first, weight), tape.gradient(both, weight)
        optimizer.apply_gradients([(gradients[1], weight)])
        return gradients, outputs["b"][1]

    (first, both), same = gradients_and_outputs()
    assert (first.numpy().tolist(), both.numpy().tolist(), same.numpy().tolist()) == ([16.0] * 2, [40.0] * 2, [1, 2])
    assert weight.numpy().tolist() == [-1.5, -0.5]


def test_float16_outputs_are_multiplied_in_float32():
    weight = tf.Variable(0.0)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=2.0**17)  # infinite in float16
    with tf.GradientTape() as tape:
        outputs = optimizer.scale_gradient(tf.cast(weight, tf.float16))
        loss = tf.cast(outputs, tf.float32) * 2.0**-10
    gradient = tape.gradient(loss, weight)
    assert (outputs.dtype, gradient.numpy()) == (tf.float16, 128.0)


def by_scaling_again(method):
    def step(optimizer, model, variables):
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, method)(squared_error(Y, model(X)))
        gradients = tape.gradient(loss, variables)
        if method == "get_scaled_loss":
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables))

    return step


def by_minimize(optimizer, model, variables):
    optimizer.minimize(lambda: squared_error(Y, model(X)), variables)


SCALED_TWICE = {
    "scale_loss": by_scaling_again("scale_loss"),
    "get_scaled_loss": by_scaling_again("get_scaled_loss"),
    "minimize": by_minimize,
}


@pytest.mark.parametrize("method", SCALED_TWICE)
@pytest.mark.parametrize("way", ["eager", "function"])
def test_a_loss_of_such_outputs_must_not_be_scaled(way, method):
    weight = tf.Variable([[0.5], [-1.0], [2.0]])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    model = lambda x: optimizer.scale_gradient(x @ weight)  # noqa: E731
    with pytest.raises(RuntimeError, match="multiplied by the loss scale twice"):
        WAYS[way](lambda: SCALED_TWICE[method](optimizer, model, [weight]))()
    assert weight.numpy().tolist() == [[0.5], [-1.0], [2.0]]


def scaled_model(keras, optimizer):
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return optimizer.scale_gradient(self.dense(x))

    model = Scaled()
    model(X)
    return model


@pytest.mark.parametrize("way", ["eager", "function"])
def test_a_loss_with_a_derivative_of_such_outputs_is_refused(way):
    weight, x = tf.Variable(0.5), tf.constant([1.0, 2.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))

    @WAYS[way]
    def gradient():
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = optimizer.scale_gradient(tf.tanh(weight * x))
            loss = tf.reduce_mean((inner.gradient(outputs, x) - 1.0) ** 2)
        return tape.gradient(loss, weight)

    with pytest.raises(RuntimeError, match="contains a derivative of outputs"):
        gradient()


@families
@pytest.mark.parametrize("eager", [False, True])
def test_fit_of_a_model_that_contains_it_is_refused(family, eager):
    optimizer = LossScaleOptimizer(family.sgd())
    model = scaled_model(family.keras, optimizer)
    model.compile(optimizer, "mse", run_eagerly=eager)
    with pytest.raises(RuntimeError, match="multiplied by the loss scale twice"):
        model.fit(X, Y, verbose=0)


@families
def test_evaluations_of_a_model_that_contains_it_change_nothing(family):
    optimizer = LossScaleOptimizer(family.sgd())
    model = scaled_model(family.keras, optimizer)
    model.compile(optimizer, "mse")
    for _ in range(2):
        model.evaluate(X, Y, verbose=0)
        before = [weight.numpy() for weight in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = squared_error(Y, model.dense(X))
        bare = tape.gradient(loss, model.trainable_variables)
        library_step(model, squared_error, optimizer, model.trainable_variables)
        for weight, value, gradient in zip(model.trainable_variables, before, bare):
            np.testing.assert_allclose(weight.numpy(), value - 0.5 * gradient.numpy(), rtol=1e-6)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_the_gradients_of_complex_outputs_are_scaled(way):
    weight = tf.Variable(tf.complex([1.0, 2.0], [0.5, -1.0]))
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([weight])

    @WAYS[way]
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.abs(optimizer.scale_gradient(weight)) ** 2) / 2.0
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    step()
    np.testing.assert_allclose(weight.numpy(), [0.5 + 0.25j, 1.0 - 0.5j], rtol=1e-6)


def test_in_a_function_a_gradient_that_the_scales_of_two_optimizers_multiply_is_not_applied():
    weights = [tf.Variable(2.0) for _ in range(2)]
    optimizers = [LossScaleOptimizer(tf.keras.optimizers.SGD(0.5)) for _ in weights]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:  # of a generator, whose loss passes through the discriminator
            fake = optimizers[0].scale_gradient(weights[0] * 1.0)
            loss = optimizers[1].scale_gradient(weights[1] * fake)
        optimizers[0].apply_gradients([(tape.gradient(loss, weights[0]), weights[0])])

    with pytest.raises(RuntimeError, match="of another LossScaleOptimizer multiplies a gradient"):
        step()
    assert weights[0].numpy() == 2.0


@with_keras_3
def test_a_lambda_layer_at_the_end_of_a_model_scales_its_gradients():
    keras = tf.keras
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = keras.Sequential([net, keras.layers.Lambda(optimizer.scale_gradient)])
    with tf.GradientTape() as tape:
        loss = squared_error(Y, model(X))
    gradient = tape.gradient(loss, net.trainable_variables)
    with tf.GradientTape() as tape:
        loss = squared_error(Y, net(X))
    bare = tape.gradient(loss, net.trainable_variables)
    np.testing.assert_allclose(gradient[0], 8.0 * bare[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("way", ["eager", "function"])
@pytest.mark.parametrize("loss", ["function", "Loss"])
def test_scale_inside_refuses_a_loss_of_predictions(loss, way):
    weight = tf.Variable([[0.5], [-1.0], [2.0]])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))
    wrapped = optimizer.scale_inside(squared_error if loss == "function" else tf.keras.losses.MeanSquaredError())

    @WAYS[way]
    def gradient(stops=False):
        with tf.GradientTape() as tape:
            predictions = X @ weight
            loss = wrapped(Y, tf.stop_gradient(predictions) if stops else predictions)
        return tape.gradient(loss, weight)

    with pytest.raises(RuntimeError, match=r"must run the model itself.*scale_gradient"):
        gradient()
    assert gradient(stops=True) is None


@pytest.mark.parametrize("way", ["eager", "function"])
def test_scale_inside_takes_arguments_of_other_models_whose_gradient_is_stopped(way):
    weight, teacher = tf.Variable([[0.5], [-1.0], [2.0]]), tf.Variable([[1.0], [1.0], [1.0]])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))
    wrapped = optimizer.scale_inside(lambda x, labels: squared_error(labels, x @ weight))

    @WAYS[way]
    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            labels = X @ teacher
            loss, bare = wrapped(X, tf.stop_gradient(labels)), squared_error(labels, X @ weight)
        return tape.gradient(loss, weight), tape.gradient(bare, weight)

    ours, bare = gradients()
    np.testing.assert_allclose(ours, bare, rtol=1e-6)
