"""TensorFlow Probability's loops: the same numbers as without a scale, except where float16 loses them."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import tf_lossscale
from tests import families, numerics
from tests.families import tf_keras

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


def assert_same(one, other, tolerance=0):
    for a, b in zip(one, other, strict=True):
        numerics.assert_close(a, b, tolerance)


def scaled(loss_fn, num_steps, optimizer, **kwargs):
    """`tfp.math.minimize`, as docs/recipes/probability.md calls it."""
    return tfp.math.minimize(optimizer.scale_inside(loss_fn), num_steps, optimizer, **kwargs)


def scaled_posterior(target_log_prob_fn, surrogate_posterior, optimizer, num_steps, **kwargs):
    """`tfp.vi.fit_surrogate_posterior`, as docs/recipes/probability.md writes it."""
    of_minimize = {name: kwargs.pop(name) for name in ("seed", "jit_compile") if name in kwargs}

    def loss_fn(seed=None):
        return tfp.vi.monte_carlo_variational_loss(target_log_prob_fn, surrogate_posterior, seed=seed, **kwargs)

    return scaled(loss_fn, num_steps, optimizer, **of_minimize)


@pytest.mark.table("keras3", every=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_float32_every_number_is_that_of_tensorflow_probability(name):
    make = OPTIMIZERS[name]
    expected = trained(tfp.math.minimize, make())
    assert_same(trained(scaled, tf_lossscale.LossScaleOptimizer(make())), expected)


@pytest.mark.table("keras3", every=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_wrapper_can_be_given_to_tensorflow_probability_itself(name):
    make = OPTIMIZERS[name]
    expected = trained(tfp.math.minimize, make())
    assert_same(trained(tfp.math.minimize, tf_lossscale.LossScaleOptimizer(make())), expected)


@pytest.mark.wide("repeats the loops in XLA and in a graph")
@pytest.mark.parametrize("name", ["keras3", pytest.param("VariationalSGD", marks=pytest.mark.exhaustive)])
def test_compiled_the_numbers_are_the_same(name):
    make = OPTIMIZERS[name]
    expected = trained(tfp.math.minimize, make(), jit_compile=True)
    # XLA may fuse the two programs differently: TensorFlow 2.15 and 2.16 are 1.3e-6 apart after six steps.
    for minimize in (tfp.math.minimize, scaled):
        assert_same(trained(minimize, tf_lossscale.LossScaleOptimizer(make()), jit_compile=True), expected, 3e-6)


def test_optimizers_of_sonnet_which_tensorflow_probability_does_not_know():
    sgd = families.ALL_FAMILIES[-1].sgd()
    losses, gradients, _, x = trained(scaled, tf_lossscale.LossScaleOptimizer(sgd))
    assert losses[:2].tolist() == [[25.0, 16.0], [0.0, 0.0]]
    assert gradients[0].tolist() == [-10.0, -8.0]
    assert x.tolist() == [5.0, 5.0]


@pytest.mark.wide("repeats the loops in XLA and in a graph")
@pytest.mark.parametrize("minimize", [tfp.math.minimize, scaled], ids=["theirs", "ours"])
def test_langevin_dynamics_in_a_legacy_graph_draw_the_same_noise(minimize):
    def run(minimize, wrap):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.set_random_seed(3)
            x = tf.compat.v1.get_variable("x", initializer=[0.0, 1.0], use_resource=True)
            inner = tfp.optimizer.StochasticGradientLangevinDynamics(0.01, burnin=1, data_size=100)
            trace = minimize(lambda: (x - 5.0) ** 2, 5, wrap(inner), trace_fn=everything)
            session.run(tf.compat.v1.global_variables_initializer())
            return [*tf.nest.flatten(session.run(trace)), session.run(x)]

    expected = run(tfp.math.minimize, lambda inner: inner)
    assert_same(run(minimize, tf_lossscale.LossScaleOptimizer), expected)


# What float16 loses. ----------------------------------------------------------------------------------------------


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


def test_a_float16_loss_that_is_large_is_not_multiplied_by_the_scale():
    x = tf.Variable(60000.0)
    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0))
    losses = scaled(lambda: tf.cast(x, tf.float16), num_steps=3, optimizer=optimizer)
    assert losses.numpy().tolist() == [60000.0, 60000.0, 60000.0]
    assert x.numpy() == 59997.0
    assert optimizer.loss_scale.numpy() == 2**15


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


# TensorFlow Probability's arguments. --------------------------------------------------------------------------------


def test_the_convergence_criterion_sees_unscaled_numbers_and_stops_at_the_same_step():
    def run(minimize, wrap):
        x = tf.Variable([0.0, 3.0])
        criterion = tfp.optimizer.convergence_criteria.LossNotDecreasing(atol=0.01, min_num_steps=4)
        return minimize(
            lambda: (x - 5.0) ** 2,
            num_steps=80,
            optimizer=wrap(tf.keras.optimizers.SGD(0.2)),
            convergence_criterion=criterion,
            trace_fn=lambda q: (*everything(q), q.convergence_criterion_state.average_decrease_in_loss),
            return_full_length_trace=False,
            batch_convergence_reduce_fn=tf.reduce_any,
        )

    expected = tf.nest.flatten(run(tfp.math.minimize, lambda inner: inner))
    assert 4 < expected[0].shape[0] < 80
    assert_same(tf.nest.flatten(run(scaled, tf_lossscale.LossScaleOptimizer)), expected)


def test_only_the_named_variables_are_trained_and_seeds_reach_the_loss():
    def run(minimize, wrap):
        x, y = tf.Variable(1.0), tf.Variable(1.0)

        def loss(seed=None):
            return (x - tf.random.stateless_normal([], seed)) ** 2 * y

        optimizer = wrap(tf.keras.optimizers.SGD(0.1))
        return minimize(loss, 4, optimizer, trainable_variables=[x], seed=(5, 6)), x.numpy(), y.numpy()

    expected = run(tfp.math.minimize, lambda inner: inner)
    assert expected[2] == 1.0
    assert_same(run(scaled, tf_lossscale.LossScaleOptimizer), expected)


def test_sparse_gradients_and_tf_keras_models():
    def run(minimize, wrap):
        tf_keras.utils.set_random_seed(0)
        model = tf_keras.Sequential([tf_keras.layers.Embedding(5, 3), tf_keras.layers.Dense(1)])
        model.build((None, 1))
        losses = minimize(
            lambda: tf.reduce_mean(model(tf.constant([[1], [3]])) ** 2), 3, wrap(tf_keras.optimizers.SGD(0.5))
        )
        return [losses, *model.get_weights()]

    expected = run(tfp.math.minimize, lambda inner: inner)
    assert_same(run(scaled, tf_lossscale.LossScaleOptimizer), expected, 1e-6)


def test_a_loss_of_integers_is_refused():
    x = tf.Variable(1.0)
    with pytest.raises(TypeError, match="floating"):
        scaled(lambda: tf.cast(x, tf.int32), 2, tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD()))


# Variational inference. ---------------------------------------------------------------------------------------------

VARIANTS = {
    "as it is": {},
    "compiled": {"jit_compile": True},
    "importance weighted": {"importance_sample_size": 3, "sample_size": 2},
    "forward divergence": {"discrepancy_fn": tfp.vi.kl_forward},
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_posterior_is_fitted_to_the_same_numbers(variant):
    def run(fit, wrap):
        d = tfp.distributions
        target = d.JointDistributionSequential([d.Normal(1.0, 0.5), lambda a: d.Normal(a, 2.0)])
        scale = tfp.util.TransformedVariable(1.0, tfp.bijectors.Softplus())
        loc = tf.Variable(0.0)
        posterior = d.JointDistributionSequential([d.Normal(loc, scale), d.Normal(tf.Variable(0.0), 1.0)])
        losses = fit(
            lambda *z: target.log_prob(z),
            posterior,
            optimizer=wrap(tf_keras.optimizers.Adam(0.1)),
            num_steps=5,
            seed=(7, 8),
            **VARIANTS[variant],
        )
        return losses.numpy(), loc.numpy(), scale.numpy()

    expected = run(tfp.vi.fit_surrogate_posterior, lambda inner: inner)
    assert expected[1] != 0.0
    assert_same(run(scaled_posterior, tf_lossscale.LossScaleOptimizer), expected, 1e-6)
