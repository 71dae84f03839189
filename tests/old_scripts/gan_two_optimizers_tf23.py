"""TensorFlow 2.3: a GAN whose train_step has an optimizer and a loss scale for each of its two networks."""

import numpy as np
import tensorflow as tf

mixed_precision = tf.keras.mixed_precision.experimental
mixed_precision.set_policy(mixed_precision.Policy("mixed_float16", loss_scale=1024))


class GAN(tf.keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super(GAN, self).__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super(GAN, self).compile()
        self.d_optimizer = mixed_precision.LossScaleOptimizer(d_optimizer, "dynamic")
        self.g_optimizer = mixed_precision.LossScaleOptimizer(
            g_optimizer, loss_scale=tf.mixed_precision.experimental.DynamicLossScale(2**8, increment_period=4)
        )
        self.loss_fn = loss_fn

    def train_step(self, real):
        batch_size = tf.shape(real)[0]
        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        combined = tf.concat([tf.cast(self.generator(noise), tf.float32), real], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
            scaled_loss = self.d_optimizer.get_scaled_loss(d_loss)
        grads = tape.gradient(scaled_loss, self.discriminator.trainable_weights)
        grads = self.d_optimizer.get_unscaled_gradients(grads)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((batch_size, 1)), self.discriminator(self.generator(noise)))
            scaled_loss = self.g_optimizer.get_scaled_loss(g_loss)
        grads = tape.gradient(scaled_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(
            zip(self.g_optimizer.get_unscaled_gradients(grads), self.generator.trainable_weights)
        )
        return {"d_loss": d_loss, "g_loss": g_loss, "g_scale": self.g_optimizer.loss_scale()}


tf.random.set_seed(0)
discriminator = tf.keras.Sequential(
    [tf.keras.layers.Dense(16), tf.keras.layers.LeakyReLU(0.2), tf.keras.layers.Dense(1, dtype="float32")]
)
generator = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
gan = GAN(discriminator, generator, latent_dim=4)
gan.compile(
    d_optimizer=tf.keras.optimizers.Adam(0.01),
    g_optimizer=tf.keras.optimizers.Adam(0.01),
    loss_fn=tf.keras.losses.BinaryCrossentropy(from_logits=True),
)
data = (np.random.RandomState(0).randn(64, 2) + 3).astype("float32")
history = gan.fit(tf.data.Dataset.from_tensor_slices(data).batch(16), epochs=2, verbose=0)
print("finite", bool(np.isfinite(history.history["g_loss"]).all()))
print("d_scale", int(gan.d_optimizer.loss_scale()), "g_scale", int(gan.g_optimizer.loss_scale()))
print("steps", int(gan.d_optimizer.iterations), int(gan.g_optimizer.iterations))
