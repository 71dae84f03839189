"""Defines what the benchmarks train: lists of variables with fixed gradients, and small models."""

import itertools

import tensorflow as tf


def _resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of a ResNet-50's kernels, scales and offsets: 160 variables, without the last layer's bias."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                kernels.append((1, 1, channels, 4 * width))
            for kernel in kernels:
                shapes += [kernel, kernel[-1:], kernel[-1:]]
            channels = 4 * width
    return [*shapes, (2048, 1000)][-160:]


RESNET = "ResNet-50"
MODELS = ("convnet", "transformer")


def shapes(workload: str) -> list[tuple[int, ...]]:
    """Return the shapes of a workload's variables. "4 x 3k" means four variables of 3000 values each."""
    if workload == RESNET:
        return _resnet50()
    count, size = workload.split(" x ")
    return [(int(size.replace("k", "000").replace("M", "000000")),)] * int(count)


def variables(workload: str) -> list[tf.Variable]:
    """Create a workload's variables, and initialize them with zeros."""
    return [tf.Variable(tf.zeros(shape)) for shape in shapes(workload)]


def gradients(workload: str) -> list:
    """Return one random gradient for each variable in a workload."""
    return [tf.random.stateless_normal(shape, [i, 1]) for i, shape in enumerate(shapes(workload))]


def model(name: str):
    """Return a small model's variables and a function that computes the model's loss on one fixed batch."""
    return {"convnet": _convnet, "transformer": _transformer}[name]()


def _normal(*shape: int, seed: int) -> tf.Variable:
    return tf.Variable(tf.random.stateless_normal(shape, [seed, 3]) * 0.05)


def _convnet():
    widths = [3, 16, 32, 32, 64]
    kernels = [_normal(3, 3, a, b, seed=i) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    shifts = [tf.Variable(tf.zeros([b])) for b in widths[1:]]
    last = _normal(64, 10, seed=9)
    images = tf.random.stateless_normal([32, 32, 32, 3], [1, 4])
    labels = tf.random.stateless_uniform([32], [1, 5], maxval=10, dtype=tf.int32)

    def loss() -> tf.Tensor:
        x = images
        for i, (kernel, shift) in enumerate(zip(kernels, shifts)):
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=1 + i % 2, padding="SAME") + shift)
        logits = tf.reduce_mean(x, [1, 2]) @ last
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    return [*kernels, *shifts, last], loss


def _transformer():
    width, heads, length, words = 128, 4, 64, 1000
    table = _normal(words, width, seed=0)
    blocks = [[_normal(*shape, seed=10 * i + j) for j, shape in enumerate(_block(width))] for i in range(2)]
    tokens = tf.random.stateless_uniform([8, length + 1], [2, 5], maxval=words, dtype=tf.int32)

    def norm(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    def split(x: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.reshape(x, [-1, length, heads, width // heads]), [0, 2, 1, 3])

    def loss() -> tf.Tensor:
        x = tf.nn.embedding_lookup(table, tokens[:, :-1])
        for query, key, value, out, up, down in blocks:
            y = norm(x)
            weights = tf.nn.softmax(tf.matmul(split(y @ query), split(y @ key), transpose_b=True) / 5.7)
            mixed = tf.transpose(tf.matmul(weights, split(y @ value)), [0, 2, 1, 3])
            x += tf.reshape(mixed, [-1, length, width]) @ out
            x += tf.nn.gelu(norm(x) @ up) @ down
        logits = tf.matmul(norm(x), table, transpose_b=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits))

    return [table, *(kernel for block in blocks for kernel in block)], loss


def _block(width: int) -> list[tuple[int, int]]:
    return [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
