"""Compiled training steps as StableHLO text, for compilers and devices that TensorFlow itself does not reach here."""

import re

import numpy as np
import tensorflow as tf

from tests.families import ALL_FAMILIES, tf_keras
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tools.benchmarks import workloads

BATCH = tf.TensorSpec([32, 32], tf.float32)
WRAPPERS = {
    "bare": lambda adam, **_: adam,
    "tf-lossscale": LossScaleOptimizer,
    "its own wrapper": tf_keras.mixed_precision.LossScaleOptimizer,
}


class Step:
    """A float16 training step of a network of two dense layers, by an Adam of the optimizer family of a name.

    Adam is bare, or has the wrapper of a name. Subclasses have other networks and loops.
    """

    SHAPES = ([32, 32], [32, 32])
    GROWTH_STEPS = 2

    def __init__(self, family, wrapper="tf-lossscale"):
        self._wrapper = WRAPPERS[wrapper]
        self._family = next(each for each in ALL_FAMILIES if each.name == family)
        self._weights = [tf.Variable(tf.zeros(shape), name=f"weight_{i}") for i, shape in enumerate(self.SHAPES)]
        self._optimizers = self._made_optimizers()
        tf.function(self._train, input_signature=[BATCH]).get_concrete_function()  # makes all variables
        self._compiled = tf.function(self._train, input_signature=[BATCH], jit_compile=True)
        self._variables = self._captured()

    def _made_optimizers(self):
        return [self._wrapper(self._family.adam(), dynamic_growth_steps=self.GROWTH_STEPS)]

    def _loss(self, batch):
        values = tf.cast(batch, tf.float16)
        for weight in self._weights:
            values = tf.nn.relu(tf.matmul(values, tf.cast(weight, tf.float16)))
        return tf.reduce_mean(tf.cast(values, tf.float32) ** 2)

    def _train(self, batch):
        (optimizer,) = self._optimizers
        wrapped = hasattr(optimizer, "get_scaled_loss")
        with tf.GradientTape() as tape:
            loss = self._loss(batch)
            scaled = optimizer.get_scaled_loss(loss) if wrapped else loss
        gradients = tape.gradient(scaled, self._weights)
        if wrapped:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, self._weights))
        return loss

    def _captured(self):
        """The variables in the order in which the compiled program takes them, after the batch."""
        graph = self._compiled.get_concrete_function().graph
        slots = [
            slot for each in self._optimizers for slot in (each.weights if hasattr(each, "weights") else each.variables)
        ]
        by_handle = {id(variable.handle): variable for variable in (*graph.variables, *slots)}
        return [by_handle[id(outside)] for outside, _ in graph.captures]

    @property
    def names(self):
        """The names of the variables, which the program takes after the batch."""
        return [variable.name.split(":")[0] for variable in self._variables]

    def stablehlo(self):
        """The text that TensorFlow's compiler makes of the step."""
        text = self._compiled.experimental_get_compiler_ir(tf.zeros(BATCH.shape))(stage="stablehlo")
        # TensorFlow's exporter leaves an operation behind that other compilers do not know: a plain copy.
        return text.replace("mhlo.copy", "stablehlo.optimization_barrier")

    def values(self, scale, nan_at=()):
        """A batch with NaNs, and values for the variables: weights that keep the signal's size, a state in use."""
        rng = np.random.default_rng(0)
        made = [rng.standard_normal(BATCH.shape, np.float32)]
        made[0].flat[list(nan_at)] = np.nan
        for name, variable in zip(self.names, self._variables):
            if len(variable.shape) and tf.as_dtype(variable.dtype).is_floating:
                value = rng.standard_normal(variable.shape, np.float32) * np.float32(variable.shape[-1] ** -0.5)
                made.append(np.abs(value) if re.search(r"/v|v/|velocity", name) else value)
            else:
                made.append(
                    np.asarray(scale if "loss_scale" in name else variable, tf.as_dtype(variable.dtype).as_numpy_dtype)
                )
        return made

    def __call__(self, values):
        """The values of the variables after the step and the loss, by TensorFlow without XLA."""
        for variable, value in zip(self._variables, values[1:]):
            variable.assign(value)
        loss = tf.function(self._train)(tf.constant(values[0]))
        return [variable.numpy() for variable in self._variables], loss.numpy()


class SharedStep(Step):
    """The same with an optimizer for each layer; all of them share one loss scale."""

    def _made_optimizers(self):
        self._shared = SharedLossScale(dynamic_growth_steps=2)
        return [LossScaleOptimizer(self._family.adam(), loss_scale=self._shared) for _ in self._weights]

    def _train(self, batch):
        with tf.GradientTape(persistent=True) as tape:
            loss = self._loss(batch)
            scaled = [optimizer.get_scaled_loss(loss) for optimizer in self._optimizers]
        pairs = [
            (optimizer, zip(optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, [weight])), [weight]))
            for optimizer, weight, scaled_loss in zip(self._optimizers, self._weights, scaled)
        ]
        self._shared.apply_gradients(pairs)
        return loss


class Convnet(Step):
    """Two convolutions, a pooling and an embedding, whose gradient is sparse, on images of 8 x 4."""

    SHAPES = ([3, 3, 1, 16], [3, 3, 16, 16], [8, 256], [256, 8])

    def _loss(self, batch):
        first, second, _, dense = (tf.cast(weight, tf.float16) for weight in self._weights)
        values = tf.reshape(tf.cast(batch, tf.float16), [32, 8, 4, 1])
        values = tf.nn.relu(tf.nn.conv2d(values, first, 1, "SAME"))
        values = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(values, second, 1, "SAME")), [2, 1], [2, 1], "SAME")
        rows = tf.cast(tf.nn.embedding_lookup(self._weights[2], tf.range(32) % 4), tf.float16)
        values = tf.matmul(tf.reshape(values, [32, 256]) + rows, dense)
        return tf.reduce_mean(tf.cast(values, tf.float32) ** 2)


class Transformer(Step):
    """A block of attention and two dense layers on 32 positions of 32 values."""

    SHAPES = ([32, 96], [32, 32], [32, 64], [64, 32])

    def _loss(self, batch):
        project, join, widen, narrow = (tf.cast(weight, tf.float16) for weight in self._weights)
        values = tf.cast(batch, tf.float16)
        query, key, value = tf.split(tf.matmul(values, project), 3, axis=1)
        scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32) / 32**0.5
        values += tf.matmul(tf.matmul(tf.cast(tf.nn.softmax(scores), tf.float16), value), join)
        values += tf.matmul(tf.nn.gelu(tf.matmul(values, widen)), narrow)
        return tf.reduce_mean(tf.cast(values, tf.float32) ** 2)


class Run(Step):
    """Two hundred steps in one program. In three of them, all gradients overflow."""

    GROWTH_STEPS = 50

    def _train(self, batch):
        loss = tf.constant(0.0)
        for i in tf.range(200):
            overflows = tf.reduce_any(i == tf.constant([17, 90, 151]))
            loss = super()._train(tf.where(overflows, float("inf"), 0.1 * batch))
        return loss


class Update(Step):
    """Gradients of many shapes: each weight decays, and an element of the batch is added to its gradient."""

    def _loss(self, batch):
        shifts = tf.unstack(tf.reshape(batch, [-1])[: len(self._weights)])
        return tf.add_n([tf.reduce_sum((weight / 2 + shift) * weight) for weight, shift in zip(self._weights, shifts)])


class ManyShapes(Update):
    """The update of 200 variables of 1000 values."""

    SHAPES = workloads.shapes("200 x 1k")


class ResNetShapes(Update):
    """The update of the variables of a ResNet-50."""

    SHAPES = workloads.shapes(workloads.RESNET)


class ResNet(ResNetShapes):
    """A ResNet-50 on 32 images of 128 x 128."""

    def _loss(self, batch):
        weights = iter(self._weights)

        def convolved(values, stride=1):
            kernel, scale, offset = (next(weights) for _ in range(3))
            values = tf.cast(tf.nn.conv2d(values, tf.cast(kernel, tf.float16), stride, "SAME"), tf.float32)
            mean, variance = tf.nn.moments(values, [0, 1, 2])
            return tf.cast(tf.nn.batch_normalization(values, mean, variance, offset, 1 + scale, 1e-3), tf.float16)

        values = tf.image.resize(tf.reshape(batch, [32, 8, 4, 1]), [128, 128]) * tf.constant([1.0, 0.5, 0.25])
        values = tf.nn.relu(convolved(tf.cast(values, tf.float16), 2))
        values = tf.nn.max_pool2d(values, 3, 2, "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                inner = tf.nn.relu(convolved(values, stride))
                inner = convolved(tf.nn.relu(convolved(inner)))
                values = tf.nn.relu(inner + (values if block else convolved(values, stride)))
        logits = tf.matmul(tf.cast(tf.reduce_mean(values, [1, 2]), tf.float32), next(weights))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(32), logits))


def repeated(kind, steps):
    """The class of steps, so that one program takes a number of them and returns no loss."""

    class Repeated(kind):
        GROWTH_STEPS = 2000

        def _made_optimizers(self):
            (optimizer,) = super()._made_optimizers()
            optimizer.learning_rate = 1e-4
            return [optimizer]

        def _train(self, batch):
            for _ in tf.range(steps):
                super()._train(batch)
            return batch[0, 0]

    return Repeated
