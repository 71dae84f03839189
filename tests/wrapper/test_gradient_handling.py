"""What loops do with gradients between unscaling and applying: the results do not depend on the scale."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import loops, numerics, strategies
from tests.families import families, tf_keras
from tf_lossscale import LossScaleOptimizer

ON_READ, SUM = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def loss_of(weight, x):
    return tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, weight)) ** 2)


def start():
    return tf.Variable([0.5, -1.0, 2.0])


@pytest.mark.table("mirrored_2-keras3", "none-tf_keras_legacy", "none-tf_keras", every=3)
@families
@pytest.mark.parametrize("name", ["none", "mirrored_2"])
def test_micro_batches_by_hand_are_one_big_batch_and_a_nan_spoils_its_own_cycle_only(family, name):
    strategy = strategies.get(name) or tf.distribute.get_strategy()
    with strategy.scope():
        weight = start()
        total = tf.Variable(tf.zeros(3), trainable=False, synchronization=ON_READ, aggregation=SUM)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=1024.0)

    def micro(x):
        total.assign_add(
            loops.unscaled_gradients(
                optimizer, lambda: loss_of(weight, x) / 4 / strategy.num_replicas_in_sync, [weight]
            )[0]
        )

    def apply():
        optimizer.apply_gradients([(total.read_value(), weight)])
        total.assign(tf.zeros(3))

    step, end = (tf.function(lambda *args, f=f: strategy.run(f, args=args)) for f in (micro, apply))
    before = weight.numpy()
    for i, part in enumerate(np.split(X, 4)):
        step(tf.constant(part * np.nan if i == 1 else part))
    end()
    np.testing.assert_array_equal(weight.numpy(), before)
    for part in np.split(X, 4):
        step(tf.constant(part))
    end()
    expected = start()
    with tf.GradientTape() as tape:
        loss = loss_of(expected, X)
    expected.assign_sub(0.5 * tape.gradient(loss, expected))
    numerics.assert_close(weight, expected, 1e-5, start())
    assert float(optimizer.loss_scale) == 512.0


def test_keras_3s_own_accumulation_drops_a_micro_step_that_overflows():
    weight, plain = start(), start()
    inner = tf.keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
    optimizer = LossScaleOptimizer(inner)
    parts = np.split(X, 4)

    @tf.function
    def step(x):
        loops.step(optimizer, lambda: loss_of(weight, x), [weight])

    for part in (parts[0], parts[1] * np.inf, *parts[1:]):
        step(tf.constant(part))
    with tf.GradientTape() as tape:
        loss = loss_of(plain, X)
    plain.assign_sub(0.5 * tape.gradient(loss, plain))
    numerics.assert_close(weight, plain, 1e-5, start())
    assert int(optimizer.skipped_steps) == 1


def results(family, take, **inner):
    """The weights after a step with each of two scales."""
    found = []
    for scale in (1.0, 2.0**15):
        weight = start()
        optimizer = LossScaleOptimizer(family.sgd(**inner), initial_scale=scale)
        tf.function(take)(optimizer, weight)
        assert not bool(optimizer.last_step_skipped)
        found.append(weight.numpy())
    assert not np.array_equal(found[0], start().numpy())
    return found


@families
def test_clipping_by_the_norm_over_all_between_unscaling_and_applying(family):
    def take(optimizer, weight):
        gradients, _ = tf.clip_by_global_norm(
            loops.unscaled_gradients(optimizer, lambda: loss_of(weight, X), [weight]), 0.01
        )
        optimizer.apply_gradients(zip(gradients, [weight]))

    by_hand = results(family, take)
    numerics.assert_close(*by_hand, 1e-6, start())
    numerics.assert_close(np.linalg.norm(by_hand[0] - start().numpy()), 0.005, 1e-6, start())

    def plainly(optimizer, weight):
        loops.step(optimizer, lambda: loss_of(weight, X), [weight])

    numerics.assert_close(results(family, plainly, global_clipnorm=0.01)[1], by_hand[0], 1e-6, start())


@families
def test_an_infinity_that_is_clipped_is_skipped(family):
    weight, optimizer = start(), LossScaleOptimizer(family.sgd(), initial_scale=64.0)
    gradients, _ = tf.clip_by_global_norm(optimizer.get_unscaled_gradients([tf.constant([np.inf, 1.0, 1.0])]), 1.0)
    optimizer.get_scaled_loss(0.0)
    optimizer.apply_gradients(zip(gradients, [weight]))
    np.testing.assert_array_equal(weight.numpy(), start().numpy())
    assert float(optimizer.loss_scale) == 32.0


@families
def test_a_persistent_tape_gives_the_gradients_of_several_scaled_losses(family):
    def take(optimizer, weight):
        with tf.GradientTape(persistent=True) as tape:
            losses = loss_of(weight, X[:4]), loss_of(weight, X[4:])
            scaled = optimizer.get_scaled_loss(losses)
        both = [optimizer.get_unscaled_gradients(tape.gradient(each, [weight])) for each in scaled]
        optimizer.apply_gradients([(both[0][0] - 2.0 * both[1][0], weight)])

    numerics.assert_close(*results(family, take), 1e-6, start())


@families
def test_layers_that_are_computed_again_have_the_gradients_of_those_that_are_not(family):
    def take(optimizer, weight, wrap=tf.recompute_grad):
        @wrap
        def layer(x):
            return tf.cast(tf.tanh(tf.cast(x, tf.float16) * tf.cast(weight, tf.float16)), tf.float32)

        gradients = loops.unscaled_gradients(
            optimizer, lambda: tf.reduce_mean(layer(layer(tf.constant(X))) ** 2), [weight]
        )
        optimizer.apply_gradients(zip(gradients, [weight]))

    again = results(family, take)
    plain = results(family, lambda optimizer, weight: take(optimizer, weight, wrap=lambda function: function))
    np.testing.assert_array_equal(again, plain)


@families
def test_a_gradient_penalty_is_that_of_float32(family):
    def take(optimizer, weight):
        def loss():
            x = tf.constant(X)
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = optimizer.loss_scale * tf.reduce_sum(tf.tanh(tf.linalg.matvec(x, weight)))
            slopes = inner.gradient(scores, x) / optimizer.loss_scale
            return tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)

        loops.step(optimizer, loss, [weight])

    numerics.assert_close(*results(family, take), 1e-5, start())


class Local(tf_keras.optimizers.SGD):
    """Sums nothing over the replicas, as in local SGD."""

    def aggregate_gradients(self, grads_and_vars):
        return list(grads_and_vars)


class LocalOfKeras3(tf.keras.optimizers.SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        return list(grads_and_vars)


LOCAL = {
    "keras3": lambda: LocalOfKeras3(1.0),
    "tf_keras": lambda: Local(1.0),
    "tf_keras_legacy": lambda: tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=list),
}


@pytest.mark.table("keras3-xla", "tf_keras_legacy-plain", every=1)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)
def test_replicas_that_sum_no_gradients_skip_a_step_together(make, jit_compile):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(make(), initial_scale=8.0, jit_compile=jit_compile)

    @tf.function
    def step(bad):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(tf.equal(replica, 1), bad, 0.25)
            optimizer.apply_gradients([(tf.reshape(gradient, [1]), weight)])

        strategy.run(on_replica)

    step(tf.constant(np.inf))
    assert [copy.numpy().tolist() for copy in strategy.experimental_local_results(weight)] == [[1.0], [1.0]]
    assert (optimizer.state()["skipped_steps"], optimizer.state()["loss_scale"]) == (1, 4.0)
    step(tf.constant(0.5))
    assert [copy.numpy().tolist() for copy in strategy.experimental_local_results(weight)] == [[0.75], [0.5]]


@families
@pytest.mark.parametrize("iterator", [iter, lambda variables: itertools.chain(variables[:1], variables[1:])])
def test_an_iterator_of_variables_is_trained(family, iterator):
    variables = [tf.Variable(1.0), tf.Variable(1.0)]
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    optimizer.minimize(lambda: variables[0] + 2.0 * variables[1], iterator(variables))
    assert [variable.numpy() for variable in variables] == [0.5, 0.0]


@families
def test_a_float16_variable_is_named_once(family, caplog):
    optimizer = LossScaleOptimizer(family.sgd())
    weight = tf.Variable(tf.ones([2], tf.float16), name="embedding")
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(tf.cast(weight, tf.float32)), [weight])
    said = [record.getMessage() for record in caplog.records if "float16" in record.getMessage()]
    assert len(said) == 1
    assert "embedding is float16" in said[0] and "mixed_float16" in said[0]
