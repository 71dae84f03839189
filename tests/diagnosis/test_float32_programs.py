"""A wrapper with a fixed scale of 1 counts the gradients of a float32 program, and changes none of its steps."""

import numpy as np
import pytest
import tensorflow as tf

from tests.families import all_families, families
from tf_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.wide("the diagnosis changes no step in each loop")


def counting(optimizer):
    return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1, diagnose="exponents", diagnose_every=1)


@all_families
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_steps_of_a_loop_are_the_same_bit_for_bit(family, mode):
    values = []
    for wrap in (lambda optimizer: optimizer, counting):
        optimizer, weight = wrap(family.adam()), tf.Variable([1.0, -3.0], name="weight")

        def step(gradient, optimizer=optimizer, weight=weight):
            if hasattr(optimizer, "apply_gradients"):
                optimizer.apply_gradients([(gradient, weight)])
            else:
                optimizer.apply([gradient], [weight])

        take = step if mode == "eager" else tf.function(step)
        for i in range(5):
            take(tf.constant([2.0**-30 * (i + 1), 0.3]))
        values.append(weight.numpy())
    np.testing.assert_array_equal(*values)
    total = optimizer.precision_report().total
    assert total.vanished == 0.5, "float16 would lose the first value"


@families
def test_fit_is_the_same_bit_for_bit(family):
    keras, weights = family.keras, []
    for wrap in (lambda optimizer: optimizer, counting):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.compile(wrap(family.adam()), "mse", **({"jit_compile": False} if hasattr(model, "jit_compile") else {}))
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        model.fit(x, x.sum(axis=1), batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.precision_report().step == 16
