"""Each trick alone, and all together, change no bit of a step; without core/fast the package works."""

import contextlib
import functools
import inspect
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import numerics, strategies
from tf_lossscale.core import fast, finite, replicas, scaling, variables
from tf_lossscale.core import step as step_lib
from tf_lossscale.core.fast import packing
from tf_lossscale.core.state import DynamicLossScale
from tf_lossscale.core.step import Update, take_step

SETTINGS = hypothesis.settings(max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow])
EDGES = [0.0, -0.0, 1.0, -3.0, 7.3, 1e-20, 3e38, -3e38, float("inf"), float("nan")]
#: The tricks that change anything in each mode.
MODES = {
    "eager": ["stacks", "sum first"],
    "function": ["stacks", "late unscaling", "one at a time", "one call", "sum first"],
    "xla": ["late unscaling", "loop", "product", "sum first", "one check"],
    "mirrored_2": ["stacks", "stacked sums", "sum first"],
}
KINDS = [
    *[("dense", (2,), "float32")] * 3,
    *[("dense", (2,), "float16")] * 2,
    *[("dense", (5,), "float32")] * 2,
    *[("dense", (9,), "float32")] * 2,
    ("dense", (9,), "float64"),
    ("dense", (9,), "float16"),
    ("sparse", (2, 2), "float32"),
    ("none", (2,), "float32"),
]


class Assignment(Update):
    """Assigns unscaled gradients to variables."""

    def __init__(self, scaled, scale, variables):
        self.scaled, self.scale, self.variables = scaled, scale, variables

    def unscaled_gradients(self):
        return scaling.unscale(self.scaled, self.scale)

    def apply(self, gradients):
        return [v.assign(tf.convert_to_tensor(g)) for v, g in zip(self.variables, gradients) if g is not None]


class Step:
    """Assigns unscaled gradients to variables, in a mode; traced and taken with some tricks only."""

    def __init__(self, mode, without=()):
        self.without = (lambda: fast.without(*without)) if without else contextlib.nullcontext
        self.strategy = strategies.get("mirrored_2") if mode == "mirrored_2" else tf.distribute.get_strategy()
        # For some processors XLA compiles no float16.
        self.has = [mode != "xla" or numerics.XLA_HAS_FLOAT16 or dtype != "float16" for _, _, dtype in KINDS]
        self.kinds = list(itertools.compress(KINDS, self.has))
        with self.strategy.scope():
            self.variables = [tf.Variable(np.zeros(shape, dtype)) for _, shape, dtype in self.kinds]
            self.held = [tf.Variable(np.zeros(shape, dtype)) for _, shape, dtype in self.kinds]
            self.loss_scale = DynamicLossScale()
        if mode == "mirrored_2":
            self.run = tf.function(lambda: self.strategy.run(self.take))
        else:
            self.run = self.take if mode == "eager" else tf.function(self.take, jit_compile=mode == "xla")
        with limits(), self.without():
            self.run()

    def take(self):
        scaled = []
        for (kind, _, _), held in zip(self.kinds, self.held):
            values = tf.convert_to_tensor(held)
            sparse = tf.IndexedSlices(values, tf.constant([1, 0]), tf.constant([2, 2]))
            scaled.append({"dense": values, "sparse": sparse, "none": None}[kind])
        take_step(self.loss_scale, Assignment(scaled, self.loss_scale(), self.variables))

    def bits_after(self, arrays, scale):
        """The bits of all that a step can change."""
        self.loss_scale.current_loss_scale.assign(scale)
        self.loss_scale.good_steps.assign(1)
        for variable, held, array in zip(self.variables, self.held, itertools.compress(arrays, self.has)):
            variable.assign(tf.zeros_like(variable))
            held.assign(array.astype(held.dtype.as_numpy_dtype))
        with limits(), self.without():
            self.run()
        values = [self.loss_scale.current_loss_scale, self.loss_scale.good_steps, *self.variables]
        return [copy.numpy().tobytes() for each in values for copy in self.strategy.experimental_local_results(each)]


@contextlib.contextmanager
def limits():
    """Gradients of two values are small, of five are not, of nine are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SMALL", 4)
        patch.setattr(packing, "_TOGETHER", 12)
        patch.setattr(packing, "_HELD", 8)
        yield


@functools.cache
def made(mode, without=()):
    return Step(mode, without)


@st.composite
def arrays(draw):
    # Most gradients are finite, or hardly any step would be applied.
    usual = draw(st.lists(st.sampled_from(EDGES[:6]), min_size=9, max_size=9))
    odd = draw(st.dictionaries(st.integers(0, len(KINDS) - 1), st.sampled_from(EDGES), max_size=2))
    found = [np.resize(usual[i % 9 :] + usual, shape) for i, (_, shape, _) in enumerate(KINDS)]
    for i, value in odd.items():
        found[i].flat[-1] = value
    return found


def with_values(value, dtype, everywhere=True):
    """A value in all gradients of a dtype, or once in the last large one of them; zeros elsewhere."""
    found = [np.full(shape, value if everywhere and own == dtype else 0.0) for _, shape, own in KINDS]
    last = max(i for i, (kind, shape, own) in enumerate(KINDS) if (kind, shape, own) == ("dense", (9,), dtype))
    found[last].flat[0] = value
    return found


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@hypothesis.given(given=arrays(), scale=st.sampled_from([1.0, 8.0, 3.0, 2.0**15, 2.0**100]))
@hypothesis.example(given=with_values(3e38, "float32", everywhere=False), scale=0.5)  # overflows when it is divided
@hypothesis.example(given=with_values(3e38, "float32"), scale=2.0**15)  # the sum overflows, no value does
@hypothesis.example(given=with_values(60000.0, "float16"), scale=2.0**15)
def test_a_step_has_the_same_bits_with_all_tricks_and_with_none(mode, given, scale):
    with np.errstate(over="ignore"):
        expected = made(mode, tuple(fast.TRICKS)).bits_after(given, scale)
        assert made(mode).bits_after(given, scale) == expected


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("mode", "trick"), [(mode, trick) for mode, tricks in MODES.items() for trick in tricks])
def test_a_step_has_the_same_bits_without_one_trick(mode, trick):
    for odd in (1.0, float("nan")):
        arrays = [np.arange(1.0, 1 + np.prod(shape)).reshape(shape) for _, shape, _ in KINDS]
        arrays[-1][0] = arrays[5][0] = odd
        assert made(mode, (trick,)).bits_after(arrays, 3.0) == made(mode).bits_after(arrays, 3.0)


def test_every_trick_changes_something_somewhere():
    assert {trick for tricks in MODES.values() for trick in tricks} == set(fast.TRICKS)


def test_a_trick_is_off_in_its_block_only_and_unknown_ones_are_refused():
    with fast.without("stacks"):
        assert "stacks" not in fast.in_use
        assert packing.positions([tf.ones([2])] * 2) == []
        with fast.without():
            assert fast.in_use == set()
        assert "stacks" not in fast.in_use
        assert "sum first" in fast.in_use
    assert fast.in_use == set(fast.TRICKS)
    with pytest.raises(KeyError, match="magic"), fast.without("magic"):
        pass


TRAINING = """
import json, tensorflow as tf, tf_lossscale
optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(0.5), initial_scale=8)
weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
optimizer.build(weights)
@tf.function
def step(factor):
    with tf.GradientTape() as tape:
        loss = factor * tf.add_n([tf.reduce_sum(weight**2) for weight in weights])
        scaled = optimizer.get_scaled_loss(loss)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, weights))
    optimizer.apply_gradients(zip(gradients, weights))
for factor in (1.0, float("inf"), 2.0):
    step(tf.constant(factor))
print(json.dumps([*(weight.numpy().tolist() for weight in weights), optimizer.loss_scale.numpy().item()]))
"""


@pytest.mark.slow
def test_without_core_fast_the_package_trains_to_the_same_numbers(tmp_path):
    def trained(folder):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", TRAINING]
        done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    package = pathlib.Path(tf_lossscale.__file__).parent
    shutil.copytree(package, tmp_path / "tf_lossscale", ignore=shutil.ignore_patterns("fast", "__pycache__"))
    assert not (tmp_path / "tf_lossscale" / "core" / "fast").exists()
    *_, scale = weights_and_scale = trained(tmp_path)
    assert scale == 4.0
    assert weights_and_scale == trained(package.parent)


def test_the_comment_above_each_plain_function_names_the_file_of_its_twin():
    modules = (finite, replicas, scaling, step_lib, variables)
    functions = {each for module in modules for each in vars(module).values() if hasattr(each, "plain")}
    assert len(functions) == 7
    for function in functions:
        file = function.twin.__module__.removeprefix("tf_lossscale.").replace(".", "/") + ".py"
        assert file in (inspect.getcomments(function.plain) or ""), f"{function.__qualname__}: {file}"
