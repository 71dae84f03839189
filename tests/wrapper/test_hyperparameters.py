"""Hyperparameters on the wrapper: read, set and listed as those of the inner optimizer."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

from tests.families import FAMILIES, families
from tf_lossscale import LossScaleOptimizer

LEGACY = FAMILIES[2]

# What the original of each optimizer passed to `_set_hyper`, with a value that no optimizer has by default.
NAMES = {
    "Adadelta": ["rho"],
    "Adam": ["beta_1", "beta_2"],
    "Adamax": ["beta_1", "beta_2"],
    "Nadam": ["beta_1", "beta_2"],
    "RMSprop": ["rho", "momentum"],
    "SGD": ["momentum"],
}
ROWS = [(family, name) for family in FAMILIES for name in NAMES]


def schedules_of(family):
    return family.keras.optimizers.schedules


@pytest.mark.parametrize(("family", "name"), ROWS, ids=[f"{f.name}-{name}" for f, name in ROWS])
def test_a_hyperparameter_is_read_set_and_listed_through_the_wrapper(family, name):
    arguments = {"momentum": 0.5} if "momentum" in NAMES[name] else {}
    optimizer = LossScaleOptimizer(getattr(family.optimizers, name)(**arguments))
    for hyper in [*NAMES[name], "learning_rate", "lr"]:
        assert hyper in dir(optimizer)
        assert hasattr(optimizer, hyper)
        setattr(optimizer, hyper, 0.625)
        assert float(getattr(optimizer, hyper)) == 0.625
        inner_name = "learning_rate" if hyper == "lr" else hyper
        assert float(getattr(optimizer.inner_optimizer, inner_name)) == 0.625
    assert not hasattr(optimizer, "no_such_thing")


@families
def test_iterations_and_learning_rate_are_the_inner_optimizers(family):
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.iterations = 5
    assert int(optimizer.inner_optimizer.iterations) == 5
    optimizer.inner_optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.25


@families
def test_what_is_no_hyperparameter_stays_on_its_side(family):
    optimizer = LossScaleOptimizer(family.adam())
    with pytest.raises(AttributeError, match=r"no attribute 'epsilon'; .* inner Adam, write inner_optimizer\.epsilon"):
        _ = optimizer.epsilon
    with pytest.raises(AttributeError, match=r"no attribute 'get_scale'$"):
        _ = optimizer.get_scale
    assert "epsilon" not in dir(optimizer)
    optimizer.epsilon = 1e-4
    assert optimizer.epsilon == 1e-4
    assert optimizer.inner_optimizer.epsilon == 1e-7
    optimizer.anything = 3
    assert optimizer.anything == 3
    assert not hasattr(optimizer.inner_optimizer, "anything")


@families
@pytest.mark.parametrize("hyper", ["lr", "learning_rate", "beta_1"])
def test_what_is_set_on_the_wrapper_changes_the_next_step(family, hyper):
    steps = []
    for value in (None, 0.0):
        weight = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(family.adam())
        optimizer.apply_gradients([(tf.constant([1.0]), weight)])
        if value is not None:
            setattr(optimizer, hyper, value)
        before = float(weight[0])
        optimizer.apply_gradients([(tf.constant([-0.5]), weight)])
        steps.append(float(weight[0]) - before)
    assert steps[0] != steps[1]
    if hyper != "beta_1":
        assert steps[1] == 0.0


@families
def test_a_custom_optimizer_names_its_own_hyperparameters(family):
    class Mine(family.optimizers.SGD):
        hyperparameter_names = ("temperature",)

        def __init__(self):
            super().__init__(0.1)
            if hasattr(self, "_set_hyper"):
                self._set_hyper("temperature", 1.0)
            else:
                self.temperature = 1.0

    optimizer = LossScaleOptimizer(Mine())
    optimizer.temperature = 3.0
    assert float(optimizer.inner_optimizer.temperature) == 3.0
    assert "temperature" in dir(optimizer)


@families
def test_a_learning_rate_that_is_set_reaches_a_traced_function_and_others_warn(family, monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.beta_1 = 0.8

    @tf.function
    def function():
        optimizer.minimize(lambda: 1.0 * weight, [weight])

    function()
    assert not seen
    optimizer.learning_rate = 0.0
    before = weight.numpy()
    function()
    np.testing.assert_array_equal(weight, before)
    assert not seen, "a variable reaches the traced function"
    optimizer.beta_1 = 0.7
    if isinstance(optimizer.inner_optimizer, tf_keras.optimizers.legacy.Optimizer):
        assert not seen, "a legacy hyperparameter is a variable"
    else:
        assert "LossScaleOptimizer.beta_1 was set after a tf.function" in seen[-1]
        assert "Make the tf.function again" in seen[-1]


def test_a_learning_rate_of_tensorflow_1_that_is_set_after_a_function_was_traced_warns(monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    optimizer.learning_rate = 0.25
    tf.function(lambda: optimizer.minimize(lambda: 1.0 * weight, [weight]))()
    assert weight.numpy() == 0.75
    assert not seen
    optimizer.learning_rate = 0.0
    assert "LossScaleOptimizer.learning_rate was set after a tf.function" in seen[-1]
    assert optimizer.inner_optimizer._learning_rate == 0.0


@families
def test_a_schedule_is_followed_and_answers_decayed_lr(family):
    schedule = schedules_of(family).PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25])
    weight = tf.Variable(8.0)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(schedule))
    assert float(optimizer._decayed_lr("float32")) == float(optimizer._decayed_lr(tf.float64)) == 1.0
    rates = []
    for gradient in (1.0, np.inf, 1.0):
        before = float(weight)
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
        rates.append(before - float(weight))
    # A skipped step counts, so the schedule goes on.
    assert rates == [1.0, 0.0, 0.25]
    assert float(optimizer._decayed_lr("float32")) == 0.25


@families
def test_the_underscore_names_of_old_code_work(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer._set_hyper("beta_1", 0.75)
    assert float(optimizer._get_hyper("beta_1")) == float(optimizer._get_hyper("beta_1", tf.float32)) == 0.75
    assert float(optimizer.inner_optimizer.beta_1) == 0.75
    optimizer._create_all_weights([weight])
    assert len(optimizer.weights) >= 3
    with pytest.raises((AttributeError, KeyError), match="bogus"):
        optimizer._get_hyper("bogus")


def test_get_hyper_of_a_legacy_schedule_is_the_schedule():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    optimizer = LossScaleOptimizer(LEGACY.optimizers.SGD(schedule))
    assert optimizer._get_hyper("learning_rate") is schedule
    assert optimizer.learning_rate is schedule


def test_legacy_slots_are_the_inner_optimizers():
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(LEGACY.adam())
    optimizer.apply_gradients([(tf.constant([0.5, 0.5]), weight)])
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(weight, "m") is optimizer.inner_optimizer.get_slot(weight, "m")
    np.testing.assert_array_equal(optimizer.add_slot(weight, "new", "ones"), [1.0, 1.0])
    assert optimizer.inner_optimizer.get_slot(weight, "new") is optimizer.get_slot(weight, "new")
    with pytest.raises(KeyError):
        optimizer.get_slot(weight, "bogus")


@families
def test_clips_are_delegated_and_act_on_unscaled_gradients(family):
    optimizer = LossScaleOptimizer(family.sgd(clipnorm=1.0), initial_scale=1024.0)
    assert (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm) == (1.0, None, None)
    weight = tf.Variable([1.0, 2.0])
    optimizer.minimize(lambda: tf.reduce_sum(weight * [0.3, 0.4]), [weight])
    np.testing.assert_allclose(weight, [1.0 - 0.15, 2.0 - 0.2], rtol=1e-6)


READ_ONLY = sorted(
    name
    for name, value in inspect.getmembers(LossScaleOptimizer, inspect.isdatadescriptor)
    if isinstance(value, property) and value.fset is None and not name.startswith("_")
)


@families
def test_a_hyperparameter_with_the_name_of_a_read_only_property_is_not_set_through_the_wrapper(family):
    class Mine(family.optimizers.SGD):
        hyperparameter_names = ("momentum", *READ_ONLY)

    assert {"loss_scale", "inner_optimizer", "dynamic_counter"} <= set(READ_ONLY)
    optimizer = LossScaleOptimizer(Mine())
    for name in READ_ONLY:
        with pytest.raises(AttributeError, match=r"no setter|cannot be set as an attribute"):
            setattr(optimizer, name, 2.0)
        assert name not in vars(optimizer.inner_optimizer)


def test_an_old_hyperparameter_named_loss_scale_is_the_inner_optimizers_alone():
    class Mine(tf_keras.optimizers.legacy.SGD):
        def __init__(self):
            super().__init__()
            self._set_hyper("loss_scale", 123.0)

    for wrap in (tf_keras.mixed_precision.LossScaleOptimizer, LossScaleOptimizer):
        optimizer = wrap(Mine())
        with pytest.raises(AttributeError, match=r"no setter|cannot be set as an attribute"):
            optimizer.loss_scale = 2.0
        assert float(optimizer.loss_scale) == 2.0**15
        assert float(optimizer.inner_optimizer.loss_scale) == 123


@families
def test_an_attribute_of_a_users_own_wrapper_class_comes_before_a_hyperparameter(family):
    class Mine(LossScaleOptimizer):
        beta_1 = "mine"

    optimizer = Mine(family.adam())
    optimizer.beta_1, optimizer.beta_2 = "still mine", 0.5
    assert optimizer.beta_1 == "still mine"
    inner = optimizer.inner_optimizer
    assert [float(inner.beta_1), float(inner.beta_2)] == pytest.approx([0.9, 0.5])


@families
def test_an_attribute_that_is_set_on_the_wrapper_alone_is_not_set_in_silence(family, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    optimizer = LossScaleOptimizer(family.adam())
    before = optimizer.inner_optimizer.epsilon
    optimizer.learning_rate, optimizer.beta_1, optimizer.remark = 0.5, 0.5, "mine"
    assert not said
    optimizer.epsilon = 0.5
    assert "the inner Adam keeps its value. To change the inner optimizer, set optimizer.inner_optimizer.eps" in said[0]
    assert optimizer.inner_optimizer.epsilon == before
