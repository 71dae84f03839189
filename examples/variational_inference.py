"""Variational inference in float16: a Bayesian neural network on scikit-learn's handwritten digits.

    python examples/variational_inference.py [--steps 300]

Each weight is a normal distribution instead of a number. `tfp.math.minimize` trains the means and the
standard deviations of these distributions. Networks that are sampled from them classify the images in float16. The
evidence lower bound is multiplied by 1e-5, as if it were a minor term of a larger loss. Without loss scaling, the
gradients of the likelihood then underflow to zero in float16, and the posterior becomes equal to the prior.

The network is trained three times: in float32, in float16 without loss scaling, and in float16 with loss scaling. For
each run, the script prints the loss per image; the root mean square distance of the first layer's posterior means from
the prior means, in standard deviations of the prior; and the accuracy on test images, averaged over sampled networks.
"""

import argparse
import itertools

import sklearn.datasets
import tensorflow as tf
import tensorflow_probability as tfp

import tf_lossscale

tfd = tfp.distributions
# The sizes of the layers: 64 pixels, 32 hidden units and 10 digits.
SIZES = (64, 32, 10)
# The first 1347 of the 1797 images are for training, and the remaining images are for testing.
SEEN = 1347
WEIGHT = 1e-5


def digits():
    """Return the images, as rows of 64 roughly standardized pixels, and their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images - images.mean(axis=0)) / (images.std(axis=0) + 1.0)
    return tf.constant(images, tf.float32), tf.constant(labels, tf.int32)


def shapes():
    """Return the shape of each layer's weight matrix. The last row of a weight matrix is the bias."""
    return [(fan_in + 1, fan_out) for fan_in, fan_out in itertools.pairwise(SIZES)]


def prior():
    """Return the prior: for each weight, a normal distribution around zero."""
    return tfd.JointDistributionSequential(
        [tfd.Independent(tfd.Normal(tf.zeros(shape), shape[0] ** -0.5), 2) for shape in shapes()]
    )


def posterior():
    """Return the posterior: for each weight, a normal distribution with trainable float32 parameters."""
    softplus = tfp.bijectors.Softplus()
    return tfd.JointDistributionSequential(
        [
            tfd.Independent(
                tfd.Normal(
                    tf.Variable(tf.random.stateless_normal(shape, (1, 2)) * shape[0] ** -0.5),
                    tfp.util.TransformedVariable(tf.fill(shape, 0.01), softplus),
                ),
                2,
            )
            for shape in shapes()
        ]
    )


def logits(images, layers, dtype):
    """Compute each sampled network's logits for each image, in the given dtype.

    `layers` contains the weights of each layer: one matrix, or a stack with one matrix for each sampled network.
    """
    values = tf.cast(images, dtype)
    for i, layer in enumerate(layers):
        matrix = tf.cast(layer, dtype)
        values = (tf.nn.relu(values) if i else values) @ matrix[..., :-1, :] + matrix[..., -1:, :]
    return values


def fit(steps, dtype, scaled):
    """Train a posterior. Return the loss per image, the distance from the prior, and the accuracy on test images."""
    images, labels = digits()
    p, q = prior(), posterior()

    def log_likelihood(layers):
        per_image = tfd.Categorical(logits(images[:SEEN], layers, dtype)).log_prob(labels[:SEEN])
        return tf.cast(tf.reduce_mean(per_image), tf.float32)

    def loss_fn(seed=None):
        layers = q.sample(seed=seed)
        return -WEIGHT * (log_likelihood(layers) + (p.log_prob(layers) - q.log_prob(layers)) / SEEN)

    # Use a tiny epsilon, because Adam's default of 1e-7 is much larger than the gradients of this loss.
    optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-16)
    if scaled:
        optimizer = tf_lossscale.LossScaleOptimizer(optimizer)
        loss_fn = optimizer.scale_inside(loss_fn)
    tfp.math.minimize(loss_fn, num_steps=steps, optimizer=optimizer, seed=(3, 4))

    draws = q.sample(20, seed=(5, 6))
    right = tf.argmax(logits(images[SEEN:], draws, tf.float32), axis=-1, output_type=tf.int32) == labels[SEEN:]
    accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
    far = tf.sqrt(tf.reduce_mean((q.mean()[0] / p.stddev()[0]) ** 2))
    return float(-log_likelihood(q.sample(seed=(7, 8)))), float(far), float(accuracy)


def main(arguments=None):
    """Train in float32, in float16, and in float16 with loss scaling. Return a dictionary of the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(arguments).steps
    accuracies = {}
    for name, dtype, scaled in (
        ("float32", tf.float32, False),
        ("float16 without scaling", tf.float16, False),
        ("float16 with scaling", tf.float16, True),
    ):
        loss, far, accuracies[name] = fit(steps, dtype, scaled)
        print(f"{name:24}  loss {loss:.3f}  means at {far:.2f} deviations  accuracy {accuracies[name]:.1%}")
    return accuracies


if __name__ == "__main__":
    main()
