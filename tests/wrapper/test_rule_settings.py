"""How the scale moves can be changed between steps; whether a fixed scale skips steps that are not finite."""

import numpy as np
import pytest
import tensorflow as tf

from tests.families import all_families, families
from tf_lossscale import LossScaleOptimizer, SharedLossScale, legacy

RULES = {
    "dynamic_growth_steps": 1,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "hysteresis": 3,
    "min_scale": 16.0,
    "max_scale": 64.0,
}


def taking(optimizer):
    weight = tf.Variable(0.0)

    def step(gradient):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient]), [weight]))

    return step


def scales(optimizer, step, outcomes):
    """The scale after each step; True is a finite one."""
    optimizer.get_scaled_loss(0.0)
    found = []
    for finite in outcomes:
        step(tf.constant(1.0 if finite else np.inf))
        found.append(float(optimizer.loss_scale))
    return found


@all_families
def test_an_eager_step_follows_the_rule_that_was_set_before_it(family):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=32.0, hysteresis=2)
    step = taking(optimizer)
    assert scales(optimizer, step, [True, False]) == [32.0, 32.0]
    for name, value in RULES.items():
        optimizer.scaler.change_rules(**{name: value})
        assert getattr(optimizer.scaler, name) == value
    fresh = LossScaleOptimizer(family.sgd(), initial_scale=32.0, **RULES)
    outcomes = [True, True, False, False, False, False, False, False]
    assert scales(optimizer, step, outcomes) == scales(fresh, taking(fresh), outcomes) == [64.0] * 4 + [16.0] * 4


@families
def test_a_traced_function_keeps_the_old_rule_and_a_warning_says_so(family, warnings):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    optimizer.scaler.change_rules(dynamic_growth_steps=1)
    step = taking(optimizer)
    traced = tf.function(step)
    assert scales(optimizer, traced, [True]) == [16.0]
    assert not warnings
    optimizer.scaler.change_rules(growth_factor=4.0)
    assert "the traced function keeps the old growth_factor." in warnings[0]
    assert scales(optimizer, traced, [True]) == [32.0]
    assert scales(optimizer, tf.function(step), [True]) == [128.0]


@families
def test_an_upper_bound_lowers_the_scale_at_once_and_the_config_can_be_read_again(family):
    optimizer = LossScaleOptimizer(family.sgd())
    optimizer.scaler.change_rules(max_scale=1024.0)
    assert float(optimizer.loss_scale) == 1024.0
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert (again.initial_scale, again.scaler.max_scale) == (1024.0, 1024.0)
    optimizer.scaler.change_rules(max_scale=None)
    assert optimizer.scaler.max_scale is None


@families
def test_a_lower_bound_raises_the_scale_at_once_and_other_rules_leave_it(family):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=0.5)
    optimizer.scaler.change_rules(growth_factor=4.0)
    assert float(optimizer.loss_scale) == 0.5
    optimizer.scaler.change_rules(min_scale=64.0)
    assert (float(optimizer.loss_scale), optimizer.initial_scale) == (64.0, 64.0)
    assert scales(optimizer, taking(optimizer), [True, False]) == [64.0, 64.0]
    optimizer.scaler.change_rules(min_scale=1.0)
    assert float(optimizer.loss_scale) == 64.0


@pytest.mark.parametrize(
    ("arguments", "name", "value", "error", "text"),
    [
        ({}, "growth_factor", 0.5, ValueError, "`growth_factor` must be above 1"),
        ({}, "min_scale", "1", TypeError, "`min_scale` must be a number"),
        ({"max_scale": 2.0**16}, "min_scale", 2.0**17, ValueError, "must not be above `max_scale`"),
        ({}, "hysteresis", 2, ValueError, "`hysteresis` must stay 1 .* Make a new loss scale"),
        ({"hysteresis": 2}, "hysteresis", 1, ValueError, "`hysteresis` must stay at least 2"),
        ({"dynamic": False, "initial_scale": 8}, "max_scale", 8.0, AttributeError, "FixedLossScale"),
        ({"loss_scale": legacy.DynamicLossScale(8)}, "growth_factor", 4.0, ValueError, "its attributes"),
    ],
)
def test_a_value_that_cannot_be_set_says_why_and_changes_nothing(arguments, name, value, error, text):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), **arguments)
    before = [getattr(optimizer.scaler, rule, None) for rule in RULES]
    with pytest.raises(error, match=text):
        optimizer.scaler.change_rules(**{name: value})
    assert [getattr(optimizer.scaler, rule, None) for rule in RULES] == before


def test_nothing_is_set_while_a_function_is_traced():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(RuntimeError, match="while a graph is being built"):
        tf.function(lambda: optimizer.scaler.change_rules(max_scale=8.0))()
    assert optimizer.scaler.max_scale is None


def test_optimizers_that_share_a_scale_share_its_rule():
    shared = SharedLossScale(8.0)
    first, second = (LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=shared) for _ in range(2))
    first.scaler.change_rules(growth_factor=4.0)
    assert second.scaler.growth_factor == shared._rules.growth_factor == 4.0


@pytest.mark.parametrize("name", RULES)
def test_an_attribute_is_not_set_as_in_the_originals_and_the_error_says_how(name):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(AttributeError, match=rf"Call optimizer\.scaler\.change_rules\({name}=7\)"):
        setattr(optimizer, name, 7)
    with pytest.raises(AttributeError, match=rf"Call change_rules\({name}=7\)"):
        setattr(optimizer.scaler, name, 7)


@pytest.mark.parametrize("rules", [{}, {"growth": 2.0}])
def test_other_names_are_refused(rules):
    with pytest.raises(TypeError, match=r"change_rules\(\) takes dynamic_growth_steps, growth_factor"):
        LossScaleOptimizer(tf.keras.optimizers.SGD()).scaler.change_rules(**rules)


@all_families
def test_a_fixed_scale_skips_nothing_unless_it_is_told_to_and_a_dynamic_one_always(family):
    for kwargs, skips in [
        ({}, True),
        ({"skip_nonfinite": True}, True),
        ({"dynamic": False, "initial_scale": 8}, False),
        ({"dynamic": False, "initial_scale": 8, "skip_nonfinite": False}, False),
        ({"dynamic": False, "initial_scale": 8, "skip_nonfinite": True}, True),
    ]:
        weight = tf.Variable(1.0)
        LossScaleOptimizer(family.sgd(), **kwargs).minimize(lambda weight=weight: weight * np.inf, [weight])
        assert bool(weight.numpy() == 1.0) is skips, kwargs


@pytest.mark.parametrize("value", [1e-38, 1e-45])
@pytest.mark.parametrize("others", [{}, {"dynamic": False}])
def test_a_bound_or_fixed_scale_that_kernels_treat_as_zero_is_refused(others, value):
    options = {**others, "initial_scale" if others else "min_scale": value}
    with pytest.raises(ValueError, match=r"_scale` must be at least 1.17549e-38"):
        LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), **options)


def test_an_initial_scale_that_kernels_treat_as_zero_is_left_in_the_first_step():
    optimizer, weight = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=1e-40), tf.Variable(1.0)
    for _ in range(3):
        optimizer.minimize(lambda: weight * 0.5, [weight])
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps), weight.numpy()) == (1.0, 1, 0.5)
