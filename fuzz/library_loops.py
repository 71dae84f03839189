"""Runs random training programs with Keras's `fit`, with TensorFlow Probability's `minimize` or in a TF1 session."""

import numpy as np
import tensorflow as tf

from fuzz.machine import Machine, inner_optimizer
from fuzz.program import Step
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer


class Whole:
    """Base class for running all steps of a program in one library call. The program has one variable of shape (2,)."""

    def __init__(self, program):
        self.program = program
        self.family = next(family for family in ALL_FAMILIES if family.name == program.family)
        self.optimizer = LossScaleOptimizer(
            inner_optimizer(self.family, program.inner, program.ema),
            **program.rules.arguments(),
            jit_compile=program.jit_compile,
        )
        self.gradients = np.stack([program.gradients(step)[0][0][0] for step in program.steps])

    def state(self):
        return self.optimizer.state()

    def iterations(self):
        return [int(self.optimizer.iterations)]

    def copies(self, variable):
        return [np.asarray(variable)]

    def all_variables(self):
        return [*self.variables, *self.optimizer.variables]


class Fit(Whole):
    """Runs a program with `fit`. Each training example is one step, and the model's gradient equals the example."""

    def __init__(self, program):
        super().__init__(program)
        keras = self.family.keras
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.model = keras.Sequential([keras.layers.Input((2,)), layer])
        self.model.compile(
            self.optimizer,
            lambda y, prediction: prediction[:, 0],
            steps_per_execution=program.at_once,
            jit_compile=program.mode == "fit_compiled",
        )
        self.variables = list(self.model.trainable_variables)

    def run(self, comparison, directory):
        """Train the model. Whenever `fit` calls its callbacks, compare the state with the NumPy model."""
        steps, done = self.program.steps, []

        def on_train_batch_end(batch, logs):
            for step in steps[len(done) : batch + 1]:
                comparison.step(step)
                done.append(step)
            comparison.check(f"after step {batch} of fit")

        callback = self.family.keras.callbacks.LambdaCallback(on_train_batch_end=on_train_batch_end)
        x, y = self.gradients, np.zeros(len(self.gradients), np.float32)
        self.model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])
        assert len(done) == len(steps), f"fit ended after {len(done)} steps"


class Probability(Whole):
    """Runs a program with TensorFlow Probability's `minimize`.

    The loss scale is compared after every step. The variable is compared only after the last step.
    """

    def __init__(self, program):
        super().__init__(program)
        self.variables = [tf.Variable(tf.ones(2))]

    def run(self, comparison, directory):
        """Minimize the loss. Compare the loss scale after each step, and the variable only after the last step."""
        [variable], gradients, calls = self.variables, tf.constant(self.gradients), tf.Variable(-1, trainable=False)
        import tensorflow_probability as tfp

        scales = tfp.math.minimize(
            self.optimizer.scale_inside(lambda: tf.reduce_sum(variable * tf.gather(gradients, calls.assign_add(1)))),
            len(self.program.steps),
            self.optimizer,
            trainable_variables=self.variables,
            trace_fn=lambda quantities: tf.identity(self.optimizer.loss_scale),
        )
        expected = []
        for step in self.program.steps:
            comparison.step(step)
            expected.append(comparison.expected.training.loss_scale.scale)
        np.testing.assert_array_equal(scales.numpy(), expected, "the scale after each step")
        comparison.check("after minimize")


class Session(Machine):
    """Runs a program in a `tf.compat.v1.Session`. Its training steps are operations in a graph."""

    def __init__(self, program):
        self._graph, self._inputs = tf.Graph(), None
        with self._graph.as_default():
            super().__init__(program)
            if program.rules.dynamic:
                names = ("loss_scale", "dynamic_counter", "skipped_steps")
                self._state = {name: tf.identity(getattr(self.optimizer, name)) for name in names}
            self._session = tf.compat.v1.Session()
            self._session.run(tf.compat.v1.global_variables_initializer())

    def _traced(self, loop):
        gradients, rows = self.program.gradients(Step(loop=self.program.loops.index(loop)))
        inputs = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in (*gradients, rows, np.int32(0))]
        return inputs, self._step(loop, *(value[0] for value in inputs[:-1]), inputs[-1])

    def call(self, step):
        gradients, rows = self.program.gradients(step)
        inputs, operation = self._calls[step.loop]
        self._session.run(operation, dict(zip(inputs, (*gradients, rows, step.number))))

    def state(self):
        return self._session.run(self._state) if self.program.rules.dynamic else {}

    def copies(self, variable):
        return [self._session.run(variable)]

    def run(self, comparison, directory):
        """Take the steps one by one. Compare the state with the NumPy model after each step."""
        with self._graph.as_default(), self._session:
            for i, step in enumerate(self.program.steps):
                self.call(step)
                comparison.step(step)
                comparison.check(f"after step {i} of the session")
