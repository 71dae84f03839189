"""Hyperparameters on the wrapper: read, set and listed as those of the inner optimizer."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tests.families import families
from tf_lossscale import LossScaleOptimizer


@families
def test_what_is_no_hyperparameter_stays_on_its_side_and_setting_it_there_warns(family, warnings):
    optimizer = LossScaleOptimizer(family.adam())
    with pytest.raises(AttributeError, match=r"no attribute 'epsilon'; .* inner Adam, write inner_optimizer\.epsilon"):
        _ = optimizer.epsilon
    with pytest.raises(AttributeError, match=r"no attribute 'get_scale'$"):
        _ = optimizer.get_scale
    assert "epsilon" not in dir(optimizer)
    optimizer.learning_rate, optimizer.beta_1, optimizer.anything = 0.25, 0.5, 3
    assert (float(optimizer.inner_optimizer.learning_rate), float(optimizer.inner_optimizer.beta_1)) == (0.25, 0.5)
    optimizer.lr = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == float(optimizer.learning_rate) == 0.5
    assert optimizer.anything == 3 and not hasattr(optimizer.inner_optimizer, "anything")
    assert not warnings
    optimizer.epsilon = 1e-4
    (said,) = warnings
    assert "the inner Adam keeps its value. To change the inner optimizer, set optimizer.inner_optimizer.eps" in said
    assert (optimizer.epsilon, optimizer.inner_optimizer.epsilon) == (1e-4, 1e-7)


@families
def test_a_learning_rate_that_is_set_reaches_a_traced_function_and_others_warn(family, warnings):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.beta_1 = 0.8

    @tf.function
    def function():
        optimizer.minimize(lambda: 1.0 * weight, [weight])

    function()
    optimizer.learning_rate = 0.0
    before = weight.numpy()
    function()
    np.testing.assert_array_equal(weight, before)
    assert not warnings, "a variable reaches the traced function"
    optimizer.beta_1 = 0.7
    if family.name == "tf_keras_legacy":
        assert not warnings, "a legacy hyperparameter is a variable"
    else:
        assert "LossScaleOptimizer.beta_1 was set after a tf.function" in warnings[-1]
        assert "Make the tf.function again" in warnings[-1]


@families
def test_the_underscore_names_of_old_code_work(family):
    weight = tf.Variable([1.0, 2.0])
    schedule = family.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25])
    optimizer = LossScaleOptimizer(family.optimizers.Adam(schedule))
    optimizer._set_hyper("beta_1", 0.75)
    assert float(optimizer._get_hyper("beta_1")) == float(optimizer._get_hyper("beta_1", tf.float64)) == 0.75
    assert optimizer._get_hyper("beta_1", tf.float64).dtype == optimizer._decayed_lr("float64").dtype == tf.float64
    assert float(optimizer.inner_optimizer.beta_1) == 0.75
    optimizer._create_all_weights([weight])
    assert len(optimizer.weights) >= 3
    assert float(optimizer._decayed_lr("float32")) == 1.0
    for _ in range(3):
        optimizer.apply_gradients([(tf.ones(2), weight)])
    assert float(optimizer._decayed_lr("float32")) == 0.25
    with pytest.raises((AttributeError, KeyError), match="bogus"):
        optimizer._get_hyper("bogus")


READ_ONLY = sorted(
    name
    for name, value in inspect.getmembers(LossScaleOptimizer, inspect.isdatadescriptor)
    if isinstance(value, property) and value.fset is None and not name.startswith("_")
)


@families
def test_a_class_names_its_own_hyperparameters_but_none_that_is_a_read_only_property_of_the_wrapper(family):
    class Mine(family.optimizers.SGD):
        hyperparameter_names = ("momentum", "temperature", *READ_ONLY)

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
    assert {"loss_scale", "inner_optimizer", "dynamic_counter"} <= set(READ_ONLY)
    for name in READ_ONLY:
        with pytest.raises(AttributeError, match=r"no setter|cannot be set as an attribute"):
            setattr(optimizer, name, 2.0)
        assert name not in vars(optimizer.inner_optimizer)


@families
def test_an_attribute_of_a_users_own_wrapper_class_comes_before_a_hyperparameter(family):
    class Mine(LossScaleOptimizer):
        beta_1 = "mine"

    optimizer = Mine(family.adam())
    optimizer.beta_1, optimizer.beta_2 = "still mine", 0.5
    assert optimizer.beta_1 == "still mine"
    inner = optimizer.inner_optimizer
    assert [float(inner.beta_1), float(inner.beta_2)] == pytest.approx([0.9, 0.5])
