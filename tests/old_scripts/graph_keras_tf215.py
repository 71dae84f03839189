"""TensorFlow 2.11 to 2.15: Keras without eager execution, with callbacks, a saved model and a bad batch."""

import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow.keras import mixed_precision

tf.compat.v1.disable_eager_execution()


def build():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Dense(8, "relu", kernel_initializer="ones", input_shape=(4,)),
            layers.Dense(1, kernel_initializer="ones", dtype="float32"),
        ]
    )
    optimizer = mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.legacy.Adam(0.05), initial_scale=1024, dynamic_growth_steps=20
    )
    model.compile(optimizer, "mse")
    return model


def main(folder):
    mixed_precision.set_global_policy("mixed_float16")
    rng = np.random.RandomState(0)
    x = rng.rand(32, 4).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    model = build()
    get_value = tf.keras.backend.get_value
    os.makedirs(folder)
    best = os.path.join(folder, "best.h5")
    callbacks = [
        tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.9),
        tf.keras.callbacks.ReduceLROnPlateau("loss", patience=2),
        tf.keras.callbacks.ModelCheckpoint(best, "loss", save_best_only=True, save_weights_only=True),
    ]
    history = model.fit(x, y, batch_size=8, epochs=12, shuffle=False, verbose=0, callbacks=callbacks)
    losses = history.history["loss"]
    scale = get_value(model.optimizer.loss_scale)

    before = model.get_weights()
    model.train_on_batch(np.full_like(x, np.inf), y)
    skipped = all(np.array_equal(*pair) for pair in zip(before, model.get_weights()))
    fell = get_value(model.optimizer.loss_scale) / scale

    again = build()
    again.load_weights(best)
    restored = again.evaluate(x, y, verbose=0) < losses[0] / 10
    print(
        "learned", losses[-1] < losses[0] / 10, "scale", scale, "fell", fell, "skipped", skipped, "restored", restored
    )
    print("steps", get_value(model.optimizer.iterations))


if __name__ == "__main__":
    main(sys.argv[1])
