"""A custom training loop in float16: scales the loss, unscales the gradients, and skips steps that overflow.

    python examples/custom_loop.py [--steps 200]

The training loop is the one in TensorFlow's mixed precision guide. The network learns which of ten directions a random
vector points in. Gradients are clipped after they are unscaled, because only then do they have their true size. Prints
the loss and the loss scale during training, and the accuracy at the end.
"""

import argparse

import tensorflow as tf

import tf_lossscale

SIZE, CLASSES, BATCH = 32, 10, 128


def data(seed):
    """Yield random batches of (vectors, labels) indefinitely.

    A label says which of ten fixed directions has the largest dot product with the vector.
    """
    random = tf.random.Generator.from_seed(seed)
    directions = tf.random.Generator.from_seed(0).normal([SIZE, CLASSES])
    while True:
        x = random.normal([BATCH, SIZE])
        yield x, tf.argmax(x @ directions, axis=1)


def network():
    """Return a network that computes in float16. Its variables and logits are float32."""
    layers, half = tf.keras.layers, "mixed_float16"
    return tf.keras.Sequential(
        [
            tf.keras.Input((SIZE,)),
            layers.Dense(64, activation="relu", dtype=half),
            layers.Dense(64, activation="relu", dtype=half),
            layers.Dense(CLASSES, dtype=half),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def main(arguments=None):
    """Train the network, and return its accuracy on new vectors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(arguments).steps

    tf.keras.utils.set_random_seed(0)
    model = network()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # An initial scale of 2**24 is deliberately too high: the first steps overflow and lower it.
    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(3e-3), initial_scale=2**24)

    @tf.function
    def train_step(x, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(x, training=True))
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        # After an overflow, clipping by an infinite norm turns the gradients into NaN. The step is still skipped.
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for step, (x, labels) in zip(range(steps), data(seed=1)):
        loss = train_step(x, labels)
        if step < 10 or step % 50 == 49:
            outcome = "skipped" if optimizer.last_step_skipped else "applied"
            scale = float(optimizer.loss_scale)
            print(f"step {step:4}  loss {float(loss):.3f}  {outcome}, loss scale is now 2**{len(bin(int(scale))) - 3}")

    x, labels = next(data(seed=2))
    accuracy = float(tf.reduce_mean(tf.cast(tf.argmax(model(x), axis=1) == labels, tf.float32)))
    print(f"accuracy {accuracy:.1%}, {int(optimizer.iterations)} iterations")
    return accuracy


if __name__ == "__main__":
    main()
