"""Bad input is a ValueError or TypeError that says what to do, and changes nothing."""

import copy
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.cases import MODES, combinations
from tests.families import ALL_FAMILIES, all_families, families, keras_2_families, with_keras_3
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.amp import FixedLossScaleManager
from tf_lossscale.legacy import stable

NAN, INF = float("nan"), float("inf")
NUMBERS = (
    "initial_scale",
    "dynamic_growth_steps",
    "growth_factor",
    "backoff_factor",
    "hysteresis",
    "min_scale",
    "max_scale",
)
# Arguments, and a text of the error.
BAD_ARGUMENTS = [
    *[({"initial_scale": value}, "initial_scale") for value in (0, -4, NAN, INF, 1e39, 1e-50, "8", "dynamic", True)],
    *[({"initial_scale": value}, "initial_scale") for value in ([8.0], tf.constant(0.0), np.float32(NAN), object())],
    *[({"dynamic_growth_steps": value}, "dynamic_growth_steps") for value in (0, -1, 2.5, NAN, INF, "5", True)],
    *[({"growth_factor": value}, "growth_factor") for value in (1.0, 0.5, 0, -2.0, NAN, INF, "2", None, 1 + 1e-8)],
    *[({"backoff_factor": value}, "backoff_factor") for value in (1.0, 2.0, 0, -0.5, NAN, INF, "0.5", None, 1 - 1e-8)],
    ({"growth_factor": 1 + 1e-9}, "`growth_factor` must be above 1 in float32, but got: 1.000000001. The usual"),
    (
        {"backoff_factor": 1 - 1e-9},
        "`backoff_factor` must be below 1 in float32, but got: 0.999999999. The usual",
    ),
    *[({name: value}, name) for name in NUMBERS for value in (np.True_, tf.constant(True), -(10**400), 10**400)],
    *[({"hysteresis": value}, "hysteresis") for value in (0, -1, 1.5, NAN, "1", None)],
    *[({"min_scale": value}, "min_scale") for value in (0.0, -1.0, NAN, INF, None)],
    *[({"max_scale": value}, "max_scale") for value in (0.0, -1.0, NAN, INF, "8")],
    ({"min_scale": 8.0, "max_scale": 4.0}, "`min_scale` must not be above `max_scale`, but got: 8.0 and 4.0"),
    ({"initial_scale": 8.0, "max_scale": 4.0}, "`initial_scale` must not be above `max_scale`"),
    ({"dynamic": False}, '"initial_scale" must be specified'),
    ({"dynamic": False, "skip_nonfinite": True}, '"initial_scale" must be specified'),
    ({"dynamic": False, "initial_scale": 8, "hysteresis": 2}, "`hysteresis` must be left out if `dynamic` is False"),
    ({"dynamic": False, "initial_scale": 8, "max_scale": 16}, "`max_scale` must be left out if `dynamic` is False"),
    ({"dynamic": False, "initial_scale": 0}, "initial_scale"),
    ({"dynamic": False, "initial_scale": 8, "dynamic_growth_steps": 5}, "dynamic_growth_steps"),
    *[({"dynamic": value}, "dynamic") for value in ("dynamic", 1024, 1, None)],
    ({"skip_nonfinite": False}, "`skip_nonfinite` cannot be False with a dynamic scale"),
    ({"skip_nonfinite": 1}, '"skip_nonfinite".*must be a bool, but got: 1'),
    ({"loss_scale": 8}, "loss_scale"),
    *[({"loss_scale": value}, "`loss_scale` must be an instance of") for value in (lambda: 8.0, {}, SharedLossScale)],
    ({"loss_scale": FixedLossScaleManager(8.0), "skip_nonfinite": True}, "Leave out .*`skip_nonfinite`"),
    ({"loss_scale": SharedLossScale(), "skip_nonfinite": False}, "Leave out"),
    ({"loss_scale": SharedLossScale(), "growth_factor": 4.0}, "Leave out .*`growth_factor`"),
    ({"loss_scale": SharedLossScale(), "initial_scale": 8}, "Leave out"),
    *[({"diagnose": value}, '"diagnose" argument .* must be a bool') for value in ("exponents", 1)],
    ({"dynamic": False, "initial_scale": 1, "diagnose": True}, "`diagnose` cannot be True .*Pass skip_nonfinite=True"),
    ({"unknown": 8}, "unknown"),
    ({"loss_scale_manager": 8}, "loss_scale_manager"),
    ({"clipnorm": 1.0, "clipvalue": 1.0}, "clipnorm"),
]


@pytest.mark.parametrize(
    ("arguments", "name"), BAD_ARGUMENTS, ids=[re.sub(r" at 0x\w+", "", str(a))[:60] for a, _ in BAD_ARGUMENTS]
)
def test_bad_arguments_name_themselves_and_leave_the_inner_optimizer_free(arguments, name):
    for family in ALL_FAMILIES:
        inner = family.adam()
        before = dict(vars(inner))
        with pytest.raises((TypeError, ValueError), match=name):
            LossScaleOptimizer(inner, **arguments)
        assert vars(inner) == before
        LossScaleOptimizer(inner)


@all_families
@pytest.mark.parametrize(
    ("arguments", "keywords", "advice"),
    [
        (("dynamic",), {}, "A dynamic scale is the default: leave the argument out."),
        ((1024.0, 500), {}, "pass initial_scale=1024.0, dynamic_growth_steps=500."),
        ((1024.0,), {"dynamic_growth_steps": 500}, "pass initial_scale=1024.0, dynamic_growth_steps=500."),
        ((1024.0,), {}, "TensorFlow 2.3, pass dynamic=False, initial_scale=1024.0. For a dynamic scale"),
        ((None,), {}, "pass dynamic=False, initial_scale=1024."),
        ((True, 8.0, 5, 2.0), {}, "positional arguments"),
    ],
)
def test_positional_arguments_of_older_and_newer_wrappers_are_refused(family, arguments, keywords, advice):
    with pytest.raises(TypeError, match=re.escape(advice)):
        LossScaleOptimizer(family.sgd(), *arguments, **keywords)


@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f.name != "tf_keras"], ids=lambda family: family.name)
def test_a_keyword_that_no_optimizer_takes_is_refused_and_changes_nothing(family):  # tf_keras's optimizers take any
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    for keywords in ({"learning_rates": 0.5}, {"name": None, "clip": 1.0}):
        unknown = list(keywords)[-1]
        with pytest.raises(TypeError, match=rf"apply_gradients\(\) got an unexpected keyword argument '{unknown}'"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)], **keywords)
    with pytest.raises(TypeError, match="bogus"):
        optimizer.minimize(lambda: 1.0 * weight, var_list=[weight], bogus=1)
    assert weight.numpy() == 1.0
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert weight.numpy() != 1.0


def test_stateless_apply_says_that_keras_does_not_have_it_on_tensorflow():
    weight = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    with pytest.raises(ValueError, match=r"does not support `stateless_apply`.*Call `apply\(scaled_gradients, var"):
        optimizer.stateless_apply(optimizer.variables, [tf.constant(1.0)], [weight])
    assert float(weight) == 1.0


@pytest.mark.parametrize(("compiled", "family"), combinations(MODES, ALL_FAMILIES, usual=["function-keras3"]))
def test_an_inner_optimizer_can_be_wrapped_again_once_its_wrapper_is_gone(family, compiled):
    inner, weight = family.sgd(), tf.Variable(1.0)

    def trained():
        optimizer = LossScaleOptimizer(inner, initial_scale=8.0)

        def step():
            optimizer.minimize(lambda: weight * 1.0, [weight])

        (tf.function(step) if compiled else step)()
        return optimizer

    optimizer = trained()
    other = copy.copy(optimizer)
    for _ in range(2):  # the wrapper, then its copy
        with pytest.raises(ValueError, match=r"already wrapped .* delete the wrapper \(`del optimizer`\)"):
            trained()
        optimizer, other = other, None
    del optimizer
    assert float(trained().loss_scale) == 8.0
    assert weight.numpy() == 0.0


@families
def test_a_model_that_is_thrown_away_gives_its_inner_optimizer_back(family):
    inner = family.sgd()
    for _ in range(2):
        model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer(inner), "mse")
        model.build((None, 2))
        del model


@families
def test_a_class_is_a_loss_scale_optimizer_if_it_is_derived_from_one_whatever_its_name(family):
    class MyLossScaleOptimizer(type(family.sgd())):
        pass

    class Mine(LossScaleOptimizer):
        pass

    class Theirs(type(family.keras.mixed_precision.LossScaleOptimizer(family.sgd()))):
        pass

    assert not isinstance(MyLossScaleOptimizer(0.5), stable.LossScaleOptimizer)
    LossScaleOptimizer(MyLossScaleOptimizer(0.5))
    for wrapper in (Mine(family.sgd()), Theirs(family.sgd())):
        with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer"):
            LossScaleOptimizer(wrapper)
        assert isinstance(wrapper, stable.LossScaleOptimizer)


@all_families
def test_nested_and_double_wrapping(family):
    inner = family.sgd()
    first = LossScaleOptimizer(inner, initial_scale=8.0)
    with pytest.raises(TypeError, match=r"cannot wrap another LossScaleOptimizer.* a tf_lossscale\..*Use it as it is"):
        LossScaleOptimizer(first)
    with pytest.raises(ValueError, match="already wrapped by a LossScaleOptimizer"):
        LossScaleOptimizer(inner)
    weight = tf.Variable(1.0)
    first.apply_gradients([(tf.constant(1.0), weight)])
    assert weight.numpy() == 0.5
    for other in ALL_FAMILIES:
        if other is not family:
            with pytest.raises(TypeError, match=r"Call tf_lossscale\.LossScaleOptimizer"):
                type(first)(other.sgd())


def test_other_libraries_wrappers_are_refused_and_refuse_ours():
    for wrapper, optimizers in (
        (keras.optimizers.LossScaleOptimizer, keras.optimizers),
        (tf_keras.mixed_precision.LossScaleOptimizer, tf_keras.optimizers),
        (tf_keras.mixed_precision.LossScaleOptimizer, tf_keras.optimizers.legacy),
    ):
        theirs = wrapper(optimizers.SGD())
        with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer") as caught:
            LossScaleOptimizer(theirs)
        assert f"`inner_optimizer` is a {type(theirs).__module__}." in str(caught.value)
        assert "tf_lossscale.LossScaleOptimizer(SGD(...))" in str(caught.value)
        assert "tf_lossscale.wrap_in_compile()" in str(caught.value)
    # Keras 3's own asks nothing.
    for optimizers in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        with pytest.raises((TypeError, ValueError), match="LossScaleOptimizer"):
            tf_keras.mixed_precision.LossScaleOptimizer(LossScaleOptimizer(optimizers.SGD()))


ONES, NONES = [tf.ones([2]), tf.ones([3])], [None, None]


# Name -> (error, text, call of an optimizer with its two variables of shapes [2] and [3]).
BAD_CALLS = {
    "fewer gradients": (ValueError, "Each variable must have one gradient", lambda o, w: o.apply(ONES[:1], w)),
    "more gradients": (ValueError, "Each variable must have one gradient", lambda o, w: o.apply(ONES, w[:1])),
    "no gradients": (ValueError, "Each variable must have one gradient", lambda o, w: o.apply([], w)),
    "all None": (ValueError, "No gradients provided for any variable", lambda o, w: o.apply(NONES, w)),
    "pairs of None": (ValueError, "No gradients provided", lambda o, w: o.apply_gradients(zip(NONES, w))),
    "a triple": (ValueError, "pairs", lambda o, w: o.apply_gradients([(ONES[0], w[0], 1)])),
    "one pair, not a list": (ValueError, "pairs", lambda o, w: o.apply_gradients((ONES[0], w[0]))),
    "pairs in reverse": (TypeError, "is not a variable", lambda o, w: o.apply_gradients(zip(w, ONES))),
    "None": (TypeError, "None", lambda o, w: o.apply_gradients(None)),
    "a shape that does not fit": (
        ValueError,
        r"has shape \(2,\), but the variable has shape \(3,\)",
        lambda o, w: o.apply_gradients(zip(ONES, w[::-1])),
    ),
    "a shape that does not fit in apply": (ValueError, "shape", lambda o, w: o.apply(ONES, w[::-1])),
    "whole-number gradients": (
        TypeError,
        "must be a floating-point or complex tensor, but got dtype int32",
        lambda o, w: o.apply_gradients([(tf.constant([1, 2]), w[0])]),
    ),
    "unscaling whole numbers": (TypeError, "floating", lambda o, w: o.get_unscaled_gradients([tf.constant([1, 2])])),
    "a whole-number loss": (TypeError, "`loss` must be a floating-point tensor", lambda o, w: o.get_scaled_loss(3)),
    "a whole-number loss in scale_loss": (TypeError, "floating", lambda o, w: o.scale_loss(tf.constant(3))),
    "a string as loss": (TypeError, "floating", lambda o, w: o.get_scaled_loss("loss")),
}


def value_of(variable):
    return (variable.value if isinstance(variable, keras.Variable) else variable).numpy()


def state(optimizer, weights):
    inner = optimizer.inner_optimizer.variables
    variables = [*(inner() if callable(inner) else inner), *optimizer._loss_scale.variables, *weights]
    return [value_of(v) for v in [*variables, optimizer.skipped_steps, optimizer.last_step_skipped]]


@all_families
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_bad_calls_change_no_variable_and_not_what_the_next_call_means(family, compiled):
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0, 3.0])]
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=8.0)
    optimizer.apply_gradients([(g * np.inf, w) for g, w in zip(ONES, weights)])
    optimizer.apply_gradients(zip(ONES, weights))
    before = state(optimizer, weights)
    for name, (error, text, call) in BAD_CALLS.items():
        bad = lambda call=call: call(optimizer, weights) and None  # noqa: E731
        with pytest.raises(error, match=text):
            (tf.function(bad) if compiled else bad)()
        for a, b in zip(before, state(optimizer, weights)):
            np.testing.assert_array_equal(a, b, err_msg=name)


@all_families
def test_a_bad_call_after_scale_loss_leaves_the_gradients_scaled_ones(family):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    optimizer.scale_loss(tf.constant(1.0))
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply_gradients([(None, weight)])
    optimizer.apply_gradients([(tf.constant([8.0]), weight)])
    np.testing.assert_array_equal(weight, [0.5])


@with_keras_3
@keras_2_families
def test_variables_of_keras_3_are_refused_and_train_nothing(family):
    variable, optimizer = keras.Variable([1.0, 2.0], name="kernel"), LossScaleOptimizer(family.adam())
    optimizer.scale_loss(1.0)
    for step in (optimizer.apply, lambda *lists: optimizer.apply_gradients(zip(*lists))):
        with pytest.raises(TypeError, match="kernel is a variable of Keras 3, but Adam is an optimizer of tf_keras"):
            step([tf.constant([8.0, 8.0])], [variable])
    np.testing.assert_array_equal(variable, [1.0, 2.0])
    assert optimizer.iterations.numpy() == 0


@families
def test_weights_that_do_not_fit_change_none(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.adam())
    with pytest.raises(ValueError, match="Call build"):
        optimizer.apply([tf.constant([0.5, -1.0])])
    optimizer.apply_gradients([(tf.constant([0.5, -1.0]), weight)])
    before = optimizer.get_weights()
    of_scale = [variable.numpy() for variable in optimizer._loss_scale.variables]
    wrong_shape = [np.zeros(5) if np.ndim(w) else np.zeros_like(w) for w in before]
    for bad in ([np.zeros(3)], before[:-1], [*before, np.zeros(2), *of_scale], wrong_shape):
        with pytest.raises(ValueError, match=r"set_weights|shape"):
            optimizer.set_weights(bad)
    for a, b in zip(before, optimizer.get_weights()):
        np.testing.assert_array_equal(a, b)


@families
def test_a_sparse_index_out_of_range_in_a_function_leaves_scale_and_counter_and_the_next_step_counts(family):
    variables = [family.variable(tf.ones([4, 2])) for _ in range(3)]
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8, dynamic_growth_steps=5)

    @tf.function
    def step(index):
        sparse = tf.IndexedSlices(tf.ones([1, 2]), index, tf.constant([4, 2]))
        optimizer.apply_gradients(zip([tf.ones([4, 2]), sparse, tf.ones([4, 2])], variables))

    step(tf.constant([1]))
    before = variables[1].numpy()
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([9]))
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (8.0, 1)
    np.testing.assert_array_equal(variables[1].numpy(), before)
    step(tf.constant([1]))
    assert int(optimizer.dynamic_counter) == 2
    np.testing.assert_array_equal(variables[1].numpy()[1], before[1] - 0.5)
