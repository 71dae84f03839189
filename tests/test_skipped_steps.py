"""Skipped steps beside what optimizers do in their first or every n-th step: averages, counts, products, schedules."""

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations, named
from tests.families import FAMILIES, tf_keras
from tests.test_families import ROWS as CLASSES
from tests.test_families import make
from tf_lossscale import LossScaleOptimizer

KERAS3, TF_KERAS, LEGACY = FAMILIES
# Of eight steps, those with an overflow.
SKIPPED = named(
    {"first": (0,), "first three": (0, 1, 2), "middle": (2, 5), "first and middle": (0, 3, 5), "all": range(8)}
)
skipped = pytest.mark.parametrize("skipped", SKIPPED)
EMA = {"use_ema": True, "ema_momentum": 0.5}
COMMON = {
    "ema": EMA,
    "overwriting ema": {**EMA, "ema_overwrite_frequency": 3},
    "weight_decay": {"weight_decay": 0.125},
    "schedule": {"learning_rate": lambda family: family.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
}
FEATURES = {
    "keras3": {
        **COMMON,
        "accumulation": {"gradient_accumulation_steps": 2},
        "ema of accumulated": {**EMA, "gradient_accumulation_steps": 2, "ema_overwrite_frequency": 2},
    },
    "tf_keras": COMMON,
    "tf_keras_legacy": {"decay": {"decay": 0.5}, "schedule": COMMON["schedule"]},
}
ROWS = [
    pytest.param(family, name, feature, id=f"{family.name}-{name}-{feature}")
    for family in FAMILIES
    for name in sorted(family.classes)
    for feature in ("nothing", *FEATURES[family.name])
    if (family.name, name, feature) != ("tf_keras_legacy", "Nadam", "schedule")  # which that class refuses
]
CONTRACTS = ["apply", "apply_gradients"]


def made(family, name, feature):
    options = FEATURES.get(family.name, {}).get(feature, {})
    if not hasattr(family.optimizers, name):
        pytest.skip(f"this version of {family.name} has no {name}")
    options = {key: value(family) if callable(value) else value for key, value in options.items()}
    return getattr(family.optimizers, name)(**options)


def variables_of(family):
    rng = np.random.default_rng(0)
    kind = tf.keras.Variable if family is KERAS3 else tf.Variable
    return [kind(rng.normal(size=size).astype("float32")) for size in ((4, 3), (3,))]


def gradients_of_steps():
    rng = np.random.default_rng(1)
    return [[tf.constant(rng.normal(size=size).astype("float32")) for size in ((4, 3), (3,))] for _ in range(8)]


def wrapped_step(optimizer, gradients, variables, contract):
    """Takes a step with gradients of the scaled loss; the keras.Variables of Keras 3 are passed as they are."""
    scaled = [gradient * optimizer.loss_scale for gradient in gradients]
    if contract == "apply":
        optimizer.scale_loss(0.0)
        optimizer.apply(scaled, variables)
    else:
        optimizer.get_scaled_loss(tf.constant(0.0))
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(scaled), variables))


def without_skipped_steps(family, inner, variables, skipped, contract):
    """Trains a bare optimizer, which never sees a skipped step; where `iterations` counts it, it is counted here."""
    for i, gradients in enumerate(gradients_of_steps()):
        if i not in skipped:
            family.apply(inner, gradients, variables)
        elif not getattr(inner, "built", True):
            inner.build(variables)
        if i in skipped and family is KERAS3 and inner.use_ema and int(inner.iterations) == 0:
            for variable, average in zip(variables, inner._model_variables_moving_average):
                average.assign(variable)
        if i in skipped and contract == "apply_gradients" and family.counts:
            if not getattr(inner, "gradient_accumulation_steps", None):
                inner.iterations.assign_add(1)
            if hasattr(inner, "_u_product_counter"):
                inner._u_product_counter += 1


def values(inner, variables):
    of_inner = inner.variables() if callable(inner.variables) else inner.variables
    return [np.asarray(tf.convert_to_tensor(v)) for v in (*variables, *of_inner)]


def finalize(optimizer, variables):
    if hasattr(optimizer, "finalize_variable_values"):
        optimizer.finalize_variable_values(variables)


def with_skipped_steps(optimizer, variables, skipped, contract):
    for i, gradients in enumerate(gradients_of_steps()):
        overflow = np.float32(np.inf if i % 2 else np.nan) if i in skipped else np.float32(1.0)
        wrapped_step(optimizer, [gradient * overflow for gradient in gradients], variables, contract)


@pytest.mark.parametrize(
    ("contract", "skipped", "family", "name", "feature"), combinations(CONTRACTS, SKIPPED, ROWS, usual=17)
)
def test_every_optimizer_does_the_same_as_one_that_never_saw_the_skipped_steps(
    family, name, feature, skipped, contract
):
    wrapped, bare = variables_of(family), variables_of(family)
    optimizer = LossScaleOptimizer(made(family, name, feature), initial_scale=1024.0)
    with_skipped_steps(optimizer, wrapped, skipped, contract)
    inner = made(family, name, feature)
    if family is TF_KERAS:
        inner.build(bare)
    if family is LEGACY:
        inner._create_all_weights(bare)
    without_skipped_steps(family, inner, bare, skipped, contract)
    for finish in (lambda optimizer, variables: None, finalize):
        finish(inner, bare)
        finish(optimizer, wrapped)
        for expected, found in zip(values(inner, bare), values(optimizer.inner_optimizer, wrapped), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert int(optimizer.skipped_steps) == len(skipped)


@pytest.mark.parametrize(("family", "name"), [row for row in CLASSES if row.values[0] not in FAMILIES])
@skipped
def test_optimizers_that_count_their_own_steps_do_not_count_skipped_ones(family, name, skipped):
    wrapped, bare = variables_of(family), variables_of(family)
    optimizer, inner = LossScaleOptimizer(make(family, name), initial_scale=1024.0), make(family, name)
    with_skipped_steps(optimizer, wrapped, skipped, "apply_gradients")
    without_skipped_steps(family, inner, bare, skipped, "apply_gradients")
    for expected, found in zip(bare, wrapped):
        np.testing.assert_array_equal(found, expected)


# The original's wrapper around tf_keras's optimizers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "family", "name", "feature"),
    combinations(SKIPPED, [row for row in ROWS if row.values[0] is not KERAS3], usual=13),
)
def test_skipped_steps_do_what_they_did_in_the_original(family, name, feature, skipped):
    if (family, name) == (TF_KERAS, "Nadam") and set(skipped) & {0, 2, 3}:
        pytest.skip("a difference, which test_nadams_product_is_multiplied_once_in_each_step tests")
    pairs = []
    for wrapper in (LossScaleOptimizer, tf_keras.mixed_precision.LossScaleOptimizer):
        variables, optimizer = variables_of(family), wrapper(made(family, name, feature), initial_scale=1024.0)
        with_skipped_steps(optimizer, variables, skipped, "apply_gradients")
        if len(skipped) < 8:  # if all were skipped, legacy's inner optimizer has no slots there
            finalize(optimizer.inner_optimizer, variables)
        pairs.append([variable.numpy() for variable in variables] + [int(optimizer.iterations)])
    for found, expected in zip(*pairs):
        np.testing.assert_array_equal(found, expected)


def trained_by_nadam(steps, skipped, contract, count, built):
    """Returns so many weights after some steps of a traced function, of which some are skipped."""
    variables = [tf.Variable(1.0) for _ in range(count)]
    optimizer = LossScaleOptimizer(tf_keras.optimizers.Nadam(0.125), initial_scale=8.0)
    if built:
        optimizer.build(variables)
    step = tf.function(lambda factor: wrapped_step(optimizer, [factor] * count, variables, contract))
    for i in range(steps):
        step(tf.constant(np.inf if i in skipped else 1.0))
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("skipped", [(0,), (0, 1), (0, 3)], ids=str)
def test_in_a_function_nadam_does_the_same_as_if_it_had_never_seen_the_skipped_steps(skipped):
    expected = trained_by_nadam(4, (), "apply", count=3, built=True)
    assert trained_by_nadam(4 + len(skipped), skipped, "apply", count=3, built=True) == expected


def test_in_a_function_nadam_stays_finite_when_its_first_step_is_skipped():
    # With two variables the function is traced again at a count for which Nadam reads its product as it is.
    assert np.isfinite(trained_by_nadam(3, (0,), "apply_gradients", count=2, built=False)).all()


@pytest.mark.parametrize("skipped", [(), (0,), (0, 1, 4)], ids=str)
def test_nadams_product_is_multiplied_once_in_each_step(skipped):
    variables = [tf.Variable(1.0) for _ in range(3)]
    optimizer = LossScaleOptimizer(tf_keras.optimizers.Nadam(0.125), initial_scale=8.0)
    expected = 1.0
    for i in range(6):
        wrapped_step(optimizer, [tf.constant(np.inf if i in skipped else 1.0)] * 3, variables, "apply_gradients")
        expected *= 1.0 if i in skipped else 0.9 * (1.0 - 0.5 * 0.96 ** (i + 1))
    np.testing.assert_allclose(optimizer.inner_optimizer._u_product, expected, rtol=1e-6)


# Averages, by what they mean ------------------------------------------------------------------------------------


WAYS = {
    "eager": (None, lambda step: step, {}),
    "function": (None, tf.function, {}),
    "compiled function": (None, lambda step: tf.function(step, jit_compile=True), {}),
    "mirrored": ("mirrored_2", tf.function, {}),
}


@pytest.mark.parametrize(
    ("skipped", "contract", "way", "family"), combinations(SKIPPED, CONTRACTS, WAYS, FAMILIES[:2], usual=11)
)
def test_the_average_of_weights_that_never_change_is_these_weights(family, way, contract, skipped):
    name, call, options = WAYS[way]
    strategy = strategies.get(name) if name else tf.distribute.get_strategy()
    with strategy.scope():
        weight = tf.Variable([10.0, -2.0])
        optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0, use_ema=True), initial_scale=8.0, **options)

    def step(factor):
        wrapped_step(optimizer, [factor * tf.ones(2)], [weight], contract)

    take = call(lambda factor: strategy.run(step, (factor,)))
    for i in range(8):
        take(tf.constant(np.nan if i in skipped else 1.0))
    with strategy.scope():
        optimizer.finalize_variable_values([weight])
    for copy in strategy.experimental_local_results(weight):
        np.testing.assert_allclose(copy, [10.0, -2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("bad_epochs", "family"),
    combinations(
        named({"skipped first": 1, "skipped only": 2}),
        FAMILIES[:2],
        usual=["skipped only-keras3", "skipped first-tf_keras"],
    ),
)
def test_a_fit_with_an_average_ends_with_weights_between_those_it_had(family, bad_epochs):
    dense = family.keras.layers.Dense(1, use_bias=False, kernel_initializer=family.keras.initializers.Constant(10.0))
    model = family.keras.Sequential([family.keras.layers.Input((1,)), dense])
    model.compile(LossScaleOptimizer(family.optimizers.SGD(0.125, use_ema=True)), lambda _, output: output)
    for epoch in range(2):
        x = np.full((4, 1), np.nan if epoch < bad_epochs else 1.0)
        model.fit(x, np.zeros((4, 1)), batch_size=1, verbose=0)
    found = dense.kernel.numpy().item()
    assert found == 10.0 if bad_epochs == 2 else 9.5 <= found < 10.0


def test_the_parts_of_a_multi_optimizer_start_their_averages_and_count_skipped_steps():
    if not hasattr(KERAS3.optimizers, "MultiOptimizer"):
        pytest.skip("Keras has MultiOptimizer since 3.14")
    weights = [tf.keras.Variable(10.0) for _ in range(2)]
    schedule = KERAS3.optimizers.schedules.PiecewiseConstantDecay([1], [0.0, 0.5])
    parts = KERAS3.optimizers.SGD(0.0, **EMA), KERAS3.optimizers.SGD(schedule)
    parts_of = {weight.path: part for weight, part in zip(weights, parts)}
    multi = KERAS3.optimizers.MultiOptimizer(lambda weight: parts_of[weight.path])
    optimizer = LossScaleOptimizer(multi, initial_scale=8.0)
    for factor in (np.nan, np.inf, 1.0):
        wrapped_step(optimizer, [tf.constant(factor)] * 2, weights, "apply_gradients")
    optimizer.finalize_variable_values(weights)
    assert [weight.numpy().item() for weight in weights] == [10.0, 9.5]
    assert [int(each.iterations) for each in (optimizer, *parts)] == [3, 3, 3]
