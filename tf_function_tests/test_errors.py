"""What TensorFlow or Keras cannot do is an error of ours, which says what cannot and what to use instead."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import strategies
from tests.families import ALL_FAMILIES, families
from tf_lossscale import LossScaleOptimizer


def step_of(strategy, optimizer, weight):
    def replica():
        gradient = optimizer.get_unscaled_gradients([tf.ones_like(weight)])
        optimizer.apply_gradients(zip(gradient, [weight]))

    return replica


def made(family, name, inner=None):
    strategy = strategies.get(name)
    with strategy.scope():
        return strategy, tf.Variable(1.0), LossScaleOptimizer(inner or family.sgd(), initial_scale=4.0)


@families
def test_a_loop_inside_the_replicas_is_refused_and_one_around_them_recommended(family):
    strategy, weight, optimizer = made(family, "mirrored_2")
    step = step_of(strategy, optimizer, weight)

    def loop():
        def body(i):
            step()
            return [i + 1]

        tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])

    with pytest.raises(RuntimeError, match=r"inside a tf\.while_loop.*around strategy\.run"):
        tf.function(lambda: strategy.run(loop))()
    assert weight.numpy() == 1.0
    assert float(optimizer.loss_scale) == 4.0


def test_optimizers_of_tensorflow_1_are_refused_where_replicas_cannot_meet():
    family = next(each for each in ALL_FAMILIES if each.name == "tf1")
    strategy, weight, optimizer = made(family, "mirrored_2")
    step = step_of(strategy, optimizer, weight)
    with strategies.apart(strategy), pytest.raises(RuntimeError, match=r"tf_keras\.optimizers, or do not compile"):
        tf.function(lambda: strategy.run(step))()


@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_legacy_optimizers_that_clip_are_refused_in_central_storage(option):
    inner = tf_keras.optimizers.legacy.SGD(0.5, **{option: 0.25})
    strategy, weight, optimizer = made(None, "central_storage", inner)
    with pytest.raises(ValueError, match=rf"`{option}=0.25` .* tf\.keras\.optimizers or tf_keras\.optimizers"):
        strategy.run(step_of(strategy, optimizer, weight))
    assert weight.numpy() == 1.0


@families
def test_a_step_outside_strategy_run_is_refused(family):
    strategy, weight, optimizer = made(family, "mirrored_2")
    with strategy.scope():
        with pytest.raises(
            ValueError,
            match=r"apply_gradients\(\) must be called in a replica context\. Call it inside .* strategy\.run",
        ):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])
        with pytest.raises(ValueError, match=r"apply\(\) must be called in a replica context.*strategy\.run"):
            optimizer.apply([tf.constant(1.0)], [weight])
        with pytest.raises(ValueError, match=r"minimize\(\) must be called in a replica context"):
            optimizer.minimize(lambda: weight * 2.0, [weight])
    assert (weight.numpy(), float(optimizer.loss_scale), optimizer.state()["total_steps"]) == (1.0, 4.0, 0)


@families
def test_a_step_that_failed_leaves_the_next_one_whole(family):
    strategy, weight, optimizer = made(family, "mirrored_2")

    def bad():
        optimizer.apply_gradients([(None, weight)])

    with pytest.raises(ValueError, match="No gradients provided"):
        strategy.run(bad)
    tf.function(lambda: strategy.run(step_of(strategy, optimizer, weight)))()
    # The gradient is 1 / 4 on each of two replicas, the learning rate 0.5.
    np.testing.assert_array_equal(weight.numpy(), 0.75)


LATE = {"legacy": tf_keras.optimizers.legacy.Adam, "tf1": tf.compat.v1.train.AdamOptimizer}


@pytest.mark.parametrize("name", LATE)
def test_variables_of_a_network_that_joins_later_are_an_error_that_names_build(name):
    weights = [tf.Variable(1.0), tf.Variable(1.0)]
    for is_built in (False, True):
        optimizer = LossScaleOptimizer(LATE[name](0.5))
        if is_built:
            optimizer.build(weights)

        @tf.function
        def step(late, optimizer=optimizer):
            trained = weights[: 2 if late else 1]
            optimizer.minimize(lambda: tf.add_n([1.0 * weight for weight in trained]), trained)

        step(False)
        if is_built:
            step(True)
        else:
            with pytest.raises(ValueError, match=r"(?s)Call optimizer.build\(variables\).*only supports singleton"):
                step(True)
        assert (float(weights[1]) < 1.0) == is_built
