"""TensorFlow 2.4 to 2.15: the guide's custom training loop, a checkpoint, and code that asks what the optimizer is."""

import sys

import numpy as np
import tensorflow as tf
from tensorflow.keras import mixed_precision

mixed_precision.set_global_policy("mixed_float16")

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(1, dtype="float32"),
    ]
)
optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
optimizer = mixed_precision.LossScaleOptimizer(optimizer, dynamic=True, initial_scale=2**12, dynamic_growth_steps=15)
loss_object = tf.keras.losses.MeanSquaredError()


def is_scaled(opt):
    return isinstance(opt, tf.keras.mixed_precision.LossScaleOptimizer)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
        if is_scaled(optimizer):
            scaled_loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    if is_scaled(optimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


rng = np.random.RandomState(0)
x = tf.constant(rng.randn(64, 4), tf.float32)
y = tf.reduce_sum(x, axis=1, keepdims=True)

losses = [float(train_step(x, y)) for _ in range(20)]
train_step(x * float("inf"), y)
losses += [float(train_step(x, y)) for _ in range(20)]
print(
    "learned", losses[-1] < losses[0], "scale", float(optimizer.loss_scale), "counter", int(optimizer.dynamic_counter)
)
print(
    "iterations",
    int(optimizer.iterations),
    "lr",
    round(float(optimizer.lr), 4),
    "inner",
    optimizer.inner_optimizer.name.lower(),
)

checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
path = checkpoint.save(sys.argv[1])
scale_then = float(optimizer.loss_scale)
train_step(x * float("nan"), y)
checkpoint.restore(path)
print("restored", float(optimizer.loss_scale) == scale_then)
