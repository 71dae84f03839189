"""The training loop of one's own in TensorFlow 2.4 to 2.15, for tests that are not about its lines."""

import tensorflow as tf


def unscaled_gradients(optimizer, loss, variables):
    """Returns the unscaled gradients of a loss, a function without arguments."""
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(loss())
    return optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))


def step(optimizer, loss, variables):
    """Takes a step that lowers a loss, a function without arguments."""
    optimizer.apply_gradients(zip(unscaled_gradients(optimizer, loss, variables), variables))
