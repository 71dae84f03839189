"""`skip_nonfinite`: steps whose gradients are not finite are skipped, also where the loss is not scaled."""

import numpy as np
import pytest
import tensorflow as tf

from tests.families import all_families, families
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.amp import FixedLossScaleManager

ONLY_SKIP = {"dynamic": False, "initial_scale": 1, "skip_nonfinite": True}
modes = pytest.mark.parametrize("mode", ["eager", "function", "compiled", "eager-jit", "function-jit"])


def stepping(optimizer, weight, mode):
    def step(gradient):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient]), [weight]))

    if mode.startswith("eager"):
        return step
    return tf.function(step, jit_compile=mode == "compiled")


@pytest.mark.table(
    "function-jit-keras3", "eager-jit-tf_keras", "compiled-sonnet", "eager-jit-tf1", "function-tf_keras_legacy", every=1
)
@all_families
@modes
def test_a_step_that_is_not_finite_is_skipped_and_the_scale_stays(family, mode):
    optimizer = LossScaleOptimizer(family.adam(), jit_compile=mode.endswith("jit"), **ONLY_SKIP)
    optimizer.get_scaled_loss(0.0)
    weight = tf.Variable([1.0, 2.0])
    step = stepping(optimizer, weight, mode)
    for bad in (np.nan, np.inf, -np.inf):
        step(tf.constant([1.0, 0.5]))
        assert not optimizer.last_step_skipped
        before = [v.numpy() for v in optimizer.weights if "iter" not in v.name] + [weight.numpy()]
        step(tf.constant([1.0, bad]))
        after = [v.numpy() for v in optimizer.weights if "iter" not in v.name] + [weight.numpy()]
        for one, other in zip(before, after):
            np.testing.assert_array_equal(one, other)
        assert optimizer.last_step_skipped
    assert int(optimizer.skipped_steps) == 3
    assert float(optimizer.loss_scale) == 1.0


@pytest.mark.table(
    "function-bfloat16-keras3",
    "eager-float32-tf1",
    "eager-float32-tf_keras",
    "function-float32-tf_keras_legacy",
    "function-bfloat16-sonnet",
    every=1,
)
@all_families
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_finite_steps_are_bit_for_bit_those_of_the_bare_optimizer(family, mode, dtype):
    weights = [tf.Variable([1.0, 2.0]) for _ in range(2)]
    bare, optimizer = family.adam(), LossScaleOptimizer(family.adam(), **ONLY_SKIP)
    optimizer.get_scaled_loss(0.0)
    wrapped = stepping(optimizer, weights[1], mode)
    alone = lambda gradient: family.apply(bare, [gradient], [weights[0]])  # noqa: E731
    alone = alone if mode == "eager" else tf.function(alone)
    for seed in range(5):
        values = np.random.default_rng(seed).normal(size=2)
        gradient = tf.cast(tf.cast(tf.constant(values), dtype), tf.float32)
        alone(gradient)
        wrapped(gradient)
        np.testing.assert_array_equal(*weights)


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


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"skip_nonfinite": False}, ValueError, "`skip_nonfinite` cannot be False with a dynamic scale"),
        ({"skip_nonfinite": 1}, TypeError, '"skip_nonfinite".*must be a bool, but got: 1'),
        ({"dynamic": False, "skip_nonfinite": True}, ValueError, '"initial_scale" must be specified'),
        (
            {"loss_scale": FixedLossScaleManager(8.0), "skip_nonfinite": True},
            ValueError,
            "Leave out .*`skip_nonfinite`",
        ),
        ({"loss_scale": SharedLossScale(), "skip_nonfinite": False}, ValueError, "Leave out"),
        ({"loss_scale": SharedLossScale(), "growth_factor": 4.0}, ValueError, "Leave out .*`growth_factor`"),
        ({"dynamic": False, "initial_scale": 1, "diagnose": True}, ValueError, "Pass skip_nonfinite=True"),
    ],
)
def test_what_contradicts_is_refused_and_leaves_the_inner_optimizer_free(arguments, error, text):
    inner = tf.keras.optimizers.SGD()
    with pytest.raises(error, match=text):
        LossScaleOptimizer(inner, **arguments)
    LossScaleOptimizer(inner)


@families
@pytest.mark.parametrize("shape", [(), (3,), (200, 100)], ids=str)
def test_in_a_function_that_xla_compiles_an_overflow_of_a_fixed_scale_is_skipped(family, shape):
    optimizer = LossScaleOptimizer(family.sgd(), dynamic=False, initial_scale=1024.0, skip_nonfinite=True)
    weight = tf.Variable(tf.zeros(shape))
    optimizer.build([weight])

    @tf.function(jit_compile=True)
    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(factor * tf.reduce_sum(weight))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight]))

    step(tf.constant(1e37))
    assert int(optimizer.skipped_steps) == 1
    assert not np.any(weight)
    step(tf.constant(1.0))
    assert np.all(weight.numpy() == -0.5)
