"""Compiled training steps as StableHLO text, for compilers and devices that TensorFlow itself does not reach here."""

import re

import numpy as np
import tensorflow as tf

from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer, SharedLossScale

BATCH = 32


class Step:
    """A float16 training step of a network of dense layers, by Adam of one optimizer family.

    Args:
        family: the family's name.
        wrapped: whether a LossScaleOptimizer is around the optimizer.
        layers: their number.
        width: their size.
        growth_steps: of the loss scale.
    """

    def __init__(self, family, wrapped=True, layers=2, width=32, growth_steps=2):
        family = next(each for each in ALL_FAMILIES if each.name == family)
        self._weights = [tf.Variable(tf.zeros([width, width]), name=f"weight_{i}") for i in range(layers)]
        self._family = family
        self._batch = tf.TensorSpec([BATCH, width], tf.float32)
        self._wrapped = wrapped
        self._optimizers = self._made_optimizers(growth_steps)
        tf.function(self._train, input_signature=[self._batch]).get_concrete_function()  # makes all variables
        self._compiled = tf.function(self._train, input_signature=[self._batch], jit_compile=True)
        self._variables = self._captured()

    def _made_optimizers(self, growth_steps):
        inner = self._family.adam()
        return [LossScaleOptimizer(inner, dynamic_growth_steps=growth_steps) if self._wrapped else inner]

    def _loss(self, batch):
        values = tf.cast(batch, tf.float16)
        for weight in self._weights:
            values = tf.nn.relu(tf.matmul(values, tf.cast(weight, tf.float16)))
        return tf.reduce_mean(tf.cast(values, tf.float32) ** 2)

    def _train(self, batch):
        (optimizer,) = self._optimizers
        with tf.GradientTape() as tape:
            loss = self._loss(batch)
            scaled = optimizer.get_scaled_loss(loss) if self._wrapped else loss
        gradients = tape.gradient(scaled, self._weights)
        if self._wrapped:
            gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, self._weights))
        else:
            self._family.apply(optimizer, gradients, self._weights)
        return loss

    def _captured(self):
        """The variables in the order in which the compiled program takes them, after the batch."""
        graph = self._compiled.get_concrete_function().graph
        slots = []
        for optimizer in self._optimizers:
            inner = optimizer.inner_optimizer if self._wrapped else optimizer
            slots += inner.variables() if callable(inner.variables) else inner.variables
        by_handle = {id(variable.handle): variable for variable in (*graph.variables, *slots)}
        return [by_handle[id(outside)] for outside, _ in graph.captures]

    @property
    def parameters(self):
        """(name, shape, dtype, value if it is a scalar) of what the program takes."""
        variables = [
            (
                f"{i}:{variable.name.split(':')[0]}",
                list(variable.shape),
                tf.as_dtype(variable.dtype).name,
                None if len(variable.shape) else np.asarray(variable).item(),
            )
            for i, variable in enumerate(self._variables)
        ]
        return [("batch", list(self._batch.shape), "float32", None), *variables]

    def stablehlo(self):
        """The text that TensorFlow's compiler makes of the step."""
        batch = tf.zeros(self._batch.shape)
        text = self._compiled.experimental_get_compiler_ir(batch)(stage="stablehlo")
        # TensorFlow's exporter leaves an operation behind that other compilers do not know: a plain copy.
        return text.replace("mhlo.copy", "stablehlo.optimization_barrier")

    def values(self, scale, seed=0):
        """Values for the parameters, as NumPy arrays."""
        return values(self.parameters, scale, seed)

    def __call__(self, parameters):
        """The parameters after the step and the loss, by TensorFlow without XLA."""
        for variable, value in zip(self._variables, parameters[1:]):
            variable.assign(value)
        loss = tf.function(self._train)(tf.constant(parameters[0]))
        return [variable.numpy() for variable in self._variables], loss.numpy()


class SharedStep(Step):
    """The same with an optimizer for each layer; all of them share one loss scale."""

    def _made_optimizers(self, growth_steps):
        self._shared = SharedLossScale(dynamic_growth_steps=growth_steps)
        return [LossScaleOptimizer(self._family.adam(), loss_scale=self._shared) for _ in self._weights]

    def _train(self, batch):
        with tf.GradientTape(persistent=True) as tape:
            loss = self._loss(batch)
            scaled = [optimizer.get_scaled_loss(loss) for optimizer in self._optimizers]
        with self._shared.together():
            for optimizer, weight, each in zip(self._optimizers, self._weights, scaled):
                gradients = optimizer.get_unscaled_gradients(tape.gradient(each, [weight]))
                optimizer.apply_gradients(zip(gradients, [weight]))
        return loss


def values(parameters, scale, seed=0):
    """Values for a step's parameters: weights that keep the signal's size, a state as in mid-training."""
    rng = np.random.default_rng(seed)
    made = []
    for name, shape, dtype, scalar in parameters:
        if shape:
            value = rng.standard_normal(shape, np.float32) * np.float32(1 if name == "batch" else shape[-1] ** -0.5)
            made.append(np.abs(value) if re.search(r"/v|v/|velocity", name) else value)
        else:
            made.append(np.asarray(scale if "loss_scale" in name else scalar, dtype))
    return made
