"""The outcome of the last step has a truth value, under every strategy."""

import numpy as np
import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.families import FAMILIES, all_families
from tf_lossscale import LossScaleOptimizer

KERAS_3, TF_KERAS, LEGACY, *_ = FAMILIES


def skipping(family):
    """A strategy, and a function that takes a step under it in a way and returns what an `if` says in each place."""
    strategy = strategies.get("mirrored_2")
    if family.name == "sonnet":  # refuses other strategies
        one_device = tf.distribute.ReductionToOneDevice()
        strategy = sonnet.distribute.Replicator(["cpu:0", "cpu:1"], cross_device_ops=one_device)
    with strategy.scope():
        variable = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(family.adam(), initial_scale=8)

    def step(gradient):
        optimizer.apply_gradients([(tf.identity(gradient), variable)])

    def in_replica(gradient):
        step(gradient)
        return "skipped" if optimizer.last_step_skipped else "applied"

    def traced(gradient):
        step(gradient)
        return tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    @tf.function
    def across(gradient):
        strategy.run(step, args=(gradient,))
        return tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    def eager(gradient):
        said = strategy.experimental_local_results(strategy.run(in_replica, args=(gradient,)))
        return {*said, "skipped" if optimizer.last_step_skipped else "applied"}

    compiled = tf.function(lambda gradient: strategy.run(traced, args=(gradient,)))

    def in_replicas(gradient):
        return {each.numpy().decode() for each in strategy.experimental_local_results(compiled(gradient))}

    return optimizer, {"eager": eager, "replica": in_replicas, "across": lambda g: {across(g).numpy().decode()}}


@pytest.mark.table("keras3-across", "tf_keras-eager", "tf_keras_legacy-replica", "tf1-eager", "sonnet-across", every=7)
@pytest.mark.parametrize("where", ["eager", "replica", "across"])
@all_families
def test_an_if_on_the_last_step_tells_skipped_from_applied_steps(family, where):
    optimizer, steps = skipping(family)
    said = [steps[where](tf.constant([gradient])) for gradient in (1.0, np.inf, 1.0, np.nan)]
    assert said == [{"applied"}, {"skipped"}, {"applied"}, {"skipped"}]
    assert int(optimizer.skipped_steps) == 2


def test_a_truth_value_that_a_graph_cannot_have_is_an_error():
    with strategies.get("mirrored_2").scope():
        optimizer = LossScaleOptimizer(TF_KERAS.sgd())

    @tf.function(autograph=False)
    def ask():
        return 1 if optimizer.last_step_skipped else 2

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        ask()
