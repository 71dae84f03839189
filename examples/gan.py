"""Trains a GAN in float16. Its two optimizers share one loss scale, or each optimizer has its own loss scale.

    python examples/gan.py [--steps 1200] [--scales shared]

The generator learns to put points on a circle. By default, the optimizers share one `SharedLossScale`: an overflow in
either network skips the steps of both networks, so that neither network gets ahead. With `--scales separate`, an
overflow skips only the step of the network in which it occurs. Both losses are scaled inside one persistent tape.
`keep_state` restores the statistics of BatchNormalization in a skipped step. The points come from a copy of the
generator with the moving average of its weights. Prints their mean distance from the circle, and the number of skipped
steps.
"""

import argparse

import tensorflow as tf

import tf_lossscale

NOISE, BATCH, RADIUS, DECAY = 8, 128, 2.0, 0.98


def network(inputs, outputs, *normalization):
    """Return a network whose hidden layers compute in float16. Its variables and its output layer are float32."""
    layers = tf.keras.layers
    first, second = (layers.Dense(64, activation="leaky_relu", dtype="mixed_float16") for _ in range(2))
    last = layers.Dense(outputs, dtype="float32")
    return tf.keras.Sequential([tf.keras.Input((inputs,)), first, *normalization, second, last])


def generator_network():
    """Return a generator."""
    return network(NOISE, 2, tf.keras.layers.BatchNormalization())


def circle():
    """Return a batch of random points on the circle."""
    angle = tf.random.uniform([BATCH, 1], 0.0, 6.2831853)
    return RADIUS * tf.concat([tf.cos(angle), tf.sin(angle)], axis=1)


def make_step(generator, discriminator, average, optimizers, shared):
    """Return a function that takes one training step of both networks, and updates the average of the generator.

    If `shared`, the loss scale of both optimizers, is not None, they apply their gradients together or not at all.
    """
    loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    @tf_lossscale.keep_state(generator, discriminator, average)
    def step():
        with tf.GradientTape(persistent=True) as tape:
            real, fake = circle(), generator(tf.random.normal([BATCH, NOISE]), training=True)
            of_real, of_fake = discriminator(real, training=True), discriminator(fake, training=True)
            ones, zeros = tf.ones_like(of_real), tf.zeros_like(of_fake)
            losses = loss_of(ones, of_fake), loss_of(ones * 0.9, of_real) + loss_of(zeros, of_fake)
            scaled = [optimizer.get_scaled_loss(loss) for optimizer, loss in zip(optimizers, losses)]
        steps = []
        for model, optimizer, loss in zip((generator, discriminator), optimizers, scaled):
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, model.trainable_variables))
            steps.append((optimizer, list(zip(gradients, model.trainable_variables))))
        if shared is not None:
            shared.apply_gradients(steps)
        else:
            for optimizer, grads_and_vars in steps:
                optimizer.apply_gradients(grads_and_vars)
        for mean, weight in zip(average.weights, generator.weights):
            mean.assign(DECAY * mean + (1 - DECAY) * weight)
        return losses

    return step


def main(arguments=None):
    """Train both networks. Return the mean distance of generated points from the circle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--scales", choices=["shared", "separate"], default="shared")
    options = parser.parse_args(arguments)

    tf.keras.utils.set_random_seed(0)
    generator, discriminator, average = generator_network(), network(2, 1), generator_network()
    average.set_weights(generator.get_weights())
    average.trainable = False  # keep_state restores weights that are not trained
    # An initial scale of 2**24 is deliberately too high: the first steps overflow and lower it.
    settings = {"initial_scale": 2**24, "dynamic_growth_steps": 500}
    shared = tf_lossscale.SharedLossScale(**settings) if options.scales == "shared" else None

    def wrapped():
        inner = tf.keras.optimizers.Adam(2e-3, beta_1=0.5)
        return tf_lossscale.LossScaleOptimizer(inner, **(settings if shared is None else {"loss_scale": shared}))

    optimizers = wrapped(), wrapped()
    step = make_step(generator, discriminator, average, optimizers, shared)
    for i in range(options.steps):
        losses = step()
        if i % 200 == 199:
            print(f"step {i + 1:5}  losses {', '.join(f'{float(loss):.3f}' for loss in losses)}")
    points = average(tf.random.normal([2048, NOISE]))
    distance = float(tf.reduce_mean(tf.abs(tf.norm(points, axis=1) - RADIUS)))
    for name, optimizer in zip(("generator", "discriminator"), optimizers):
        state = optimizer.state()
        skipped = f"{state['skipped_steps']} of {state['total_steps']} steps skipped"
        print(f"{name:13}  {skipped}, scale {state['loss_scale']:g}")
    print(f"mean distance from the circle {distance:.3f}")
    return distance


if __name__ == "__main__":
    main()
