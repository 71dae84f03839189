"""The invariance report names the mistakes in a training loop, and nothing in loops that are right."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import loops, strategies
from tests.cases import combinations, named, slow_one_in
from tests.families import ALL_FAMILIES, ALL_IDS, FAMILIES
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
    HasACustomGradientWithoutUpstream,
    ScalesByAStaleNumber,
    AccumulatesScaledGradients,
    UnscalesWithTheWrongOneOfTwo,
    DoesNotScaleTheLossOfOneOfTwo,
    ClipsOneOfTwo,
]


def cases(usual, *lists):
    """The combinations of lists. Some usual ones run in `make test`, and some of the others are slow."""
    return combinations(*lists, usual=usual, others=slow_one_in(6))


@pytest.mark.parametrize(
    ("mistake", "way", "inner", "steps_before"),
    cases(
        [
            "ClipsTheNormOfScaledGradients-function-Adam-0",
            "DoesNotUnscale-eager-SGD-0",
            "AddsAnAuxiliaryLossAfterScaling-eager-Adam-0",
            "HasACustomGradientWithoutUpstream-eager-SGD-0",
            "UnscalesWithTheWrongOneOfTwo-eager-SGD-0",
            "AccumulatesScaledGradients-eager-SGD-0",
        ],
        MISTAKES,
        ["eager", "function"],
        OPTIMIZERS,
        [0, 3],
    ),
)
def test_a_planted_mistake_is_found_in_the_right_variables(mistake, way, inner, steps_before):
    require_found(mistake, way, inner, steps_before)


def require_found(mistake, way, inner, steps_before):
    keras.utils.set_random_seed(0)
    loop = mistake(OPTIMIZERS[inner])
    step = tf.function(loop.step) if way == "function" else loop.step
    for _ in range(steps_before):
        step()
    report = invariance_report(step, loop.optimizers, loop.state)
    assert not report.ok, report
    findings = (mistake.finding,) if isinstance(mistake.finding, str) else mistake.finding
    assert {row.finding for row in report.rows} <= set(findings), report
    assert all((mistake.variables or "") in row.variable.replace("/", "_") for row in report.rows), report


@pytest.mark.parametrize(("inner", "steps_before"), cases(["SGD-0"], OPTIMIZERS, [0, 3]))
def test_an_inner_gradient_that_is_not_divided_is_found_in_eager_mode(inner, steps_before):
    require_found(DoesNotDivideTheInnerGradientOfAPenalty, "eager", inner, steps_before)


def test_an_inner_gradient_that_is_not_divided_is_an_error_in_a_function():
    loop = DoesNotDivideTheInnerGradientOfAPenalty(OPTIMIZERS["SGD"])
    with pytest.raises(RuntimeError, match="product with loss_scale"):
        invariance_report(tf.function(loop.step), loop.optimizers, loop.state)


# Right loops. Each function returns a step, its optimizers and its state.


def trained(make_step, inner=OPTIMIZERS["Adam"], model=None, **options):
    """A loop with one model, whose optimizer `make_step` takes together with the model."""
    model = network() if model is None else model
    optimizer = wrapped(inner, **options)
    return make_step(optimizer, model), optimizer, model


def by_hand(optimizer, model, loss_fn=error, change=lambda gradients: gradients):
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_fn(model))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(change(gradients), model.trainable_variables))

    return step


def that_clips_unscaled_gradients():
    return trained(lambda o, m: by_hand(o, m, change=lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0]))


def that_minimizes():
    return trained(lambda o, m: lambda: o.minimize(lambda: error(m), m.trainable_variables))


def with_the_calls_of_keras_3():
    def make(optimizer, model):
        def step():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(error(model))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        return step

    return trained(make)


def with_options(**options):
    return lambda: trained(by_hand, lambda: keras.optimizers.Adam(0.01, **options))


def with_optimizer(name):
    return lambda: trained(by_hand, lambda: getattr(keras.optimizers, name)(0.01))


def with_momentum():
    return trained(by_hand, lambda: keras.optimizers.SGD(0.01, momentum=0.9))


def with_loss_scale(scale):
    return lambda: trained(by_hand, scale=scale)


def with_hysteresis_and_diagnosis():
    return trained(by_hand, scale=2.0**30, hysteresis=2, diagnose=True, dynamic_growth_steps=1)


def accumulating(add_scaled):
    def make(optimizer, model):
        sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

        def step():
            for i in range(2):
                with tf.GradientTape() as tape:
                    loss = optimizer.get_scaled_loss(tf.reduce_mean((model(X[8 * i : 8 * i + 8]) - 1.0) ** 2) / 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                gradients = gradients if add_scaled else optimizer.get_unscaled_gradients(gradients)
                for total, gradient in zip(sums, gradients):
                    total.assign_add(gradient)
            gradients = [total.read_value() for total in sums]
            gradients = optimizer.get_unscaled_gradients(gradients) if add_scaled else gradients
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            for total in sums:
                total.assign(tf.zeros_like(total))

        make.sums = sums
        return step

    return lambda: (lambda step, optimizer, model: (step, optimizer, [model, make.sums]))(*trained(make))


def with_a_mean_over_micro_batches_before_unscaling():
    def make(optimizer, model):
        def step():
            parts = []
            for i in range(2):
                with tf.GradientTape() as tape:
                    loss = optimizer.get_scaled_loss(tf.reduce_mean((model(X[8 * i : 8 * i + 8]) - 1.0) ** 2))
                parts.append(tape.gradient(loss, model.trainable_variables))
            gradients = optimizer.get_unscaled_gradients([(a + b) / 2 for a, b in zip(*parts)])
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        return step

    return trained(make)


def with_a_gradient_penalty():
    def penalty(optimizer, model):
        with tf.GradientTape() as inner:
            inner.watch(X)
            score = tf.reduce_sum(tf.tanh(model(X, training=True))) * optimizer.loss_scale
        slopes = inner.gradient(score, X) / optimizer.loss_scale
        return error(model) + tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)

    return trained(lambda o, m: by_hand(o, m, lambda model: penalty(o, model)))


def with_a_custom_gradient():
    @tf.custom_gradient
    def squares(p):
        return tf.reduce_mean((p - Y) ** 2), lambda upstream: upstream * 2 * (p - Y) / len(Y)

    return trained(lambda o, m: by_hand(o, m, lambda model: squares(model(X, training=True))))


def with_regularization_before_scaling():
    def loss(model):
        return error(model) + 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])

    return trained(lambda o, m: by_hand(o, m, loss))


def with_two_networks(inner):
    def make():
        loop = OfTwo(OPTIMIZERS[inner])
        return loop.step, loop.optimizers, loop.state

    return make


def with_a_shared_loss_scale():
    shared, models = tf_lossscale.SharedLossScale(1024.0), [network("first"), network("second")]
    optimizers = [tf_lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.01), loss_scale=shared) for _ in models]

    def step():
        pairs = [o.compute_gradients(lambda m=m: error(m), m.trainable_variables) for o, m in zip(optimizers, models)]
        shared.apply_gradients(zip(optimizers, pairs))

    return step, shared, [models, optimizers]


def on_batches(library, **options):
    def make():
        layers = library.layers.BatchNormalization(), library.layers.Dropout(0.5, seed=1), library.layers.Dense(1)
        hidden = library.layers.Dense(8, "relu", dtype="mixed_float16")
        model = library.Sequential([library.Input((4,)), hidden, *layers])
        optimizer = tf_lossscale.LossScaleOptimizer(library.optimizers.Adam(0.01), initial_scale=1024)
        model.compile(optimizer, "mse", metrics=["mae"], **options)
        return lambda: model.train_on_batch(X, Y), optimizer, model

    return make


def of_fit(library):
    def make():
        _, optimizer, model = on_batches(library)()
        return lambda: model.fit(X, Y, batch_size=16, shuffle=False, verbose=0), optimizer, model

    return make


def on_replicas():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        model = network()
        optimizer = wrapped(OPTIMIZERS["Adam"])
        optimizer.build(model.trainable_variables)
    run = tf.function(lambda: strategy.run(by_hand(optimizer, model, lambda model: error(model) / 2)))
    return lambda: run(), optimizer, model


def of_fit_on_replicas():
    with strategies.get("mirrored_2").scope():
        return of_fit(keras)()


def with_a_loss_scale_alone():
    model, scale, inner = network(), tf_lossscale.DynamicLossScale(1024.0), keras.optimizers.SGD(0.01)
    inner.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = scale.scale(error(model))
        gradients = scale.unscale(tape.gradient(loss, model.trainable_variables))
        scale.step(gradients, lambda g: inner.apply(g, model.trainable_variables))

    return step, scale, [model, inner]


def with_scale_inside():
    def make(optimizer, model):
        loss_fn = optimizer.scale_inside(lambda: error(model))

        def step():
            with tf.GradientTape() as tape:
                loss = loss_fn()
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        return step

    return trained(make)


def with_an_embedding():
    layers = keras.layers.Embedding(5, 4, dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input((2,)), *layers])
    rows = tf.constant([[0, 1], [1, 3]])
    return trained(lambda o, m: by_hand(o, m, lambda model: tf.reduce_mean((model(rows) - 1.0) ** 2)), model=model)


def with_random_inputs():
    def loss(model):
        return tf.reduce_mean((model(tf.random.normal([16, 4])) - 1.0) ** 2)

    return trained(lambda o, m: by_hand(o, m, loss))


def with_numpys_random_inputs():
    def loss(model):
        return tf.reduce_mean((model(tf.constant(np.random.normal(size=(16, 4)), tf.float32)) - 1.0) ** 2)

    return trained(lambda o, m: by_hand(o, m, loss))


def with_an_average_and_a_logged_norm():
    average, norm = network(), keras.metrics.Mean()

    def make(optimizer, model):
        def change(gradients):
            norm.update_state(tf.linalg.global_norm(gradients))
            return gradients

        step = by_hand(optimizer, model, change=change)

        def step_and_average():
            step()
            for mean, weight in zip(average.weights, model.weights):
                mean.assign(0.9 * mean + 0.1 * weight)

        return step_and_average

    step, optimizer, model = trained(make)
    return step, optimizer, [model, average, norm]


def that_keeps_the_state():
    step, optimizer, model = on_batches(keras)()
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    return step, optimizer, model


def of_two_steps():
    def make(optimizer, model):
        step = by_hand(optimizer, model)
        return lambda: [step() for _ in range(2)] and None

    return trained(make)


def with_adafactor():
    return trained(by_hand, lambda: tf_lossscale.optimizers.Adafactor(lr=0.01))


def of_an_adversary():
    def make(optimizer, model):
        def loss(model):
            with tf.GradientTape() as tape:
                tape.watch(X)
                scaled = optimizer.get_scaled_loss(error(model))
            [slope] = optimizer.get_unscaled_gradients([tape.gradient(scaled, X)])
            return tf.reduce_mean((model(X + 0.1 * tf.sign(slope)) - Y) ** 2)

        return by_hand(optimizer, model, loss)

    return trained(make)


RIGHT = {
    "by hand": lambda: trained(by_hand),
    "clipping": that_clips_unscaled_gradients,
    "minimize": that_minimizes,
    "Keras 3's calls": with_the_calls_of_keras_3,
    "clipnorm": with_options(clipnorm=0.1),
    "global_clipnorm": with_options(global_clipnorm=0.1),
    "clipvalue": with_options(clipvalue=0.01),
    "average": with_options(use_ema=True),
    "weight decay": with_options(weight_decay=0.1),
    "Keras 3's accumulation": with_options(gradient_accumulation_steps=2),
    **{name: with_optimizer(name) for name in ("Lion", "Nadam", "RMSprop", "Adagrad", "Ftrl", "Lamb", "Muon")},
    "momentum": with_momentum,
    "high scale": with_loss_scale(2.0**40),
    "scale that is no power of two": with_loss_scale(1000.0),
    "low scale": with_loss_scale(8.0),
    "hysteresis": with_hysteresis_and_diagnosis,
    "accumulation": accumulating(add_scaled=False),
    "accumulation of scaled gradients": accumulating(add_scaled=True),
    "micro-batches": with_a_mean_over_micro_batches_before_unscaling,
    "penalty": with_a_gradient_penalty,
    "custom gradient": with_a_custom_gradient,
    "regularization": with_regularization_before_scaling,
    "two networks, SGD": with_two_networks("SGD"),
    "two networks, Adam": with_two_networks("Adam"),
    "shared": with_a_shared_loss_scale,
    "train_on_batch": on_batches(keras),
    "train_on_batch, eager": on_batches(keras, run_eagerly=True),
    "train_on_batch, XLA": on_batches(keras, jit_compile=True),
    "train_on_batch, tf_keras": on_batches(FAMILIES[1].keras),
    "fit": of_fit(keras),
    "fit, tf_keras": of_fit(FAMILIES[1].keras),
    "replicas": on_replicas,
    "fit on replicas": of_fit_on_replicas,
    "loss scale alone": with_a_loss_scale_alone,
    "scale_inside": with_scale_inside,
    "embedding": with_an_embedding,
    "random": with_random_inputs,
    "NumPy's random": with_numpys_random_inputs,
    "average by hand": with_an_average_and_a_logged_norm,
    "keep_state": that_keeps_the_state,
    "two steps": of_two_steps,
    "Adafactor": with_adafactor,
    "adversary": of_an_adversary,
}


@pytest.mark.parametrize("loop", cases(["by hand", "clipping", "shared", "train_on_batch"], RIGHT))
def test_a_right_loop_gives_no_row(loop):
    keras.utils.set_random_seed(0)
    step, optimizers, state = RIGHT[loop]()
    report = invariance_report(step, optimizers, state)
    assert report.ok, report
    assert [row for row in report.rows if row.finding != invariance.RANDOM] == []
    assert not report.rows or loop in ("random", "train_on_batch, tf_keras", "fit, tf_keras")
    step()
    assert invariance_report(step, optimizers, state).ok


# What a report leaves behind, and what it refuses.


def state_of(optimizer, model):
    """All that a step of an optimizer with one model may change."""
    library = getattr(optimizer.inner_optimizer, "variables", ())
    slots = library() if callable(library) else library
    return {
        "values": [np.array(tf.convert_to_tensor(v)).tolist() for v in (*model.variables, *slots)],
        "scale": optimizer.state(),
        "numbers": (np.random.get_state()[1].tolist(), np.random.get_state()[2]),
    }


class OneWeight(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0], name="weight")
        self.seen = tf.Variable(0.0, trainable=False)
        self.calls = 0


@pytest.mark.parametrize(
    ("name", "way", "steps_before"),
    cases(
        ["keras3-function-1", "tf_keras-eager-0", "tf_keras_legacy-error-1"],
        ALL_IDS,
        ["eager", "function", "XLA", "error"],
        [0, 1],
    ),
)
def test_a_report_leaves_nothing_behind(name, way, steps_before):
    family = ALL_FAMILIES[ALL_IDS.index(name)]
    model, optimizer, traces = OneWeight(), tf_lossscale.LossScaleOptimizer(family.adam(), initial_scale=1024), []

    def step():
        traces.append(way)
        model.calls += 1
        model.seen.assign_add(1.0)
        loops.step(optimizer, lambda: tf.reduce_sum(model.weight**2), [model.weight])

    step = {"function": tf.function, "XLA": tf.function(jit_compile=True)}.get(way, lambda step: step)(step)
    for _ in range(steps_before):
        step()
    before, calls, traced = state_of(optimizer, model), model.calls, len(traces)

    def fails():
        step()
        raise ZeroDivisionError

    if way == "error":
        with pytest.raises(ZeroDivisionError):
            invariance_report(fails, optimizer, model)
    else:
        report = invariance_report(step, optimizer, model)
        assert report.ok, report
    after = state_of(optimizer, model)
    assert model.calls == calls
    assert way not in ("function", "XLA") or len(traces) - traced <= 2 * (not steps_before)
    if steps_before:
        assert after == before
    else:  # slots that the first step creates have their first values
        assert after["scale"] == before["scale"]
        assert after["values"][:2] == before["values"][:2]
        fresh, other = OneWeight(), tf_lossscale.LossScaleOptimizer(family.adam(), initial_scale=1024)
        step(), loops.step(other, lambda: tf.reduce_sum(fresh.weight**2), [fresh.weight])
        np.testing.assert_allclose(model.weight, fresh.weight, rtol=1e-6)


def test_the_gradients_of_a_loss_that_was_scaled_before_the_report_are_divided_by_its_factor():
    model, optimizer = OneWeight(), wrapped(OPTIMIZERS["SGD"])

    def step():
        loops.step(optimizer, lambda: tf.reduce_sum(model.weight**2), [model.weight])

    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(model.weight**2))
    gradients = tape.gradient(loss, [model.weight])
    assert invariance_report(step, optimizer, model).ok
    optimizer.scaler.current_loss_scale.assign(4.0)
    np.testing.assert_array_equal(optimizer.get_unscaled_gradients(gradients)[0], [2.0, 4.0])


def test_a_step_that_is_skipped_at_every_scale_is_reported():
    step, optimizer, model = trained(lambda o, m: by_hand(o, m, lambda model: error(model) * float("nan")))
    report = invariance_report(step, optimizer, model)
    assert not report.ok and report.is_skipped
    assert "activation_report" in str(report)


def test_a_gradient_that_float16_loses_is_no_mistake():
    def loss(model):
        return tf.cast(tf.cast(model.weight, tf.float16) * tf.constant(2.0**-24, tf.float16), tf.float32)[0]

    model = OneWeight()
    optimizer = wrapped(OPTIMIZERS["SGD"], scale=1.0)

    def step():
        optimizer.minimize(lambda: loss(model), [model.weight])

    report = invariance_report(step, optimizer, model)
    assert report.ok
    assert report.rows == () or {row.finding for row in report.rows} == {invariance.LOST}


def test_what_cannot_be_compared_is_refused():
    model, optimizer = OneWeight(), wrapped(OPTIMIZERS["SGD"])
    with pytest.raises(TypeError, match="`step` must be a function"):
        invariance_report(None, optimizer)
    with pytest.raises(TypeError, match=r"`optimizers` must be a tf_lossscale\.LossScaleOptimizer"):
        invariance_report(lambda: None, keras.optimizers.SGD())
    with pytest.raises(ValueError, match="must contain at least one optimizer"):
        invariance_report(lambda: None, [])
    with pytest.raises(RuntimeError, match="needs eager mode"):
        tf.function(lambda: invariance_report(lambda: None, optimizer))()
    with pytest.raises(ValueError, match="one cycle"):
        invariance_report(lambda: model.seen.assign_add(1.0), optimizer, model)
    fixed = tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False, initial_scale=8)
    with pytest.raises(ValueError, match=r"contains a fixed scale as a constant.*DynamicLossScale"):
        invariance_report(lambda: None, fixed)
    assert model.seen.numpy() == 0.0


def test_a_report_is_drawn():
    keras.utils.set_random_seed(0)
    loop = DoesNotUnscale(OPTIMIZERS["SGD"])
    report = invariance_report(loop.step, loop.optimizers, loop.state)
    assert len(report.plot().axes[0].lines) == len(report.rows) == 4
    assert str(report).splitlines()[-1].startswith("not divided: call get_unscaled_gradients()")


@pytest.mark.parametrize(
    ("policy", "clips", "factor", "is_wrong"),
    combinations(
        ["float32", "mixed_float16"],
        named({"unclipped": None, "clips": "by hand", "global_clipnorm": "inner"}),
        [1e-2, 1e-4],
        named({"right": False, "wrong": True}),
        usual=[
            "float32-clips-0.0001-wrong",
            "mixed_float16-clips-0.01-right",
            "mixed_float16-global_clipnorm-0.01-wrong",
        ],
        others=slow_one_in(3),
    ),
)
def test_a_small_penalty_that_is_not_scaled_is_found_although_clipping_hides_it(policy, clips, factor, is_wrong):
    keras.utils.set_random_seed(0)
    layer = functools.partial(keras.layers.Dense, dtype=policy, kernel_regularizer=keras.regularizers.L2(factor))
    model = keras.Sequential([keras.Input((4,)), layer(16, "relu"), keras.layers.Dense(1, dtype="float32")])
    optimizer = wrapped(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5 if clips == "inner" else None))
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss, penalty = tf.reduce_mean((model(x) - x.sum(1, keepdims=True)) ** 2), tf.add_n(model.losses)
            scaled = (
                optimizer.get_scaled_loss(loss) + penalty if is_wrong else optimizer.get_scaled_loss(loss + penalty)
            )
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, model.trainable_variables))
        gradients = tf.clip_by_global_norm(gradients, 0.5)[0] if clips == "by hand" else gradients
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    report = invariance_report(step, optimizer, model)
    assert {row.finding for row in report.rows} == ({invariance.PART_NOT_SCALED} if is_wrong else set()), report


@pytest.mark.parametrize("is_part", [True, False])
def test_a_rounding_error_of_one_element_is_no_part_of_the_loss(is_part):
    """The errors of a single number may have the same sign and grow alike at scales that are a power of 8 apart."""
    weight, scale = tf.Variable(0.0), tf_lossscale.DynamicLossScale(1024.0)

    def step():
        power = int(np.log2(scale.current_loss_scale.numpy()))
        has_sign = is_part or power % 3 == np.log2(1024) % 3
        weight.assign_add(1 + (1 if has_sign else -1) * min(1e-2 * 2.0**-power, 9e-3))

    report = invariance_report(step, scale, weight)
    assert {row.finding for row in report.rows} == ({invariance.PART_NOT_SCALED} if is_part else set()), report


def test_a_rounding_error_at_the_lowest_scale_is_no_part_of_the_loss():
    weight, scale = tf.Variable(0.0), tf_lossscale.DynamicLossScale(1024.0)

    def step():
        weight.assign_add(8.0 if scale.current_loss_scale < 2.0**-10 else 1.0)

    report = invariance_report(step, scale, weight)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_bias_without_a_gradient_is_no_mistake(seed):
    """Batch normalization subtracts the bias before it, so the gradient of the bias is a rounding error."""
    keras.utils.set_random_seed(seed)
    x = tf.random.stateless_normal([64, 8, 8, 1], (seed, 1))
    half = {"dtype": "mixed_float16"}
    layers = keras.layers.Conv2D(4, 3, **half), keras.layers.BatchNormalization(**half), keras.layers.ReLU()
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])

    def loss_fn(model):
        return tf.reduce_mean((model(x, training=True) - x[:, 0, 0]) ** 2)

    step, optimizer, _ = trained(lambda optimizer, model: by_hand(optimizer, model, loss_fn), model=model)
    step = tf.function(step)
    for _ in range(20):
        step()
    report = invariance_report(step, optimizer, model)
    assert report.ok, report


def clipping_step(optimizer, loss_of, variables):
    """Returns a step that clips gradients before it unscales them."""

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_of())
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables()), 1.0)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables()))

    return step


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_an_infinite_weight_hides_no_mistake(value):
    weight, optimizer = tf.Variable([1.0, value]), wrapped(OPTIMIZERS["SGD"])
    step = clipping_step(optimizer, lambda: tf.gather(weight, [0])[0] ** 2, lambda: [weight])
    assert not invariance_report(step, optimizer, weight).ok
    np.testing.assert_array_equal(weight, [1.0, value])


def test_temporary_variables_of_a_step_are_not_compared():
    weight, optimizer = tf.Variable([1.0, 2.0]), wrapped(OPTIMIZERS["SGD"])

    def step():
        mean, temporary = tf.keras.metrics.Mean(), tf.Variable([1.0, 2.0])
        mean.update_state(temporary.assign_add(weight))
        loops.step(optimizer, lambda: tf.reduce_sum(weight**2), [weight])

    report = invariance_report(step, optimizer, weight)
    assert report.ok and not report.rows, report


class Lazy(tf.Module):
    """A module that creates its weight in its first call."""

    weight = None

    def __call__(self):
        if self.weight is None:
            self.weight = tf.Variable([1.0, 2.0], name="weight")
        return tf.reduce_sum(self.weight**2)


def test_a_module_that_the_step_builds_in_a_function_is_refused():
    module, optimizer = Lazy(), wrapped(OPTIMIZERS["SGD"])
    step = tf.function(clipping_step(optimizer, module, lambda: [module.weight]))
    with pytest.raises(ValueError, match=r"created the variables weight in a tf\.function.* Build the model"):
        invariance_report(step, optimizer, module)
    assert not invariance_report(step, optimizer, module).ok
