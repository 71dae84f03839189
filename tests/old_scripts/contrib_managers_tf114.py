"""TensorFlow 1.14: tf.contrib.mixed_precision, a loss scale manager and its optimizer, float16 by hand."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.contrib.mixed_precision import ExponentialUpdateLossScaleManager

tf.disable_v2_behavior()


def float32_variable_storage_getter(getter, name, shape=None, dtype=None, initializer=None, trainable=True, **kwargs):
    """Keeps float32 variables and casts them to the dtype of the computation."""
    storage_dtype = tf.float32 if trainable else dtype
    variable = getter(name, shape, dtype=storage_dtype, initializer=initializer, trainable=trainable, **kwargs)
    if trainable and dtype != tf.float32:
        variable = tf.cast(variable, dtype)
    return variable


rng = np.random.RandomState(0)
features = rng.randn(32, 4).astype("float16")
labels = features.sum(axis=1, keepdims=True).astype("float32")

x = tf.placeholder(tf.float16, [None, 4])
with tf.variable_scope("fp32_vars", custom_getter=float32_variable_storage_getter):
    w = tf.get_variable("w", [4, 1], tf.float16, initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.squared_difference(tf.cast(tf.matmul(x, w), tf.float32), labels))

opt = tf.train.GradientDescentOptimizer(learning_rate=0.05)
loss_scale_manager = ExponentialUpdateLossScaleManager(init_loss_scale=1024, incr_every_n_steps=10)
loss_scale_optimizer = tf.contrib.mixed_precision.LossScaleOptimizer(opt, loss_scale_manager)
train_op = loss_scale_optimizer.minimize(loss)

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    losses, scales = [], []
    for step in range(40):
        bad = step in (12, 13)
        sess.run(train_op, {x: np.full_like(features, np.nan) if bad else features})
        losses.append(sess.run(loss, {x: features}))
        scales.append(float(sess.run(loss_scale_manager.get_loss_scale())))
print("grew", max(scales), "fell", scales[13] / scales[12], "skipped", losses[13] == losses[11])
print("learned", bool(losses[-1] < losses[0] / 10))
