"""What loops do with gradients between unscaling and applying: the results do not depend on the scale."""

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
        weight, expected = start(), start()
        total = tf.Variable(tf.zeros(3), trainable=False, synchronization=ON_READ, aggregation=SUM)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=1024.0)

    def micro(x):
        loss = lambda: loss_of(weight, x) / 4 / strategy.num_replicas_in_sync  # noqa: E731
        total.assign_add(loops.unscaled_gradients(optimizer, loss, [weight])[0])

    def apply():
        optimizer.apply_gradients([(total.read_value(), weight)])
        total.assign(tf.zeros(3))

    step, end = (tf.function(lambda *args, f=f: strategy.run(f, args=args)) for f in (micro, apply))
    for bad in (1, None):
        np.testing.assert_array_equal(weight.numpy(), start().numpy())
        for i, part in enumerate(np.split(X, 4)):
            step(tf.constant(part * np.nan if i == bad else part))
        end()
    with tf.GradientTape() as tape:
        loss = loss_of(expected, X)
    expected.assign_sub(0.5 * tape.gradient(loss, expected))
    numerics.assert_close(weight, expected, 1e-5, start())
    assert float(optimizer.loss_scale) == 512.0


@families
def test_clipping_by_the_norm_over_all_between_unscaling_and_applying(family):
    def moved(clip, scale, **inner):
        weight = start()
        optimizer = LossScaleOptimizer(family.sgd(**inner), initial_scale=scale)

        @tf.function
        def step():
            gradients = loops.unscaled_gradients(optimizer, lambda: loss_of(weight, X), [weight])
            optimizer.apply_gradients(zip(clip(gradients), [weight]))

        step()
        return weight.numpy() - start().numpy()

    by_hand = [moved(lambda gradients: tf.clip_by_global_norm(gradients, 0.01)[0], scale) for scale in (1.0, 2.0**15)]
    numerics.assert_close(*by_hand, 1e-6, start())
    numerics.assert_close(np.linalg.norm(by_hand[0]), 0.005, 1e-6, start())
    numerics.assert_close(moved(list, 2.0**15, global_clipnorm=0.01), by_hand[0], 1e-6, start())


@families
def test_an_infinity_that_is_clipped_is_skipped(family):
    weight, optimizer = start(), LossScaleOptimizer(family.sgd(), initial_scale=64.0)
    gradients, _ = tf.clip_by_global_norm(optimizer.get_unscaled_gradients([tf.constant([np.inf, 1.0, 1.0])]), 1.0)
    optimizer.get_scaled_loss(0.0)
    optimizer.apply_gradients(zip(gradients, [weight]))
    np.testing.assert_array_equal(weight.numpy(), start().numpy())
    assert float(optimizer.loss_scale) == 32.0


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
def test_a_float16_variable_is_named_once(family, caplog):
    optimizer = LossScaleOptimizer(family.sgd())
    weight = tf.Variable(tf.ones([2], tf.float16), name="embedding")
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(tf.cast(weight, tf.float32)), [weight])
    said = [record.getMessage() for record in caplog.records if "float16" in record.getMessage()]
    assert len(said) == 1
    assert "embedding is float16" in said[0] and "mixed_float16" in said[0]
