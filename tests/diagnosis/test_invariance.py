"""The invariance report names the mistakes in a training loop, and nothing in loops that are right."""

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES
from tf_lossscale.diagnosis import invariance, invariance_report

keras = tf.keras
OPTIMIZERS = {"SGD": lambda: keras.optimizers.SGD(0.01), "Adam": lambda: keras.optimizers.Adam(0.01)}
X = tf.random.stateless_normal([16, 4], (1, 2))
Y = 3 * tf.reduce_sum(X, axis=1, keepdims=True)


def network(name="net", outputs=1, library=keras):
    layers = [
        library.layers.Dense(8, "relu", dtype="mixed_float16", name=f"{name}_hidden"),
        library.layers.Dense(outputs, dtype="float32", name=f"{name}_head"),
    ]
    return library.Sequential([library.Input((4,)), *layers], name=name)


def wrapped(inner, scale=1024, **options):
    return tf_lossscale.LossScaleOptimizer(inner(), initial_scale=scale, **options)


def error(model):
    return tf.reduce_mean((model(X, training=True) - Y) ** 2)


class Loop:
    """A loop with one model: a subclass plants a mistake in one of its parts."""

    finding = variables = None

    def __init__(self, inner):
        self.model = network()
        self.optimizer = wrapped(inner)
        self.optimizer.build(self.model.trainable_variables)
        self.optimizers, self.state = [self.optimizer], [self.model]

    def loss(self):
        return error(self.model)

    def scaled(self, loss):
        return self.optimizer.get_scaled_loss(loss)

    def unscaled(self, gradients):
        return self.optimizer.get_unscaled_gradients(gradients)

    def step(self):
        with tf.GradientTape() as tape:
            loss = self.scaled(self.loss())
        gradients = self.unscaled(tape.gradient(loss, self.model.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))


class ClipsTheNormOfScaledGradients(Loop):
    finding = invariance.ANOTHER_WAY

    def unscaled(self, gradients):
        return super().unscaled(tf.clip_by_global_norm(gradients, 1.0)[0])


class ClipsTheValuesOfScaledGradients(Loop):
    finding = invariance.ANOTHER_WAY

    def unscaled(self, gradients):
        return super().unscaled([tf.clip_by_value(g, -1.0, 1.0) for g in gradients])


class DoesNotUnscale(Loop):
    finding = invariance.NOT_DIVIDED

    def unscaled(self, gradients):
        return gradients


class UnscalesTwiceByHand(Loop):
    finding = invariance.NOT_SCALED

    def unscaled(self, gradients):
        return [g / self.optimizer.loss_scale for g in super().unscaled(gradients)]


class AddsAnAuxiliaryLossAfterScaling(Loop):
    finding = invariance.PART_NOT_SCALED
    variables = "head_kernel"
    share = 0.05

    def __init__(self, inner):
        super().__init__(inner)
        self.kernel = self.model.layers[-1].kernel
        with tf.GradientTape(persistent=True) as tape:
            losses = self.loss(), tf.reduce_sum(self.kernel**2)
        sizes = [tf.norm(tape.gradient(loss, self.kernel.value)) for loss in losses]
        self.weight = float(self.share * sizes[0] / sizes[1])

    def scaled(self, loss):
        return super().scaled(loss) + self.weight * tf.reduce_sum(self.kernel**2)


class AddsALargeAuxiliaryLossAfterScaling(AddsAnAuxiliaryLossAfterScaling):
    share = 10.0


class DoesNotScaleOneOfTwoLosses(Loop):
    finding = invariance.PART_NOT_SCALED

    def scaled(self, loss):
        return super().scaled(loss) + tf.reduce_mean(tf.abs(self.model(X, training=True) - Y))


class DoesNotDivideTheInnerGradientOfAPenalty(Loop):
    finding = (invariance.NOT_DIVIDED, invariance.ANOTHER_WAY)

    def loss(self):
        with tf.GradientTape() as inner:
            inner.watch(X)
            score = tf.reduce_sum(tf.tanh(self.model(X, training=True))) * self.optimizer.loss_scale
        slopes = inner.gradient(score, X)
        return tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)


class HasACustomGradientWithoutUpstream(Loop):
    finding = invariance.NOT_SCALED

    def loss(self):
        @tf.custom_gradient
        def without_upstream(p):
            return tf.reduce_mean((p - Y) ** 2), lambda upstream: 2 * (p - Y) / len(Y)

        return without_upstream(self.model(X, training=True))


class ScalesByAStaleNumber(Loop):
    finding = invariance.NOT_SCALED

    def scaled(self, loss):
        return loss * 1024.0

    def unscaled(self, gradients):
        return [g / self.optimizer.loss_scale for g in gradients]


class AccumulatesScaledGradients:
    """Each micro-step has moved the scale of the loss when the sum is divided."""

    finding, variables = invariance.MOVED, None

    def __init__(self, inner):
        self.model, self.inner = network(), inner()
        self.inner.build(self.model.trainable_variables)
        self.scale = tf_lossscale.DynamicLossScale(1024.0)
        self.optimizers, self.state = [self.scale], [self.model, self.inner]

    def step(self):
        variables, total = self.model.trainable_variables, None
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.scale.scale(error(self.model) / 2)
            gradients = tape.gradient(loss, variables)
            total = gradients if total is None else [a + b for a, b in zip(total, gradients)]
            self.scale.step(gradients, lambda gradients: None)
        self.inner.apply([g / self.scale() for g in total], variables)


class OfTwo:
    """A loop with two networks, of which the second one learns from the first."""

    finding, variables = invariance.OTHER_SCALE, "second"

    def __init__(self, inner):
        self.models = network("first", 4), network("second")
        self.scales = [tf_lossscale.DynamicLossScale(1024.0), tf_lossscale.DynamicLossScale(512.0)]
        self.inner = [inner(), inner()]
        for each, model in zip(self.inner, self.models):
            each.build(model.trainable_variables)
        self.optimizers, self.state = self.scales, [*self.models, self.inner]

    def losses(self):
        hidden = self.models[0](X, training=True)
        return tf.reduce_mean((hidden - X) ** 2), tf.reduce_mean((self.models[1](hidden) - Y) ** 2)

    def scaled(self, losses):
        return [scale.scale(loss) for scale, loss in zip(self.scales, losses)]

    def unscaled(self, i, gradients):
        return self.scales[i].unscale(gradients)

    def step(self):
        for i in range(2):
            variables = self.models[i].trainable_variables
            with tf.GradientTape() as tape:
                loss = self.scaled(self.losses())[i]
            gradients = self.unscaled(i, tape.gradient(loss, variables))
            self.scales[i].step(gradients, lambda g, i=i, variables=variables: self.inner[i].apply(g, variables))


class UnscalesWithTheWrongOneOfTwo(OfTwo):
    def unscaled(self, i, gradients):
        return [g / self.scales[0]() for g in gradients]


class DoesNotScaleTheLossOfOneOfTwo(OfTwo):
    finding, variables = invariance.NOT_SCALED, "first"

    def scaled(self, losses):
        return losses[0], super().scaled(losses)[1]


class ClipsOneOfTwo(OfTwo):
    finding, variables = invariance.ANOTHER_WAY, "first"

    def unscaled(self, i, gradients):
        return super().unscaled(i, tf.clip_by_global_norm(gradients, 0.01)[0] if i == 0 else gradients)


MISTAKES = [
    ClipsTheNormOfScaledGradients,
    ClipsTheValuesOfScaledGradients,
    DoesNotUnscale,
    UnscalesTwiceByHand,
    AddsAnAuxiliaryLossAfterScaling,
    AddsALargeAuxiliaryLossAfterScaling,
    DoesNotScaleOneOfTwoLosses,
    DoesNotDivideTheInnerGradientOfAPenalty,
    HasACustomGradientWithoutUpstream,
    ScalesByAStaleNumber,
    AccumulatesScaledGradients,
    UnscalesWithTheWrongOneOfTwo,
    DoesNotScaleTheLossOfOneOfTwo,
    ClipsOneOfTwo,
]


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_in_the_right_variables(mistake, compiled, inner, steps_before):
    keras.utils.set_random_seed(0)
    loop = mistake(OPTIMIZERS[inner])
    step = tf.function(loop.step) if compiled else loop.step
    for _ in range(steps_before):
        step()
    report = invariance_report(step, loop.optimizers, loop.state)
    assert not report.ok, report
    findings = (mistake.finding,) if isinstance(mistake.finding, str) else mistake.finding
    assert {row.finding for row in report.rows} <= set(findings), report
    assert all((mistake.variables or "") in row.variable.replace("/", "_") for row in report.rows), report
