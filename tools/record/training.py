"""The training loop of a recorded case, for any wrapper.

The recorders run it with an original's wrapper, and the tests with this package's.
"""

import contextlib

import numpy as np
import tensorflow as tf

from .values import array

NAMES = ("w0", "w1", "w2")


class Replay:
    """The variables, the optimizer and the training step of one recorded case.

    Subclasses define how to create the optimizer and how to read its state.

    The loss is the sum over all variables of `reduce_sum(variable * gradient)`. For a sparse gradient,
    the loss gathers rows of the variable.

    Args:
        case: a case of a recording's `traces`.
        initial: the recording's `initial_variables`.
    """

    #: Whether the loop passes scaled gradients to the optimizer, as Keras 3 requires.
    keras3 = False

    def __init__(self, case, initial):
        self.case = case
        self.dtype = case.get("var_dtype", "float32")
        self.names = [name for name in NAMES if name in initial]
        self.variables = [self.variable(array(initial[name], self.dtype), name) for name in self.names]
        self.optimizer = self.wrap(case)
        self.loss_dtype = case.get("loss_dtype", self.dtype)
        self.how = case["how"]
        self._functions = {}

    def wrap(self, case):
        raise NotImplementedError

    def variable(self, value, name):
        """Create a variable as users of the library do."""
        return tf.Variable(value, name=name)

    def scale(self):
        """Return the loss scale, which is a tensor or variable."""
        return self.optimizer.loss_scale

    def counter(self):
        """Return the counter of finite steps, a tensor or variable. If the scale is fixed, return None."""
        return self.optimizer.dynamic_counter if self.optimizer.dynamic else None

    def step(self, grads):
        """Take one step with the recorded gradients."""
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
        kinds = tuple(kinds)
        if self.how.endswith("_function") and kinds not in self._functions:
            # TensorFlow 2's graph optimizer reorders products by the names of nodes. The recorded order results if the
            # function's arguments sort before `gradient_tape`, the name of the gradients' nodes.
            self._functions[kinds] = tf.function(lambda *g: self._step(kinds, g))
        with np.errstate(over="ignore"):
            self._functions[kinds](*tensors) if kinds in self._functions else self._step(kinds, tensors)

    def loss(self, kinds, tensors):
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
        gradients = tape.gradient(loss, [v if isinstance(v, tf.Variable) else v.value for v in variables])
        if self.keras3 and self.how.startswith("minimize"):
            optimizer.apply(gradients, variables)
        elif self.keras3:
            optimizer.apply_gradients(zip(gradients, variables))
        else:
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables))

    def state(self):
        """Return the values that are recorded after each step."""
        counter = self.counter()
        return dict(
            zip(self.names, [v.numpy() for v in self.variables]),
            loss_scale=float(self.scale()),
            dynamic_counter=None if counter is None else int(counter),
            iterations=int(self.optimizer.iterations),
        )

    def close(self):
        """Leave the graph, if the case runs in one."""


class GraphReplay(Replay):
    """A `Replay` in a TF1 graph with a Session."""

    def __init__(self, case, initial):
        self._stack = contextlib.ExitStack()
        self.graph = tf.Graph()
        self._stack.enter_context(self.graph.as_default())
        self.session = self._stack.enter_context(tf.compat.v1.Session())
        super().__init__(case, initial)
        self._steps, self._read = {}, None

    def close(self):
        self._stack.close()

    def step(self, grads):
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
        if self._read is None:
            counter = {} if self.counter() is None else {"dynamic_counter": self.counter()}
            self._read = dict(
                zip(self.names, self.variables),
                loss_scale=self.scale(),
                iterations=self.optimizer.iterations,
                **counter,
            )
        return dict({"dynamic_counter": None}, **self.session.run(self._read))


def steps(replay, events):
    """Take one step for each event. Yield the state after each step."""
    try:
        for event in events:
            replay.step(event["grads"])
            yield replay.state()
    finally:
        replay.close()
