"""Trains on handwritten digits in float16, with Adafactor, loss scaling, and weight decay for the kernels only.

    python examples/adafactor_digits.py [--epochs 10]

Trains a convolutional network on scikit-learn's digits under the `mixed_float16` policy. `compile` receives a
`LossScaleOptimizer` that wraps Adafactor. Kernels and biases are separate parameter groups, because weight decay
applies only to the kernels. Prints the accuracy on test images, the final loss scale, the size of Adafactor's state,
and the size that Adam's state would have.
"""

import argparse

import sklearn.datasets
import tensorflow as tf

import tf_lossscale

# The first 1347 of the 1797 images are for training, and the remaining images are for testing.
SEEN = 1347


def digits():
    """Return (images, labels) for training and (images, labels) for testing. Pixel values range from 0 to 1."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    return (images[:SEEN], labels[:SEEN]), (images[SEEN:], labels[SEEN:])


def network():
    """Return a network that computes in float16. Its variables and logits are float32."""
    layers, half = tf.keras.layers, "mixed_float16"
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu", dtype=half),
            layers.MaxPooling2D(dtype=half),
            layers.Flatten(dtype=half),
            layers.Dense(256, activation="relu", dtype=half),
            layers.Dense(10, dtype=half),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def bytes_of(variables):
    """Return the total size of the variables in bytes."""
    return sum(v.numpy().nbytes for v in variables)


def main(arguments=None):
    """Train the network. Return its accuracy on test images, and the optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(arguments).epochs

    tf.keras.utils.set_random_seed(0)
    model = network()
    kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
    biases = [v for v in model.trainable_variables if len(v.shape) == 1]
    adafactor = tf_lossscale.optimizers.Adafactor(
        [{"params": kernels, "weight_decay": 0.01}, {"params": biases}], lr=0.05
    )
    # An initial scale of 2**24 is deliberately too high: the first steps overflow and lower it.
    optimizer = tf_lossscale.LossScaleOptimizer(adafactor, initial_scale=2**24)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    train, test = digits()
    model.fit(*train, batch_size=64, epochs=epochs, validation_data=test, verbose=0)
    accuracy = model.evaluate(*test, verbose=0)[1]
    print(
        f"accuracy {accuracy:.1%} after {int(optimizer.iterations)} steps; {int(optimizer.skipped_steps)} skipped, "
        f"loss scale now {float(optimizer.loss_scale):g}"
    )

    adam = tf.keras.optimizers.Adam()
    adam.build(model.trainable_variables)
    for name, size in (
        ("the parameters", bytes_of(model.trainable_variables)),
        ("Adafactor's state", bytes_of(adafactor.variables)),
        ("Adam's would be", bytes_of(adam.variables)),
    ):
        print(f"{name:18} {size:9,} bytes")
    return accuracy, optimizer


if __name__ == "__main__":
    main()
