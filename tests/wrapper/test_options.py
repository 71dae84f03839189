"""Keras's ten arguments of an optimizer, on the wrapper; MultiOptimizer and variables that overwrite themselves."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import numerics, strategies
from tests.cases import MODES, combinations, named
from tests.families import FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.wrapper import checks

KERAS3, TF_KERAS, LEGACY = FAMILIES
compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])

OPTIONS = [
    {"weight_decay": 0.1},
    {"clipnorm": 0.25},
    {"clipvalue": 0.25},
    {"global_clipnorm": 0.25},
    {"use_ema": True, "ema_momentum": 0.5},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3, "use_ema": True, "ema_overwrite_frequency": 1, "global_clipnorm": 0.5},
]
ROWS = [
    pytest.param(family, options, id=f"{family.name}-{'-'.join(options)}")
    for family, those in zip(FAMILIES, (OPTIONS, OPTIONS[:6], OPTIONS[1:4]))
    for options in those
]
START = [1.0, -2.0]
GRADIENTS = [[1.0, 3.0], [-0.5, 0.25], [0.25, -2.0], [2.0, 1.0], [-1.0, 0.5], [0.125, 0.0]]


def trained(family, optimizer, step, compiled):
    weight = tf.keras.Variable(START) if family is KERAS3 else tf.Variable(START)

    def take(gradient):
        step(optimizer, gradient, weight)

    function = tf.function(take) if compiled else take
    for gradient in GRADIENTS:
        function(tf.constant(gradient))
    return (weight.value if family is KERAS3 else weight).numpy(), weight


def bare_step(optimizer, gradient, weight):
    optimizer.apply_gradients([(gradient, weight)])


def tf2_step(optimizer, gradient, weight):
    scaled = gradient * tf.cast(optimizer.get_scaled_loss(tf.constant(1.0)), gradient.dtype)
    (unscaled,) = optimizer.get_unscaled_gradients([scaled])
    optimizer.apply_gradients([(unscaled, weight)])


def keras_step(optimizer, gradient, weight):
    optimizer.apply([gradient * optimizer.scale_loss(tf.constant(1.0))], [weight])


@pytest.mark.parametrize(
    ("compiled", "step", "family", "options"),
    combinations(
        MODES,
        named({"tf2": tf2_step, "keras3": keras_step}),
        ROWS,
        usual=[
            "function-keras3-tf_keras-use_ema-ema_momentum",
            "eager-tf2-tf_keras-weight_decay",
            "eager-keras3-tf_keras-global_clipnorm",
        ],
    ),
)
def test_an_option_on_the_wrapper_does_what_it_does_on_the_inner_optimizer(family, options, step, compiled):
    bare, _ = trained(family, family.optimizers.Adam(0.5, **options), bare_step, compiled)
    wrapper = LossScaleOptimizer(family.optimizers.Adam(0.5), initial_scale=8.0, **options)
    wrapped, weight = trained(family, wrapper, step, compiled)
    if compiled:  # the graph optimizer may merge multiplications in one of the two
        numerics.assert_close(wrapped, bare, 1e-6, START)
    else:
        np.testing.assert_array_equal(wrapped, bare)
    assert int(wrapper.iterations) == len(GRADIENTS) // options.get("gradient_accumulation_steps", 1)
    again = type(wrapper).from_config(wrapper.get_config())
    for name, value in options.items():
        assert getattr(wrapper.inner_optimizer, name) == value
        assert family is not KERAS3 or getattr(wrapper, name) == value
        assert getattr(again.inner_optimizer, name) == value
    if options.get("use_ema"):
        wrapper.finalize_variable_values([weight])
        value = (weight.value if family is KERAS3 else weight).numpy()
        assert "ema_overwrite_frequency" in options or not np.array_equal(value, wrapped)


def test_the_ten_names_and_their_defaults_are_keras_3s():
    signatures = (inspect.signature(base.__init__).parameters for base in keras.optimizers.Optimizer.__mro__)
    parameters = next(signature for signature in signatures if "weight_decay" in signature)
    keras_defaults = {name: p.default for name, p in parameters.items() if name in checks.DEFAULTS}
    assert {**keras_defaults, "name": None} == checks.DEFAULTS
    assert set(parameters) - set(checks.DEFAULTS) == {"self", "learning_rate", "kwargs"}


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_a_name_is_that_of_keras_3s_wrapper_and_of_tf_keras_inner_optimizer(family):
    optimizer = LossScaleOptimizer(family.sgd(), name="scaled", clipnorm=1.0)
    again = type(optimizer).from_config(optimizer.get_config())
    for each in (optimizer, again):
        assert (each if family is KERAS3 else each.inner_optimizer).get_config()["name"] == "scaled"
    assert family is not KERAS3 or optimizer.name == "scaled"
    weight = tf.Variable([3.0])
    optimizer.minimize(lambda: weight[0], [weight])
    assert weight.numpy().item() == 2.5
    inner = family.sgd()
    before = inner.get_config()
    with pytest.raises(TypeError, match="`name` must be a string, but got: 5"):
        LossScaleOptimizer(inner, name=5)
    assert inner.get_config() == before


@pytest.mark.parametrize(
    ("compiled", "family"), combinations(MODES, FAMILIES[:2], usual=["function-keras3", "eager-tf_keras"])
)
def test_variables_are_finalized_without_being_named(family, compiled):
    found = []
    for is_named in (False, True):
        weight = tf.Variable([3.0])
        optimizer = LossScaleOptimizer(family.sgd(use_ema=True, ema_momentum=0.5))
        with pytest.raises(ValueError, match=r"finalize_variable_values\(\) without variables"):
            optimizer.finalize_variable_values()
        step = lambda optimizer=optimizer, weight=weight: optimizer.minimize(lambda: weight[0], [weight])  # noqa: E731
        step = tf.function(step) if compiled else step
        for _ in range(3):
            step()
        optimizer.finalize_variable_values(*([[weight]] if is_named else []))
        found.append(weight.numpy().item())
    assert found[0] == found[1] != 1.5, "without the average, three steps lead to 1.5"


@pytest.mark.parametrize("method", ["scale_loss", "get_scaled_loss"])
def test_a_loss_scale_factor_multiplies_the_loss_and_cancels_in_the_step(method):
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, loss_scale_factor=4.0)
    assert float(getattr(optimizer, method)(tf.constant(1.0))) == 32.0
    assert type(optimizer).from_config(optimizer.get_config()).loss_scale_factor == 4.0
    weight = tf.Variable([1.0])
    if method == "scale_loss":
        optimizer.apply([tf.constant([32.0])], [weight])
    else:
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([tf.constant([32.0])]), [weight]))
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 8.0)


@compiled
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_scale_factor_cancels_on_each_replica_if_the_caller_sums_the_gradients(dynamic, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        optimizer = LossScaleOptimizer(KERAS3.sgd(), dynamic=dynamic, initial_scale=8.0, loss_scale_factor=4.0)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(weight)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight]), skip_gradients_aggregation=True)

    def steps():
        strategy.run(step)

    function = tf.function(steps) if compiled else steps
    for expected in (0.0, -1.0):
        function()
        assert [copy.numpy() for copy in strategy.experimental_local_results(weight)] == [expected] * 2


@pytest.mark.parametrize(
    ("inner", "options"),
    [
        ({"clipnorm": 1.0}, {"clipnorm": 2.0}),
        ({"clipnorm": 1.0}, {"clipvalue": 2.0}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}),
        ({"use_ema": True, "ema_momentum": 0.5}, {"ema_momentum": 0.9}),
        ({"loss_scale_factor": 2.0}, {"loss_scale_factor": 4.0}),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}),
        ({}, {"clipnorm": 1.0, "clipvalue": 1.0}),
        ({}, {"use_ema": True, "ema_momentum": 1.5}),
        ({}, {"gradient_accumulation_steps": 1}),
    ],
)
def test_an_option_that_contradicts_the_inner_optimizer_or_keras_is_a_value_error(inner, options):
    optimizer = KERAS3.optimizers.SGD(0.5, **inner)
    with pytest.raises(ValueError, match="|".join(options)):
        LossScaleOptimizer(optimizer, **options)
    for name, value in inner.items():
        assert getattr(optimizer, name) == value
    wrapper = LossScaleOptimizer(optimizer, **inner)
    for name, value in inner.items():
        assert getattr(wrapper, name) == value


def test_the_inner_optimizers_own_loss_scale_factor_is_ignored_or_refused_if_it_is_set_later(warnings):
    optimizer, weight = LossScaleOptimizer(KERAS3.sgd(loss_scale_factor=8.0), initial_scale=8.0), tf.Variable([1.0])
    assert "loss_scale_factor=8.0" in warnings[0]
    assert float(optimizer.scale_loss(tf.constant(1.0))) == 8.0
    optimizer.apply([tf.constant([8.0])], [weight])
    assert weight.numpy() == 0.5
    optimizer.inner_optimizer.loss_scale_factor = 4.0
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match="Set it on the LossScaleOptimizer"):
        optimizer.apply([tf.constant([8.0])], [weight])
    assert weight.numpy() == 0.5


def test_an_option_after_the_inner_optimizer_is_built_is_a_value_error():
    for family, variable in ((KERAS3, tf.keras.Variable([1.0])), (TF_KERAS, tf.Variable([1.0]))):
        inner = family.sgd()
        inner.build([variable])
        with pytest.raises(ValueError, match="before the inner SGD is built"):
            LossScaleOptimizer(inner, use_ema=True)
        LossScaleOptimizer(inner)


MISSING = [
    *[(family, name, 2) for family in FAMILIES[1:] for name in ("gradient_accumulation_steps", "loss_scale_factor")],
    *[(LEGACY, name, value) for name, value in {"weight_decay": 0.1, "use_ema": True, "ema_momentum": 0.5}.items()],
    (LEGACY, "ema_overwrite_frequency", 2),
]


@pytest.mark.parametrize(("family", "name", "value"), MISSING, ids=[f"{f.name}-{name}" for f, name, _ in MISSING])
def test_an_option_that_the_family_does_not_have_is_a_value_error_that_says_so(family, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is not supported for SGD"):
        LossScaleOptimizer(family.sgd(), **{name: value})


@pytest.mark.parametrize(
    ("bad_at", "step", "compiled"),
    combinations(
        [0, 1, 2],
        named({"tf2": tf2_step, "keras3": keras_step}),
        MODES,
        usual=["2-keras3-function", "1-tf2-eager", "0-tf2-eager"],
    ),
)
def test_a_skipped_micro_step_never_advances_iterations(compiled, step, bad_at):
    weight = tf.keras.Variable([1.0])
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, gradient_accumulation_steps=2)
    function = tf.function(lambda g: step(optimizer, g, weight)) if compiled else lambda g: step(optimizer, g, weight)
    gradients = [1.0, 3.0]
    gradients.insert(bad_at, np.inf)
    counts = [0]
    for gradient in gradients:
        function(tf.constant([gradient]))
        counts.append(int(optimizer._iterations))
    assert counts[bad_at] == counts[bad_at + 1] and counts[-1] == 2
    assert weight.value.numpy() == 1.0 - 0.5 * 2.0, "the mean of 1 and 3"
    assert int(optimizer.skipped_steps) == 1
    optimizer.iterations = 3
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 3


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
@pytest.mark.parametrize(
    ("kwargs", "compiled"),
    combinations(
        [{}, {"clipnorm": 0.5}, {"gradient_accumulation_steps": 2}],
        MODES,
        usual=["{}-function", "{'clipnorm': 0.5}-eager", "{'gradient_accumulation_steps': 2}-eager"],
    ),
)
def test_multi_optimizer_takes_the_same_steps_and_skips_in_all_its_parts(compiled, kwargs):
    gradients = np.random.default_rng(0).normal(size=(5, 3, 2)).astype("float32")
    results = []
    for wrap in (lambda inner: inner, LossScaleOptimizer):
        weights = [keras.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias", "other")]
        parts = {"bias": KERAS3.adam(), "kernel": KERAS3.sgd(momentum=0.5, **kwargs)}
        optimizer = wrap(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(KERAS3.sgd(), parts)))

        def step(gradient, optimizer=optimizer, weights=tuple(weights), wrapped=wrap is LossScaleOptimizer):
            scale = optimizer.scale_loss(tf.constant(1.0)) if wrapped else 1.0
            optimizer.apply(tf.unstack(gradient * scale), list(weights))

        function = tf.function(lambda gradient, step=step: step(gradient)) if compiled else step
        for gradient in gradients:
            function(tf.constant(gradient))
            if wrap is LossScaleOptimizer:
                function(tf.constant([[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]]))
        results.append([w.value.numpy() for w in weights])
    for a, b in zip(*results):
        numerics.assert_close(a, b, 1e-6, [1.0, 2.0])
    assert (int(optimizer.skipped_steps), float(optimizer.loss_scale)) == (5, 2.0**10)


@compiled
def test_variables_that_are_overwritten_take_their_gradient_as_it_is(compiled):
    weight, amax = keras.Variable([1.0]), keras.Variable([0.0], name="amax")
    amax.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0, loss_scale_factor=2.0)
    optimizer.build([weight, amax])

    @tf.custom_gradient
    def noted(amax):
        return amax, lambda upstream: upstream * 0.0 + 3.0  # a new value, whatever the scale

    def apply(gradient, new):
        optimizer.scale_loss(0.0)
        optimizer.apply([gradient, new], [weight, amax])

    def minimize(gradient, new):
        optimizer.minimize(lambda: weight.value + 0.0 * noted(amax.value), [weight, amax])

    def divided(gradient, new):
        optimizer.get_scaled_loss(0.0)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient, new]), [weight, amax]))

    def take(step, gradient, new):
        (tf.function(step) if compiled else step)(tf.constant([gradient]), tf.constant([new]))
        return weight.value.numpy().item(), amax.value.numpy().item(), float(optimizer.loss_scale)

    assert take(apply, 16.0, 5.0) == (0.5, 5.0, 8.0)
    assert take(minimize, 0.0, 0.0) == (0.0, 3.0, 8.0)
    with pytest.raises(ValueError, match=r"amax has overwrite_with_gradient=True.*apply\(gradients, variables\)"):
        take(divided, 16.0, 16.0)
    assert take(apply, np.inf, 7.0) == (0.0, 3.0, 4.0)


@compiled
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_new_value_that_overflows_on_either_replica_skips_the_step_on_both(bad, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight, amax = keras.Variable(1.0), keras.Variable(1.0)
        amax.overwrite_with_gradient = True
        optimizer = LossScaleOptimizer(KERAS3.sgd(), initial_scale=8.0)
    new = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(np.inf if context.replica_id_in_sync_group == bad else 3.0)
    )

    def step(new):
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant(4.0), new], [weight, amax])

    steps = lambda new: strategy.run(step, (new,))  # noqa: E731
    (tf.function(steps) if compiled else steps)(new)
    expected = [0.5, 3.0, 8.0] if bad is None else [1.0, 1.0, 4.0]
    for variable, value in zip((weight.value, amax.value, optimizer._loss_scale.current_loss_scale), expected):
        assert [copy.numpy() for copy in strategy.experimental_local_results(variable)] == [value] * 2


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("init_scale", ". Pass initial_scale"),
        ("growth_interval", ". Pass dynamic_growth_steps"),
        ("on_warning", "$"),
    ],
)
def test_a_keyword_of_another_loss_scaler_is_refused_with_the_name_of_ours_if_there_is_one(name, instead):
    inner = tf.keras.optimizers.SGD()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'{instead}"):
        LossScaleOptimizer(inner, **{name: 8})
    LossScaleOptimizer(inner)
