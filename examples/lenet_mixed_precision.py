"""LeNet-5 on handwritten digits with MindSpore's mixed-precision system, six ways.

    python examples/lenet_mixed_precision.py [--epochs 3]

Automatic levels O2 and O3, one float16 layer by hand, a fixed and a dynamic loss scale manager, and a training step
of one's own. Prints first and last loss of each; the loss falls in all six.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tf_lossscale import amp

keras = tf.keras
BATCH = 64


def lenet5():
    """LeNet-5 with batch normalization, for 32 x 32 images."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(6, 5, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120),
            layers.ReLU(),
            layers.Dense(84),
            layers.ReLU(),
            layers.Dense(10),
        ]
    )


def digits():
    """The 1797 digits that come with scikit-learn, scaled up from 8 x 8 to 32 x 32."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((4, 4)))[..., np.newaxis].astype("float32")
    return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, seed=0).batch(BATCH, drop_remainder=True)


def loss_fn(output, label):
    """Cross-entropy in float32, whatever the network computes in."""
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=tf.cast(output, tf.float32))
    )


def by_model(network, epochs, **kwargs):
    """Trains by `amp.Model`; returns the loss of the first and the last epoch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = amp.Model(network, loss, keras.optimizers.SGD(0.02, momentum=0.9), **kwargs)
    history = model.train(epochs, digits(), callbacks=[amp.LossMonitor(27)], verbose=0)
    return history.history["loss"][0], history.history["loss"][-1]


def by_hand(step, epochs):
    """Trains by calling a step; returns the mean loss of the first and the last epoch."""
    means = []
    for _ in range(epochs):
        means.append(np.mean([float(step(*batch)[0]) for batch in digits()]))
    return means[0], means[-1]


class ClippedStep(amp.TrainOneStepWithLossScale):
    """A step of one's own: clips the unscaled gradients before they are applied."""

    def construct(self, *inputs):
        """Takes one step; returns the loss, whether it overflowed, and the scale."""
        scale = self.optimizer.loss_scale
        loss, gradients = self.loss_and_gradients(*inputs)
        overflow = tf.logical_not(amp.all_finite(gradients))
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        self.update(gradients)
        return loss, overflow, scale


def one_layer_by_hand():
    """A network whose first convolution alone computes in float16."""
    network = lenet5()
    amp.to_float(network.layers[0], "float16")
    print(amp.dtype_table(network))
    return network


def custom_step():
    """A step with clipping and a dynamic scale."""
    network = amp.auto_mixed_precision(lenet5(), "O2")
    manager = amp.DynamicLossScaleManager(init_loss_scale=2**16, scale_window=20)
    return ClippedStep(amp.WithLoss(network, loss_fn), keras.optimizers.SGD(0.02, momentum=0.9), manager)


def main(arguments=None):
    """Runs all six; returns {name: (first loss, last loss)}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args(arguments).epochs
    keras.utils.set_random_seed(0)
    losses = {
        "level O2": by_model(lenet5(), epochs, amp_level="O2"),
        "level O3": by_model(
            lenet5(), epochs, amp_level="O3", loss_scale_manager=amp.FixedLossScaleManager(drop_overflow_update=False)
        ),
        "one layer by hand": by_model(one_layer_by_hand(), epochs),
        "fixed manager": by_model(
            lenet5(), epochs, amp_level="O2", loss_scale_manager=amp.FixedLossScaleManager(1024.0)
        ),
        "dynamic manager": by_model(
            lenet5(), epochs, amp_level="O2", loss_scale_manager=amp.DynamicLossScaleManager(scale_window=20)
        ),
        "step of one's own": by_hand(custom_step(), epochs),
    }
    for name, (first, last) in losses.items():
        print(f"{name:18} loss {first:.4f} -> {last:.4f}")
    return losses


if __name__ == "__main__":
    main()
