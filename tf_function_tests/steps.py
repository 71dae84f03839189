"""Compiled training steps as StableHLO text, for compilers and devices that TensorFlow itself does not reach here."""

import re

import numpy as np
import tensorflow as tf

from tests.families import ALL_FAMILIES, tf_keras
from tf_lossscale import LossScaleOptimizer, SharedLossScale

BATCH = tf.TensorSpec([32, 32], tf.float32)


class Step:
    """A float16 training step of a network of two dense layers, by a wrapped Adam of the optimizer family of a name.

    Subclasses have other networks and loops.
    """

    SHAPES = ([32, 32], [32, 32])
    GROWTH_STEPS = 2

    def __init__(self, family):
        self._family = next(each for each in ALL_FAMILIES if each.name == family)
        self._weights = [tf.Variable(tf.zeros(shape), name=f"weight_{i}") for i, shape in enumerate(self.SHAPES)]
        self._optimizers = self._made_optimizers()
        tf.function(self._train, input_signature=[BATCH]).get_concrete_function()  # makes all variables
        self._compiled = tf.function(self._train, input_signature=[BATCH], jit_compile=True)
        self._variables = self._captured()

    def _made_optimizers(self):
        return [LossScaleOptimizer(self._family.adam(), dynamic_growth_steps=self.GROWTH_STEPS)]

    def _loss(self, batch):
        values = tf.cast(batch, tf.float16)
        for weight in self._weights:
            values = tf.nn.relu(tf.matmul(values, tf.cast(weight, tf.float16)))
        return tf.reduce_mean(tf.cast(values, tf.float32) ** 2)

    def _train(self, batch):
        (optimizer,) = self._optimizers
        with tf.GradientTape() as tape:
            loss = self._loss(batch)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, self._weights))
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

    def types(self):
        """The shape and the dtype of each argument of the compiled program."""
        return [[list(each.shape), tf.as_dtype(each.dtype).name] for each in (BATCH, *self._variables)]

    def stablehlo(self):
        """The text that TensorFlow's compiler makes of the step."""
        text = self._compiled.experimental_get_compiler_ir(tf.zeros(BATCH.shape))(stage="stablehlo")
        # TensorFlow's exporter leaves an operation behind that other compilers do not know: a plain copy.
        return text.replace("mhlo.copy", "stablehlo.optimization_barrier")

    def values(self, scale):
        """A batch, and values for the variables: weights that keep the signal's size, a state as in mid-training."""
        rng = np.random.default_rng(0)
        made = [rng.standard_normal(BATCH.shape, np.float32)]
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


WRAPPERS = {
    "bare": lambda adam: adam,
    "tf-lossscale": LossScaleOptimizer,
    "its own wrapper": lambda adam: tf_keras.mixed_precision.LossScaleOptimizer(adam),
}


class Update(Step):
    """The step of Adam of tf_keras on variables of some shapes: bare, with this package's wrapper or with its own."""

    def __init__(self, shapes, wrapper):
        self.SHAPES, self._wrapper = shapes, wrapper
        super().__init__("tf_keras")

    def _made_optimizers(self):
        return [WRAPPERS[self._wrapper](self._family.adam())]

    def _train(self, batch):
        (optimizer,) = self._optimizers
        gradients = [tf.zeros(shape) + batch[0, 0] for shape in self.SHAPES]
        if self._wrapper != "bare":
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, self._weights))
        return batch[0, 0]
