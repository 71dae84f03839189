"""Runs a recorded training trace on this package."""

import contextlib

import numpy as np
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests.conformance.recordings import array

# Recording -> the optimizers that it was made with.
OPTIMIZERS = {
    "lso_tf24": tf_keras.optimizers.legacy,
    "lso_tf28": tf_keras.optimizers.legacy,
    "lso_tfkeras221_legacy": tf_keras.optimizers.legacy,
    "lso_tfkeras221_new": tf_keras.optimizers,
    "keras3_lso": tf.keras.optimizers,
}


def stands_still(recording, scale):
    """Whether the original's weights stand still at a scale: its reciprocal is zero. Keras 3 divides.

    From then on weights are not compared with the recording; tests/core/test_quotients.py compares such steps with
    those of a bare optimizer.
    """
    return recording != "keras3_lso" and 2.0**126 < scale < np.inf


def wrapped(recording, case):
    """Returns the wrapped optimizer of a recorded case."""
    inner = getattr(OPTIMIZERS[recording], case["optimizer_class"])(**case["optimizer_kwargs"])
    return tf_lossscale.LossScaleOptimizer(inner, **case["config"])


class Replay:
    """Variables, optimizer and step of one recorded case."""

    wrap = staticmethod(wrapped)

    def __init__(self, recording, case, initial):
        self.case = case
        self.keras3 = recording == "keras3_lso"
        self.dtype = case.get("var_dtype", "float32")
        self.variables = [tf.Variable(array(initial[name], self.dtype), name=name) for name in ("w0", "w1", "w2")]
        self.optimizer = self.wrap(recording, case)
        self.loss_dtype = case.get("loss_dtype", self.dtype)
        self.how = case["how"]
        self._function = tf.function(self._step)

    def step(self, grads):
        """Takes one step with the recorded gradients."""
        kinds, tensors = [], []
        for g in grads:
            if g is None:
                kinds.append("none")
            elif isinstance(g, dict):
                kinds.append("slices")
                tensors += [tf.constant(g["indices"]), tf.constant(array(g["values"], self.dtype))]
            else:
                kinds.append("dense")
                tensors.append(tf.constant(array(g, self.dtype)))
        with np.errstate(over="ignore"):
            (self._function if self.how.endswith("_function") else self._step)(tuple(kinds), tensors)

    def loss(self, kinds, tensors):
        """sum_i reduce_sum(w_i * g_i), of gathered rows where the gradient is sparse."""
        tensors = iter(tensors)
        total = tf.constant(0.0, self.loss_dtype)
        for kind, variable in zip(kinds, self.variables):
            if kind == "none":
                continue
            rows = tf.gather(variable, next(tensors)) if kind == "slices" else variable
            factor = tf.cast(next(tensors), self.loss_dtype)
            total += tf.reduce_sum(tf.cast(rows, self.loss_dtype) * factor)
        return total

    def _step(self, kinds, tensors):
        optimizer, variables = self.optimizer, self.variables
        if self.how.startswith("minimize") and not self.keras3:
            optimizer.minimize(lambda: self.loss(kinds, tensors), variables)
            return
        scale = optimizer.scale_loss if self.keras3 else optimizer.get_scaled_loss
        with tf.GradientTape() as tape:
            loss = scale(self.loss(kinds, tensors))
        gradients = tape.gradient(loss, variables)
        if self.keras3 and self.how.startswith("minimize"):
            optimizer.apply(gradients, variables)
        elif self.keras3:
            optimizer.apply_gradients(zip(gradients, variables))
        else:
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables))

    def state(self):
        """Returns what the recordings have after each step."""
        optimizer = self.optimizer
        return {
            **{name: v.numpy() for name, v in zip(("w0", "w1", "w2"), self.variables)},
            "loss_scale": float(optimizer.loss_scale),
            "dynamic_counter": int(optimizer.dynamic_counter) if optimizer.dynamic else None,
            "iterations": int(optimizer.iterations),
        }


class GraphReplay(Replay):
    """The same in a legacy graph with a Session."""

    def __init__(self, recording, case, initial):
        self._stack = contextlib.ExitStack()
        self.graph = tf.Graph()
        self._stack.enter_context(self.graph.as_default())
        self.session = self._stack.enter_context(tf.compat.v1.Session())
        super().__init__(recording, case, initial)
        self._steps, self._read = {}, None

    def close(self):
        """Leaves the graph."""
        self._stack.close()

    def step(self, grads):
        """Takes one step with the recorded gradients."""
        kinds = tuple("none" if g is None else "dense" for g in grads)
        if kinds not in self._steps:
            feeds = [
                tf.compat.v1.placeholder(self.dtype, v.shape)
                for kind, v in zip(kinds, self.variables)
                if kind == "dense"
            ]
            operation = self.optimizer.minimize(lambda: self.loss(kinds, feeds), self.variables)
            self._steps[kinds] = feeds, operation
            new = [v for v in tf.compat.v1.global_variables() if not self._initialized(v)]
            self.session.run(tf.compat.v1.variables_initializer(new))
        feeds, operation = self._steps[kinds]
        values = [array(g, self.dtype) for g in grads if g is not None]
        self.session.run(operation, dict(zip(feeds, values)))

    def _initialized(self, variable):
        return bool(self.session.run(tf.compat.v1.is_variable_initialized(variable)))

    def state(self):
        """Returns what the recordings have after each step."""
        if self._read is None:  # more operations in the graph would have it optimized anew
            optimizer = self.optimizer
            self._read = {
                **dict(zip(("w0", "w1", "w2"), self.variables)),
                "loss_scale": optimizer.loss_scale,
                "iterations": optimizer.iterations,
                **({"dynamic_counter": optimizer.dynamic_counter} if optimizer.dynamic else {}),
            }
        return {"dynamic_counter": None, **self.session.run(self._read)}
