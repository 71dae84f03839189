"""All orders of calls in functions, threads and eager mode: an update is right or raises; one way never raises."""

import concurrent.futures

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.cases import combinations, named
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import factors

SCALE = 1024.0
STEP = 0.125  # what an update subtracts: the gradient of every loss is 1


def in_another_thread(function):
    """Runs a function in a thread of its own; returns its result, raises its exception."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


class Program:
    """One optimizer, one weight, and all that a program may do with them."""

    def __init__(self, compiled):
        # The optimizers of earlier programs may be in reference cycles.
        factors._EVENTS.clear()
        dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.model = tf.keras.Sequential([tf.keras.Input((1,)), dense])
        self.weight = dense.kernel
        self.optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(STEP), initial_scale=SCALE)
        self.optimizer.build([self.weight])
        self.functions, self.compiled, self.compiled_model = {}, compiled, None

    def at(self, place, method, *args):
        """Calls a method in eager mode, in a thread, or as a tf.function, which may only be traced."""
        if place == "eager":
            return method(*args)
        if place == "thread":
            return in_another_thread(lambda: method(*args))
        if method.__name__ not in self.functions:
            self.functions[method.__name__] = tf.function(method, jit_compile=self.compiled)
        function = self.functions[method.__name__]
        if place == "trace":
            return function.get_concrete_function(*args)
        return in_another_thread(lambda: function(*args)) if place == "function in thread" else function(*args)

    def _gradient(self, scale):
        with tf.GradientTape() as tape:
            loss = scale(tf.reduce_sum(self.weight.value))
        return tape.gradient(loss, self.weight.value)

    # Gradients; `get_scaled_loss` alone is not the whole of a way.

    def scaled(self):
        return self._gradient(self.optimizer.scale_loss)

    def scaled_for_tensorflow_2(self):
        return self._gradient(self.optimizer.get_scaled_loss)

    def unscale(self, gradient):
        return self.optimizer.get_unscaled_gradients([gradient])[0]

    def unscaled(self):
        return self.unscale(self.scaled_for_tensorflow_2())

    def unscaled_after_scale_loss(self):
        return self.unscale(self.scaled())

    # Updates.

    def apply_gradients(self, gradient):
        self.optimizer.apply_gradients([(gradient, self.weight)])

    def apply(self, gradient):
        self.optimizer.apply([gradient], [self.weight])

    # Whole steps.

    def keras_3_step(self):
        self.apply_gradients(self.scaled())

    def apply_step(self):
        self.apply(self.scaled())

    def tensorflow_2_step(self):
        self.apply_gradients(self.unscaled() * 1.0)

    def minimize(self):
        self.optimizer.minimize(lambda: tf.reduce_sum(self.weight.value), [self.weight])

    def fit(self, eagerly):
        if self.compiled_model != eagerly:
            compiled = self.compiled and not eagerly
            self.model.compile(self.optimizer, lambda _, output: output, run_eagerly=eagerly, jit_compile=compiled)
            self.compiled_model = eagerly
        self.model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)


KERAS_3 = ["scaled"]
TENSORFLOW_2 = ["unscaled", "unscaled in two functions"]
PLACES = st.sampled_from(["eager", "thread", "function", "function in thread"])
STEPS = st.sampled_from(["keras_3_step", "apply_step", "tensorflow_2_step", "minimize", "fit", "eager fit"])
SEPARATE = st.tuples(
    st.just("separate"),
    st.sampled_from([*KERAS_3, *TENSORFLOW_2, "unscaled_after_scale_loss"]),
    PLACES,  # where the gradients are made
    PLACES,  # where they are unscaled, if that is elsewhere
    st.booleans(),  # whether they are changed in between, as by clipping
    st.sampled_from(["apply_gradients", "apply"]),
    PLACES,  # where they are applied
)
ASIDE = st.tuples(  # a gradient that nobody uses, or a function that is only traced
    st.just("aside"),
    st.sampled_from(["scaled", "unscaled", "unscaled_after_scale_loss", "apply_gradients"]),
    st.sampled_from(["thread", "function", "trace"]),
)
WHOLE = st.tuples(st.just("whole"), STEPS, PLACES)


def take(program, what, *how):
    """Takes one part of a program; returns how many steps the weight should have moved."""
    if what == "whole":
        name, place = how
        if name.endswith("fit"):
            program.fit(name == "eager fit")
        else:
            program.at(place, getattr(program, name))
        return 1
    if what == "aside":
        name, place = how
        spec = [tf.TensorSpec([1, 1])] if name == "apply_gradients" else []
        program.at("trace" if spec else place, getattr(program, name), *spec)
        return 0
    kind, made, unscaled, changed, update, applied = how
    if kind == "unscaled in two functions":
        gradient = program.at(made, program.scaled_for_tensorflow_2)
        gradient = program.at(unscaled, program.unscale, gradient)
    else:
        gradient = program.at(made, getattr(program, kind))
    if update == "apply" and kind != "scaled":
        update = "apply_gradients"  # `apply` is documented to take scaled gradients
    program.at(applied, getattr(program, update), gradient * 1.0 if changed else gradient)
    return 1


def run(parts, compiled):
    """Runs a program; returns the number of its parts that raised."""
    program, raised = Program(compiled), 0
    for part in parts:
        before = program.weight.numpy().item()
        try:
            steps = take(program, *part)
        except RuntimeError as error:
            assert "one of two ways" in str(error)
            steps, raised = 0, raised + 1
        moved = (before - program.weight.numpy().item()) / STEP
        assert moved == steps, f"{part} moved the weight by {moved} steps, and not by {steps}"
    return raised


PARTS = st.lists(st.one_of(SEPARATE, ASIDE, WHOLE), min_size=2, max_size=6)


def check(test, examples, *drawn):
    """Runs a test of Hypothesis with a number of examples, always the same."""
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, print_blob=False)
    settings(hypothesis.given(*drawn)(test))()


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_an_update_is_right_or_raises_and_then_changes_nothing(examples):
    def is_right_or_raises(parts, compiled):
        run(parts, compiled)

    check(is_right_or_raises, examples, PARTS, st.booleans())


@pytest.mark.parametrize(
    ("kinds", "examples"),
    combinations(
        named({"keras_3": KERAS_3, "tensorflow_2": TENSORFLOW_2}),
        [6, pytest.param(30, marks=pytest.mark.exhaustive)],
        usual=["tensorflow_2-6"],
    ),
)
def test_a_program_that_follows_one_way_never_raises(kinds, examples):
    names = (
        {"keras_3_step", "apply_step", "fit", "eager fit"} if kinds == KERAS_3 else {"tensorflow_2_step", "minimize"}
    )

    def never_raises(parts):
        assert run([part for part in parts if part[1] in (*kinds, *names)], compiled=False) == 0

    check(never_raises, examples, st.lists(st.one_of(SEPARATE, WHOLE), min_size=2, max_size=6))
