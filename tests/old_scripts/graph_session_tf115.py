"""TensorFlow 1.15: a graph, a Session, automatic mixed precision with a dynamic loss scale."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def model_fn(features):
    with tf.variable_scope("mlp"):
        w1 = tf.get_variable("w1", [4, 16], initializer=tf.glorot_uniform_initializer(seed=1))
        b1 = tf.get_variable("b1", [16], initializer=tf.zeros_initializer())
        w2 = tf.get_variable("w2", [16, 1], initializer=tf.glorot_uniform_initializer(seed=2))
    return tf.matmul(tf.nn.relu(tf.matmul(features, w1) + b1), w2)


def main(steps):
    rng = np.random.RandomState(0)
    data = rng.randn(64, 4).astype("float32")
    target = data.sum(axis=1, keepdims=True)

    x = tf.placeholder(tf.float32, [None, 4])
    y = tf.placeholder(tf.float32, [None, 1])
    loss = tf.reduce_mean(tf.squared_difference(model_fn(x), y))
    global_step = tf.train.get_or_create_global_step()

    loss_scale = tf.train.experimental.DynamicLossScale(initial_loss_scale=2**10, increment_period=20)
    opt = tf.train.AdamOptimizer(learning_rate=0.02)
    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale)
    grads_and_vars = opt.compute_gradients(loss, tf.trainable_variables())
    grads, variables = zip(*grads_and_vars)
    grads, _ = tf.clip_by_global_norm(grads, 10.0)
    train_op = opt.apply_gradients(zip(grads, variables), global_step=global_step)
    saver = tf.train.Saver()

    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        feed = {x: data, y: target}
        first = sess.run(loss, feed)
        for step in range(steps):
            batch = {x: np.full_like(data, np.inf), y: target} if step == 5 else feed
            sess.run(train_op, batch)
        last, scale, step = sess.run([loss, loss_scale(), global_step], feed)
        saver.save(sess, sys.argv[2])
        restored = [name for name, _ in tf.train.list_variables(sys.argv[2])]
    print("steps", step, "scale", scale, "learned", bool(last < first / 10), "saved", "current_loss_scale" in restored)


if __name__ == "__main__":
    main(int(sys.argv[1]))
