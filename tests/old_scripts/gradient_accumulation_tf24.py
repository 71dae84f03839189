"""TensorFlow 2.4 to 2.15: gradients of several micro-batches are added up before one update."""

import argparse

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--updates", type=int, default=10)
args = parser.parse_args()

tf.keras.mixed_precision.set_global_policy("mixed_float16")
model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")])
model.build((None, 3))
opt = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.05), False, 128)
accumulators = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]


@tf.function
def micro_step(x, y):
    with tf.GradientTape() as tape:
        prediction = tf.cast(model(x, training=True), tf.float32)
        loss = tf.reduce_mean(tf.square(prediction - y)) / args.accumulate
        scaled_loss = opt.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    for accumulator, gradient in zip(accumulators, opt.get_unscaled_gradients(scaled_gradients)):
        accumulator.assign_add(gradient)
    return loss


@tf.function
def update():
    opt.apply_gradients(zip(accumulators, model.trainable_variables))
    for accumulator in accumulators:
        accumulator.assign(tf.zeros_like(accumulator))


x = tf.random.stateless_normal((16 * args.accumulate, 3), seed=(1, 2))
y = tf.reduce_sum(x, axis=1, keepdims=True)
losses = []
for _ in range(args.updates):
    total = 0.0
    for micro_x, micro_y in zip(tf.split(x, args.accumulate), tf.split(y, args.accumulate)):
        total += micro_step(micro_x, micro_y)
    update()
    losses.append(float(total))
print("updates", int(opt.iterations), "scale", float(opt.loss_scale), "learned", losses[-1] < losses[0] / 2)
print("last loss %.3f" % losses[-1])
