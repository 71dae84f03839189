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


def written_for(old):
    """What the codemod makes of a function with one old expression in it."""
    new = migrate(f"import tensorflow as tf\nmake = lambda inner: {old}\n".encode()).source.decode()
    assert "legacy" not in new, new
    names = {}
    exec(new, names)
    return names["make"]


@pytest.mark.parametrize("scale", ["'dynamic'", "128", "2. ** 6", "'dynamic' if True else 'dynamic'"])
def test_an_experimental_wrapper(scale):
    make = written_for(f"tf.keras.mixed_precision.experimental.LossScaleOptimizer(inner, {scale})")
    old = tf_lossscale.legacy.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), eval(scale))
    np.testing.assert_array_equal(keras_run(make(tf.keras.optimizers.SGD(0.1))), keras_run(old))
