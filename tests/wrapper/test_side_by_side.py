"""Optimizers in one process leave each other alone: their steps, evaluations, threads and zeros."""

import concurrent.futures
import copy
import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import named
from tf_lossscale import DynamicLossScale, LossScaleOptimizer, SharedLossScale


def optimizer_of(**kwargs):
    return LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), **{"initial_scale": 1024, **kwargs})


def scale_and_apply(optimizer, weight):
    """Takes a step as Keras 3 does."""
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(weight**2)
    optimizer.apply(tape.gradient(loss, [weight]), [weight])


def unscale_and_clip(optimizer, weight, before_update=lambda: None):
    """Takes a step of 0.5, as TensorFlow 2's guide does, with clipping."""
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(weight**2)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
    before_update()
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, [weight]))


def plainly(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = weight**2
    optimizer.apply_gradients([(tf.clip_by_norm(tape.gradient(loss, weight), 1.0), weight)])


def in_a_thread(function, *args):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(function, *args).result()


OF_OTHER = {
    "a step": scale_and_apply,
    "a step in a thread": lambda *args: in_a_thread(scale_and_apply, *args),
    "a loss in a thread": lambda other, weight: in_a_thread(other.scale_loss, weight**2),
    "an evaluation": lambda other, weight: other.scale_gradient(weight**2),
}


@pytest.mark.parametrize("of_other", named(OF_OTHER))
def test_after_a_step_or_an_evaluation_of_another_optimizer_every_step_is_taken(of_other):
    other, first, second = optimizer_of(), tf.Variable(1.0), tf.Variable(1.0)
    optimizer, fixed = optimizer_of(), optimizer_of(dynamic=False, initial_scale=1, skip_nonfinite=True)
    of_other(other, first)
    plainly(fixed, second)
    assert second.numpy() == 0.5
    of_other(other, first)
    second.assign(1.0)
    unscale_and_clip(optimizer, second, lambda: of_other(other, first))
    assert second.numpy() == 0.5


def test_gradients_of_another_optimizers_loss_are_refused_right_after_its_backward_pass():
    other, optimizer, weight = optimizer_of(), optimizer_of(), tf.Variable(1.0)
    unscale_and_clip(optimizer, weight)
    with tf.GradientTape() as tape:
        loss = other.scale_loss(weight**2)
    gradient = tf.clip_by_value(tape.gradient(loss, weight), -1.0, 1.0)
    with pytest.raises(RuntimeError, match="The loss scale of another LossScaleOptimizer"):
        optimizer.apply_gradients([(gradient, weight)])


@tf.custom_gradient
def identities(x, y):
    # If one result is not used, TensorFlow passes the same tensor of zeros to the gradient function in each call.
    return (tf.identity(x), tf.identity(y)), lambda dx, dy: (dx, dy)


ZEROS = tf.zeros([2])
LOSSES = {
    "the same zeros": lambda used, unused: (
        tf.reduce_sum(used),
        lambda gradient: ZEROS if gradient is None else gradient,
    ),
    "TensorFlow's zeros": lambda used, unused: (tf.reduce_sum(identities(used, unused)[0]), lambda gradient: gradient),
}


@pytest.mark.parametrize("made", named(LOSSES))
def test_zeros_that_several_steps_and_optimizers_share_tell_nothing_of_the_scale(made):
    def step(optimizer, used, unused, factor):
        with tf.GradientTape() as tape:
            loss, or_zeros = made(used, unused)
            loss = optimizer.get_scaled_loss(loss * factor)
        gradients = optimizer.get_unscaled_gradients(map(or_zeros, tape.gradient(loss, [used, unused])))
        optimizer.apply_gradients(zip(gradients, [used, unused]))

    for _ in range(2):
        optimizer, used, unused = optimizer_of(), tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
        for factor in (1.0, np.inf, 1.0):
            step(optimizer, used, unused, factor)
        assert (used.numpy().tolist(), unused.numpy().tolist()) == ([0.0, 1.0], [3.0, 4.0])
        assert float(optimizer.loss_scale) == 512.0


def test_copies_of_optimizers_with_a_shared_scale_step_together():
    weights = tf.Variable(1.0), tf.Variable(1.0)
    shared = SharedLossScale(8.0)
    optimizers = [LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=shared) for _ in weights]
    for first, second in (optimizers, copy.deepcopy(optimizers)):
        with tf.GradientTape() as tape:
            loss = first.scale_loss(weights[0] ** 2 + weights[1] ** 2)
        pairs = list(zip(tape.gradient(loss, weights), weights))
        first.scaler.apply_gradients([(first, pairs[:1]), (second, pairs[1:])])
    assert [weight.numpy() for weight in weights] == [0.0, 0.0]


def test_the_scale_of_a_deleted_optimizer_in_a_reference_cycle_is_free():
    scale, weight = DynamicLossScale(8.0), tf.Variable(1.0)
    gc.disable()
    try:
        for _ in range(2):
            optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=scale)
            optimizer.itself = [optimizer]
            unscale_and_clip(optimizer, weight)
            del optimizer
    finally:
        gc.enable()
    assert weight.numpy() == 0.0


@pytest.mark.parametrize("method", ["scale_loss", "get_scaled_loss"])
def test_an_interrupted_step_makes_at_most_one_step_of_another_optimizer_fail(method):
    fixed, weight = optimizer_of(dynamic=False, initial_scale=1, skip_nonfinite=True), tf.Variable(1.0)
    other = optimizer_of()
    with tf.GradientTape() as tape:
        loss = getattr(other, method)(weight**2)
    gradient = tf.clip_by_value(tape.gradient(loss, weight), -1.0, 1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="The loss scale of another LossScaleOptimizer"):
            fixed.apply_gradients([(gradient, weight)])
    plainly(fixed, weight)
    assert weight.numpy() == 0.5
