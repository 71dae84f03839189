"""The rule, against the text that states it."""

import math
import textwrap

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale.core.rules import Rules, ScaleState

SETTINGS = hypothesis.settings(max_examples=150)


@st.composite
def rules(draw):
    min_scale = draw(st.sampled_from([2.0**-20, 0.5, 1.0, 8.0]))
    max_scale = draw(st.sampled_from([None, 8.0, 2.0**16, 2.0**127]))
    return Rules(
        growth_steps=draw(st.integers(1, 4)),
        growth_factor=draw(st.sampled_from([1.001, 1.5, 2.0, 4.0, 1e30])),
        backoff_factor=draw(st.sampled_from([1e-30, 0.25, 0.5, 0.999])),
        hysteresis=draw(st.integers(1, 3)),
        min_scale=min_scale,
        max_scale=max_scale,
        finite_step_resets=draw(st.booleans()),
    )


class Model:
    """Executes the algorithm that the class docstring states, on NumPy's float32."""

    _, _, after = Rules.__doc__.partition("A test executes these lines::\n\n")
    algorithm = compile(textwrap.dedent(after.partition("\n\n")[0]), "the docstring of Rules", "exec")

    def __init__(self, rules, scale):
        self.rules, self.scale, self.good, self.bad = rules, np.float32(scale), 0, 0

    def step(self, finite):
        def float32(number):
            return number if number is None else np.float32(number)

        skipped = []
        names = dict(
            {name: float32(value) for name, value in vars(self.rules).items()},
            scale=np.float32(self.scale),
            good=self.good,
            bad=self.bad,
            every_gradient_is_finite=finite,
            isfinite=np.isfinite,
            skip_the_step=lambda: skipped.append(True),
        )
        with np.errstate(over="ignore", under="ignore"):
            exec(self.algorithm, names)
        assert bool(skipped) is not finite
        self.scale, self.good, self.bad = names["scale"], names["good"], names["bad"]
        return self.scale, self.good, self.bad


def is_same(scale, expected):
    # The last bit of a product with a factor that is no power of two may be rounded otherwise.
    return scale == expected or abs(scale - expected) <= 2e-7 * expected


ZERO = tf.constant(0, tf.int64)


@SETTINGS
@hypothesis.given(rules(), st.sampled_from([1.0, 8.0, 2.0**15, 2.0**126]), st.lists(st.booleans(), max_size=12))
def test_random_outcomes_follow_the_algorithm_as_it_is_stated(rules, scale, outcomes):
    model, state = Model(rules, scale), ScaleState(tf.constant(scale), ZERO, ZERO)
    for finite in outcomes:
        state = rules.next(tf.constant(finite), state)
        expected = model.step(finite)
        assert is_same(float(state.scale), float(expected[0]))
        assert (int(state.good), int(state.bad)) == expected[1:]
        model.scale = np.float32(state.scale)


@SETTINGS
@hypothesis.given(rules(), st.lists(st.booleans(), max_size=40))
def test_the_scale_stays_finite_positive_and_between_its_bounds(rules, outcomes):
    low, high = rules.min_scale, rules.max_scale or math.inf
    hypothesis.assume(low <= high)
    state = ScaleState(tf.constant(low), ZERO, ZERO)
    for finite in outcomes:
        state = rules.next(tf.constant(finite), state)
        assert low <= float(state.scale) <= high
        assert math.isfinite(float(state.scale))
        assert 0 <= int(state.good) < rules.growth_steps
        assert 0 <= int(state.bad) < rules.hysteresis


@pytest.mark.parametrize(
    ("rules", "before", "outcomes", "expected"),
    [
        (Rules(growth_steps=2), (8.0, 0, 0), "g", (8.0, 1, 0)),
        (Rules(growth_steps=2), (8.0, 0, 0), "gg", (16.0, 0, 0)),
        (Rules(growth_steps=2), (8.0, 0, 0), "gb", (4.0, 0, 0)),
        (Rules(), (1.5, 0, 0), "b", (1.0, 0, 0)),
        # A scale below `min_scale` rises to it, as it did in every version of TensorFlow.
        (Rules(), (0.25, 0, 0), "b", (1.0, 0, 0)),
        (Rules(growth_steps=1), (0.25, 0, 0), "g", (0.5, 0, 0)),
        (Rules(growth_steps=1), (2.0**127, 0, 0), "g", (2.0**127, 0, 0)),
        (Rules(growth_steps=1, max_scale=12.0), (8.0, 0, 0), "g", (12.0, 0, 0)),
        # A scale above `max_scale`, from a checkpoint, comes down to it.
        (Rules(growth_steps=1, max_scale=12.0), (64.0, 0, 0), "g", (12.0, 0, 0)),
        (Rules(hysteresis=2), (8.0, 0, 0), "bb", (4.0, 0, 0)),
        (Rules(hysteresis=2), (8.0, 0, 0), "bgb", (8.0, 0, 1)),
        (Rules(hysteresis=2, finite_step_resets=False), (8.0, 0, 0), "bgb", (4.0, 0, 0)),
        # A count above its limit, which was lowered in training, moves the scale.
        (Rules(growth_steps=3), (8.0, 5, 0), "g", (16.0, 0, 0)),
        (Rules(hysteresis=3), (8.0, 0, 5), "b", (4.0, 0, 0)),
    ],
)
def test_a_table_of_sequences(rules, before, outcomes, expected):
    state = ScaleState(*before)
    for outcome in outcomes:
        state = rules.next(outcome == "g", state)
    assert (float(state.scale), int(state.good), int(state.bad)) == expected


def test_the_defaults_are_those_of_tensorflow():
    assert Rules() == Rules(2000, 2.0, 0.5, 1, 1.0, None, True)


def test_the_factors_nearest_to_one_and_equal_bounds_are_taken():
    rules = Rules(growth_factor=1 + 2.0**-23, backoff_factor=1 - 2.0**-24, min_scale=8.0, max_scale=8.0)
    assert rules.checked() == rules


def test_a_tf_function_and_xla_do_as_eager_mode_does():
    rules = Rules(growth_steps=2, growth_factor=3.0, backoff_factor=0.3, hysteresis=2)
    for options in ({}, {"jit_compile": True}):
        step = tf.function(lambda finite, *counts: rules.next(finite, ScaleState(*counts)), **options)
        eager = compiled = ScaleState(tf.constant(8.0), ZERO, ZERO)
        for finite in (True, True, False, True, False, False, True, True, False):
            eager = rules.next(tf.constant(finite), eager)
            compiled = step(tf.constant(finite), *compiled)
            assert [x.numpy() for x in eager] == [x.numpy() for x in compiled]


def test_the_step_is_a_few_scalar_operations_without_a_branch():
    counts = ScaleState(*(tf.TensorSpec([], dtype) for dtype in (tf.float32, tf.int64, tf.int64)))
    step = tf.function(lambda finite, *counts: Rules().next(finite, ScaleState(*counts)))
    operations = step.get_concrete_function(tf.TensorSpec([], tf.bool), *counts).graph.get_operations()
    assert not {"If", "StatelessIf", "While", "Switch"} & {o.type for o in operations}
    assert all(output.shape.rank == 0 for o in operations for output in o.outputs)


def test_checked_rules_are_plain_numbers():
    numbers = Rules(np.int64(3), tf.constant(2.0), np.float32(0.5), 2.0, np.float64(1), tf.constant(8.0)).checked()
    assert numbers == Rules(3, 2.0, 0.5, 2, 1.0, 8.0)
    types = [type(getattr(numbers, n)) for n in ("growth_steps", "growth_factor", "hysteresis", "max_scale")]
    assert types == [int, float, int, float]
