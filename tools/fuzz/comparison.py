"""Compares the results of a random training program in TensorFlow with the results of a NumPy model."""

import numpy as np
import tensorflow as tf

from tools.fuzz import model
from tools.fuzz.changes import CHANGES
from tools.fuzz.program import ADAM, LAZY, MOMENTUM, RATE, SCALED, SHAPES

#: Maps each dtype to the largest tolerated difference between a TensorFlow variable and its value in the NumPy model.
#: The difference is relative to the largest value that the variable has had so far.
TOLERANCES = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 2.0**-19, "float64": 2.0**-19}


def inner_model(family, name):
    """Return the NumPy implementation of an optimizer. `name` is the update rule, for example "adam"."""
    if name == "adam":
        return model.Adam(RATE, **ADAM, hat=family.name == "sonnet", lazy=family.name == "sonnet")
    return model.SGD(RATE, MOMENTUM if name == "momentum" else 0.0, lazy=family.name in LAZY)


def changed(names, gradients, number):
    """Apply the named changes to NumPy gradients, one after another."""
    for name in names:
        gradients = CHANGES[name].model(gradients, number)
    return gradients


class Model:
    """Runs a random training program in NumPy. The result is the reference for the run in TensorFlow."""

    def __init__(self, program, family):
        self.program = program
        values = [np.ones(shape) for shape in SHAPES[: len(program.dtypes)]]
        averages = None if program.ema is None else model.Averages(program.ema, starts_late=family.name == "keras3")
        self.training = model.Training(program.rules, inner_model(family, program.inner), values, averages)
        self.adam_sees_skipped = family.counts

    def call(self, step):
        """Take the step in NumPy as many times as the training loop repeats it."""
        loop = self.program.loops[step.loop]
        times = {"no": 1, "if": int(step.number > 1), "while": step.number}[loop.repeated]
        for _ in range(times):
            of_replicas = [self._gradients(loop, step, replica) for replica in range(self.program.replicas)]
            self.training.step(of_replicas, self.adam_sees_skipped and loop.calls not in SCALED)

    def _gradients(self, loop, step, replica):
        values, rows = self.program.gradients(step)
        found = [None if i == loop.missing else value[replica] for i, value in enumerate(values)]
        if loop.sparse and found[1] is not None:
            found[1] = model.Rows(found[1], rows[replica])
        scale = self.training.loss_scale.scale
        found = [model.scaled(g, scale, tf.as_dtype(d).as_numpy_dtype) for g, d in zip(found, self.program.dtypes)]
        found = [model.unscaled(g, scale) for g in changed(loop.scaled, found, step.number)]
        return changed(loop.unscaled, found, step.number)


class Comparison:
    """Compares a program's run in TensorFlow with the NumPy model, step by step.

    Args:
        machine: the object that runs the program in TensorFlow. It has the attributes `family` and `variables` and the
            methods `state()`, `iterations()`, `copies(variable)` and `all_variables()`.
        program: the random training program.
    """

    def __init__(self, machine, program):
        self.machine, self.program = machine, program
        self.expected = Model(program, machine.family)
        self._sizes = [1.0] * len(program.dtypes)
        self._tolerances = [TOLERANCES[dtype] for dtype in program.dtypes]
        if any("clip_by_norm" in loop.unscaled for loop in program.loops):
            # Clipping by the global norm spreads the rounding error of a half-precision variable to all variables.
            self._tolerances = [max(self._tolerances)] * len(program.dtypes)

    def step(self, step):
        """Take a step in the NumPy model."""
        before = self.expected.training.values
        self.expected.call(step)
        for k, (old, new) in enumerate(zip(before, self.expected.training.values)):
            self._sizes[k] = max(self._sizes[k], np.abs(old).max(), np.abs(new).max())

    def check(self, where):
        """Raise an AssertionError if the state in TensorFlow differs from the state of the NumPy model.

        Args:
            where: the beginning of the error's message, such as "after step 3".
        """
        machine, training = self.machine, self.expected.training
        scale, got = training.loss_scale, machine.state()
        wanted = {
            "loss_scale": float(scale.scale),
            "dynamic_counter": scale.good,
            "bad_steps": scale.bad,
            "total_steps": scale.total,
            "skipped_steps": scale.skipped,
        }
        for name, value in got.items():
            assert wanted.get(name, value) == value, f"{where}: {name} is {value}, not {wanted[name]}"
        if machine.family.counts:
            assert set(machine.iterations()) == {training.iterations}, f"{where}: {machine.iterations()} iterations"
        for variable in machine.all_variables():
            for copy in machine.copies(variable):
                assert np.isfinite(np.asarray(copy, np.float64)).all(), f"{where}: {variable}"
        for i, (variable, value) in enumerate(zip(machine.variables, training.values)):
            atol = self._tolerances[i] * self._sizes[i]
            for copy in machine.copies(variable):
                found = np.asarray(copy, np.float64).reshape(value.shape)
                np.testing.assert_allclose(found, value, rtol=0, atol=atol, err_msg=f"{where}: variable {i}")
            # Copy TensorFlow's value into the NumPy model, so that rounding errors do not accumulate over the steps.
            training.values[i] = found
