"""`skip_nonfinite`: steps whose gradients are not finite are skipped, also where the loss is not scaled."""

import numpy as np
import pytest
import tensorflow as tf

from tests.families import all_families
from tf_lossscale import LossScaleOptimizer

ONLY_SKIP = {"dynamic": False, "initial_scale": 1, "skip_nonfinite": True}
modes = pytest.mark.parametrize("mode", ["eager", "function", "compiled", "eager-jit", "function-jit"])


@pytest.mark.table(
    "function-jit-keras3", "eager-jit-tf_keras", "compiled-sonnet", "eager-jit-tf1", "function-tf_keras_legacy", every=1
)
@all_families
@modes
def test_a_step_that_is_not_finite_is_skipped_and_the_scale_stays(family, mode):
    optimizer = LossScaleOptimizer(family.adam(), jit_compile=mode.endswith("jit"), **ONLY_SKIP)
    weight = tf.Variable([1.0, 2.0])

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    step = step if mode.startswith("eager") else tf.function(step, jit_compile=mode == "compiled")
    for bad in (np.nan, np.inf, -np.inf):
        step(tf.constant([1.0, 0.5]))
        assert not optimizer.last_step_skipped
        before = [v.numpy() for v in optimizer.weights if "iter" not in v.name] + [weight.numpy()]
        step(tf.constant([1.0, bad]))
        after = [v.numpy() for v in optimizer.weights if "iter" not in v.name] + [weight.numpy()]
        for one, other in zip(before, after):
            np.testing.assert_array_equal(one, other)
        assert optimizer.last_step_skipped
    assert (int(optimizer.skipped_steps), float(optimizer.loss_scale)) == (3, 1.0)


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
