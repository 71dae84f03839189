"""What happens when every step is skipped although the scale is at its floor."""

import json

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.families import ALL_FAMILIES, ALL_IDS, FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer

all_families = pytest.mark.parametrize("family", ALL_FAMILIES, ids=ALL_IDS)


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    return said


def made(family=ALL_FAMILIES[0], compiled=False, **kwargs):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=4.0, dynamic_growth_steps=1, **kwargs)
    weight = tf.Variable(0.0)

    def step(gradient):
        optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(gradient, weight)])

    function = tf.function(step) if compiled else step
    return optimizer, lambda gradient: function(tf.constant(gradient))


@all_families
def test_in_eager_mode_the_hundredth_skipped_step_warns_once_and_says_what_to_try(family, warnings):
    _, step = made(family)
    for _ in range(99):
        step(np.inf)
    assert not warnings
    step(np.nan)
    assert len(warnings) == 1
    assert "The last 100 steps were all skipped although the loss scale is at its floor of 1" in warnings[0]
    assert "overflow_report()" in warnings[0]
    assert "min_scale" in warnings[0]
    for _ in range(5):
        step(np.inf)
    assert len(warnings) == 1


def test_a_step_that_succeeds_ends_the_stall_and_the_next_one_is_said_again(warnings):
    _, step = made()
    for _ in range(100):
        step(np.inf)
    step(1.0)
    for _ in range(100):
        step(np.inf)
    assert len(warnings) == 2


def test_skipped_steps_above_the_floor_are_no_stall(warnings):
    _, step = made(min_scale=2.0**-126)
    for _ in range(110):
        step(np.inf)
    assert not warnings, "there is still room below"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_raise_raises_with_the_state_complete(compiled):
    optimizer, step = made(compiled=compiled, on_floor="raise")
    for _ in range(99):
        step(np.inf)
    with pytest.raises(FloatingPointError, match="at its floor of 1"):
        step(np.inf)
        assert compiled, "a compiled step asks nobody"
        float(optimizer.loss_scale)
    assert optimizer.state()["skipped_in_a_row"] == 100, "raised once: what happened can be looked at"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_function_is_called_with_the_optimizer_and_may_help(compiled):
    helped = []

    def help_it(optimizer):
        helped.append(optimizer)
        optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0})

    optimizer, step = made(compiled=compiled, on_floor=help_it)
    for _ in range(100):
        step(np.inf)
    assert float(optimizer.loss_scale) == 64.0
    assert helped == [optimizer]


@pytest.mark.parametrize("look", [lambda o: o.loss_scale, lambda o: o.state()], ids=["loss_scale", "state"])
def test_a_compiled_loop_is_noticed_when_the_scale_is_read(look, warnings):
    optimizer, step = made(compiled=True)
    for _ in range(300):
        step(np.inf)
    assert not warnings, "nothing in the step leaves the device"
    repr(optimizer)
    assert not warnings
    look(optimizer)
    look(optimizer)
    assert len(warnings) == 1
    assert "The last 300 steps" in warnings[0]


@pytest.mark.parametrize("family", FAMILIES[:2], ids=IDS[:2])
def test_a_fit_that_went_nowhere_says_so_at_its_end(family, warnings):
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(family.sgd(), initial_scale=4.0), "mse")
    model.fit(np.full((110, 2), np.nan), np.zeros((110, 1)), batch_size=1, verbose=0)
    assert len(warnings) == 1
    assert "The last 110 steps" in warnings[0]


def test_it_is_part_of_a_config_unless_it_is_a_function():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), on_floor="raise")
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config["on_floor"] == "raise"
    assert LossScaleOptimizer.from_config(config).get_config()["on_floor"] == "raise"
    for unsaid in ("warn", print):
        assert "on_floor" not in LossScaleOptimizer(tf.keras.optimizers.SGD(), on_floor=unsaid).get_config()


@pytest.mark.parametrize("value", ["stop", None, 1])
def test_other_values_are_refused_and_leave_the_inner_optimizer_free(value):
    inner = tf.keras.optimizers.SGD()
    with pytest.raises(ValueError, match="`on_floor` must be 'warn', 'raise' or a function"):
        LossScaleOptimizer(inner, on_floor=value)
    LossScaleOptimizer(inner)
