"""Each trick alone, and all together, change no bit of a step; without core/fast the package works."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import numerics, strategies
from tf_lossscale.core import fast, replicas, scaling
from tf_lossscale.core.fast import packing
from tf_lossscale.core.state import DynamicLossScale
from tf_lossscale.core.step import Part, step

SETTINGS = hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
EDGES = [0.0, -0.0, 1.0, -3.0, 7.3, 1e-30, 3e38, -3e38, float("inf"), float("nan")]
MODES = ["eager", "function", "xla", "mirrored_2"]


@pytest.fixture(autouse=True)
def few_values_are_many(monkeypatch):
    """Gradients of two values are small, of five are not, of nine are large."""
    monkeypatch.setattr(packing, "_SMALL", 4)
    monkeypatch.setattr(packing, "_TOGETHER", 12)
    monkeypatch.setattr(packing, "_HELD", 8)


@st.composite
def gradients(draw):
    found = []
    # Most gradients are finite, or hardly any step would be applied.
    elements = st.sampled_from(draw(st.sampled_from([EDGES, EDGES[:6], EDGES[:6]])))
    for kind in draw(st.lists(st.sampled_from(["dense"] * 5 + ["sparse", "none"]), min_size=1, max_size=7)):
        dtype = draw(st.sampled_from(["float32", "float32", "float16", "float64"]))
        shape = (2, 2) if kind == "sparse" else draw(st.sampled_from([(2,), (5,), (9,)]))
        with np.errstate(over="ignore"):
            array = draw(hnp.arrays(np.float64, shape, elements=elements)).astype(dtype)
        found.append((kind, array))
    return found


class Outcome:
    """A step that assigns unscaled gradients to variables, taken in a mode."""

    def __init__(self, given, scale, mode):
        self.strategy = strategies.get("mirrored_2") if mode == "mirrored_2" else tf.distribute.get_strategy()
        with self.strategy.scope():
            self.variables = [tf.Variable(np.zeros_like(array)) for _, array in given]
            self.held = [tf.Variable(array) for _, array in given]
            self.loss_scale = DynamicLossScale(scale)
        self.kinds = [kind for kind, _ in given]
        wrap = {"function": tf.function, "xla": lambda f: tf.function(f, jit_compile=True)}.get(mode, lambda f: f)
        if mode == "mirrored_2":
            tf.function(lambda: self.strategy.run(self.take))()
        else:
            wrap(self.take)()

    def take(self):
        scaled = []
        for kind, held in zip(self.kinds, self.held):
            values = tf.convert_to_tensor(held)
            sparse = tf.IndexedSlices(values, tf.constant([1, 0]), tf.constant([2, 2]))
            scaled.append({"dense": values, "sparse": sparse, "none": None}[kind])
        unscaled = scaling.unscale(scaled, self.loss_scale())

        def apply(gradients):
            found = [tf.convert_to_tensor(g) if g is not None else None for g in gradients]
            return [v.assign(g) for v, g in zip(self.variables, found) if g is not None]

        step(self.loss_scale, Part(unscaled, replicas.sum_over_replicas, apply))

    def bits(self):
        values = [self.loss_scale.current_loss_scale, self.loss_scale.good_steps, *self.variables]
        copies = [self.strategy.experimental_local_results(v) for v in values]
        return [copy.numpy().tobytes() for each in copies for copy in each]


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@hypothesis.given(given=gradients(), scale=st.sampled_from([1.0, 8.0, 3.0, 2.0**15, 2.0**127]))
def test_a_step_has_the_same_bits_with_each_trick_and_without(mode, given, scale):
    hypothesis.assume(mode != "xla" or numerics.XLA_HAS_FLOAT16 or all(a.dtype != np.float16 for _, a in given))
    hypothesis.assume(mode != "xla" or all(np.all((a == 0) | (np.abs(a) > 1e-29)) for _, a in given))  # flushed
    with fast.without():
        expected = Outcome(given, scale, mode).bits()
    assert Outcome(given, scale, mode).bits() == expected


@pytest.mark.parametrize("trick", fast.TRICKS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_has_the_same_bits_without_one_trick(mode, trick):
    if mode == "xla" and not numerics.XLA_HAS_FLOAT16:
        pytest.skip("XLA compiles no float16 for this processor")
    shapes = [(2,), (2,), (2,), (5,), (9,), (9,)]
    arrays = [np.arange(1.0, 1 + shape[0], dtype=dtype) for shape in shapes for dtype in ("float32", "float16")]
    for bad in (False, True):
        arrays[3] = arrays[3] * np.float16("inf") if bad else arrays[3]
        given = [("dense", array) for array in arrays]
        expected = Outcome(given, 3.0, mode).bits()
        with fast.without(trick):
            assert Outcome(given, 3.0, mode).bits() == expected


def test_a_trick_is_off_in_its_block_only_and_unknown_ones_are_refused():
    with fast.without("stacks"):
        assert not fast.on("stacks")
        assert packing.positions([tf.ones([2])] * 2) == []
        with fast.without():
            assert not any(map(fast.on, fast.TRICKS))
        assert not fast.on("stacks")
        assert fast.on("sum first")
    assert all(map(fast.on, fast.TRICKS))
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
