"""TensorFlow Probability's loops: the same numbers as without a scale, except where float16 loses them."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import tf_lossscale
from tests import families, numerics
from tests.cases import combinations

OPTIMIZERS = {
    **{family.name: family.adam for family in families.ALL_FAMILIES if family.name != "sonnet"},
    "VariationalSGD": lambda: tfp.optimizer.VariationalSGD(batch_size=1, total_num_examples=1, burnin=2),
}


def everything(quantities):
    return quantities.loss, quantities.gradients, quantities.has_converged


def trained(minimize, optimizer, **kwargs):
    """The trace, and where the variable got to, of a few steps on a loss that has one value for each parameter."""
    x = tf.Variable([0.0, 1.0])
    trace = minimize(lambda: (x - 5.0) ** 2, num_steps=6, optimizer=optimizer, trace_fn=everything, **kwargs)
    return [leaf.numpy() for leaf in tf.nest.flatten(trace)] + [x.numpy()]


def scaled(loss_fn, num_steps, optimizer, **kwargs):
    """`tfp.math.minimize`, as docs/recipes/probability.md calls it."""
    return tfp.math.minimize(optimizer.scale_inside(loss_fn), num_steps, optimizer, **kwargs)


@pytest.mark.parametrize("name", combinations(OPTIMIZERS, usual=["keras3", "VariationalSGD"]))
def test_in_float32_every_number_is_that_of_tensorflow_probability(name):
    make = OPTIMIZERS[name]
    expected = trained(tfp.math.minimize, make())
    for minimize in (scaled, tfp.math.minimize):
        found = trained(minimize, tf_lossscale.LossScaleOptimizer(make()))
        for a, b in zip(found, expected, strict=True):
            numerics.assert_close(a, b, 0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_gradient_too_small_for_float16_arrives(jit_compile):
    # Its square, the gradient, is below float16's smallest number, 2**-24. A variable, lest XLA squares it.
    tiny = tf.Variable(2.0**-14, trainable=False, dtype=tf.float16)

    def run(minimize, optimizer):
        x = tf.Variable(1.0)
        trace = minimize(
            lambda: tf.cast(x, tf.float16) * tiny * tiny + 1.0,
            num_steps=2,
            optimizer=optimizer,
            trace_fn=everything,
            jit_compile=jit_compile,
        )
        return trace, x.numpy().item()

    rate = 2.0**26
    (_, [vanished], _), x = run(tfp.math.minimize, tf.keras.optimizers.SGD(rate))
    assert (vanished.numpy().tolist(), x) == ([0.0, 0.0], 1.0)

    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(rate))
    (loss, [gradient], _), x = run(scaled, optimizer)
    assert gradient.numpy().tolist() == [2.0**-28, 2.0**-28]
    assert x == 0.5
    assert loss.dtype == tf.float16
    assert loss.numpy().tolist() == [1.0, 1.0]
    assert optimizer.dynamic_counter.numpy() == 2


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_that_overflows_is_skipped_and_traced(jit_compile):
    x = tf.Variable(2.0**62)  # the gradient is 2**63, and float32 ends at 2**128
    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), initial_scale=2.0**67)
    losses, [gradients], _ = scaled(
        lambda: x**2, num_steps=5, optimizer=optimizer, trace_fn=everything, jit_compile=jit_compile
    )
    assert np.isfinite(gradients.numpy()).tolist() == [False, False, False, True, True]
    assert losses.numpy().tolist() == [2.0**124] * 4 + [2.0**122]
    assert x.numpy() == 2.0**60
    assert optimizer.loss_scale.numpy() == 2.0**64
    assert optimizer.dynamic_counter.numpy() == 2
