"""Trains LeNet-5 on handwritten digits in six ways, with a mixed precision API like MindSpore's.

    python examples/lenet_mixed_precision.py [--epochs 3]

The six ways are automatic mixed precision at level O2, automatic mixed precision at level O3, a single layer that is
set to float16 by hand, a fixed loss scale manager, a dynamic loss scale manager, and a user-defined training step. For
each way, prints the losses of the first and the last epoch, the number of float16 layers, and the final loss scale.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tf_lossscale import amp

keras = tf.keras
BATCH = 64


def lenet5():
    """Return LeNet-5 with batch normalization, for 32 x 32 images."""
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
    """Return batches of scikit-learn's 1797 digits, enlarged from 8 x 8 to 32 x 32 pixels."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((4, 4)))[..., np.newaxis].astype("float32")
    return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, seed=0).batch(BATCH, drop_remainder=True)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def by_model(network, epochs, **kwargs):
    """Train with `amp.Model`. Return the network, its optimizer, and the loss of each epoch."""
    model = amp.Model(network, LOSS, keras.optimizers.SGD(0.02, momentum=0.9), **kwargs)
    history = model.train(epochs, digits(), callbacks=[amp.LossMonitor(27)], verbose=0)
    return network, model.optimizer, history.history["loss"]


class ClippedCell(amp.TrainOneStepWithLossScaleCell):
    """A user-defined training step that clips the unscaled gradients. "Cell" is MindSpore's term for a module."""

    def construct(self, *inputs):
        """Take one step. Return the loss, whether the step overflowed, and the loss scale."""
        scale = self.sens
        loss, gradients = self.loss_and_gradients(*inputs)
        # Clipping turns an infinite gradient into NaN, so the step is still skipped.
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        return loss, self.update(gradients), scale


def by_cell(epochs):
    """Train with `ClippedCell`. Return the network, its optimizer, and the loss of each epoch."""
    network = amp.auto_mixed_precision(lenet5(), "O2")
    manager = amp.DynamicLossScaleManager(init_loss_scale=2**16, scale_window=20)
    cell = ClippedCell(amp.WithLossCell(network, LOSS), keras.optimizers.SGD(0.02, momentum=0.9), manager)
    history = amp.Model(cell).train(epochs, digits(), callbacks=[amp.OverflowMonitor(27)], verbose=0)
    return network, cell.optimizer, history.history["loss"]


def one_layer_by_hand():
    """Return a network in which only the first convolution computes in float16."""
    network = lenet5()
    amp.to_float(network.layers[0], "float16")
    return network


def in_float16(network):
    """Return the number of layers that compute in float16."""
    return sum(layer.compute_dtype == "float16" for layer in network.layers)


def main(arguments=None):
    """Train in all six ways. Return a dictionary that maps the name of each way to its results.

    The results are the loss of each epoch, the number of float16 layers, and the final loss scale.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args(arguments).epochs
    keras.utils.set_random_seed(0)
    fixed, dynamic = amp.FixedLossScaleManager(1024.0), amp.DynamicLossScaleManager(scale_window=20)
    applied = amp.FixedLossScaleManager(drop_overflow_update=False)
    runs = {
        "level O2": by_model(lenet5(), epochs, amp_level="O2"),
        "level O3": by_model(lenet5(), epochs, amp_level="O3", loss_scale_manager=applied),
        "one layer by hand": by_model(one_layer_by_hand(), epochs),
        "fixed manager": by_model(lenet5(), epochs, amp_level="O2", loss_scale_manager=fixed),
        "dynamic manager": by_model(lenet5(), epochs, amp_level="O2", loss_scale_manager=dynamic),
        "cell of one's own": by_cell(epochs),
    }
    results = {}
    for name, (network, optimizer, losses) in runs.items():
        scale = float(getattr(optimizer, "loss_scale", 1.0))
        results[name] = losses, in_float16(network), scale
        print(
            f"{name:18} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {results[name][1]} layers in float16, scale {scale:g}"
        )
    return results


if __name__ == "__main__":
    main()
