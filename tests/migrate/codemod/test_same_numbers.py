"""What the codemod writes gives the numbers of what it replaces: both sides of a case are run and compared."""

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale.migrate.codemod.migrate_file import migrate

OK, BAD = 1.0, np.nan
STEPS = [OK, OK, BAD, OK, OK, OK, BAD, OK, BAD, BAD, OK, OK, OK, OK, OK, BAD, OK]


def keras_run(wrapper):
    weight = tf.Variable(1.0)
    trace = []
    for factor in STEPS:
        gradients = wrapper.get_unscaled_gradients([wrapper.loss_scale * factor])
        wrapper.get_scaled_loss(1.0)
        wrapper.apply_gradients(zip(gradients, [weight]))
        trace.append((weight.numpy().item(), float(wrapper.loss_scale)))
    return trace


def v1_run(make):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=1.0, use_resource=True)
        factor = tf.compat.v1.placeholder(tf.float32, [])
        count = tf.compat.v1.train.get_or_create_global_step()
        wrapper = make(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        step = wrapper.apply_gradients(wrapper.compute_gradients(weight * factor, [weight]), global_step=count)
        scale = wrapper._loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        trace = []
        for value in STEPS:
            session.run(step, {factor: value})
            trace.append(session.run((weight, count, scale)))
    return trace


def written_for(old):
    """What the codemod makes of a function with one old expression in it."""
    new = migrate(f"import tensorflow as tf\nmake = lambda inner: {old}\n".encode()).source.decode()
    assert "legacy" not in new, new
    names = {}
    exec(new, names)
    return names["make"]


@pytest.mark.parametrize(
    "scale",
    [
        "'dynamic'",
        "128",
        "tf.train.experimental.FixedLossScale(8.)",
        "tf.train.experimental.DynamicLossScale(64, 3)",
        "tf.train.experimental.DynamicLossScale(64., increment_period=3, multiplier=4.)",
        "tf.train.experimental.DynamicLossScale(2 ** 6, 2, 1.5)",
    ],
)
def test_an_experimental_wrapper(scale):
    make = written_for(f"tf.keras.mixed_precision.experimental.LossScaleOptimizer(inner, {scale})")
    as_it_was = scale.replace("tf.train.experimental", "tf_lossscale.legacy")
    old = tf_lossscale.legacy.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), eval(as_it_was))
    # A multiplier that is no power of two: dividing by it and multiplying by its reciprocal may differ in the last bit.
    np.testing.assert_allclose(keras_run(make(tf.keras.optimizers.SGD(0.1))), keras_run(old), rtol=1e-6)


@pytest.mark.parametrize("manager", ["64., 3, 1, 2, 0.5", "100, 2, 1, incr_ratio=3., decr_ratio=0.3"])
def test_a_contrib_wrapper(manager):
    exponential = f"tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager({manager})"
    make = written_for(f"tf.contrib.mixed_precision.LossScaleOptimizer(inner, {exponential})")

    def old(inner):
        made = eval(f"tf_lossscale.legacy.ExponentialUpdateLossScaleManager({manager})")
        return tf_lossscale.legacy.contrib.LossScaleOptimizer(inner, made)

    np.testing.assert_allclose(v1_run(make), v1_run(old), rtol=1e-6)
