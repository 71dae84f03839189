"""The expected results of a random training program: a bare optimizer, and a NumPy model of the loss scale.

The model of the loss scale implements the rules as the documentation states them. It shares no code with the package.
"""

import tempfile

import numpy as np
import tensorflow as tf

from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer
from tools.fuzz.changes import DROPPING, HIDING_OVERFLOWS, MIXING, are_traced, changed, of_values
from tools.fuzz.machine import Machine, inner_optimizer, new_variables
from tools.fuzz.program import COUNTING, SCALED

#: Maps each dtype to the largest tolerated difference between a trained variable and its expected value, because a
#: compiled step rounds differently. The difference is relative to the largest value that the variable has had so far.
TOLERANCES = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 2.0**-19, "float64": 2.0**-19}


def tolerances(program):
    """Return the tolerated difference for each of a program's variables."""
    found = [TOLERANCES[dtype] for dtype in program.dtypes]
    if any("clip_by_norm" in loop.unscaled for loop in program.loops):
        # Clipping by the global norm spreads the rounding error of a half-precision variable to all variables.
        return [max(found)] * len(found)
    return found


class LossScale:
    """The state machine of the loss scale: the scale and its counters."""

    def __init__(self, rules):
        self.rules = rules
        self.scale = np.float32(rules.initial_scale)
        self.good = self.bad = self.total = self.skipped = 0

    def step(self, finite):
        """Update the scale, depending on whether the gradients are finite. Return whether the step is applied."""
        rules = self.rules
        if not rules.dynamic:
            return True
        self.total += 1
        self.skipped += not finite
        if finite:
            self.good, self.bad = self.good + 1, 0
            if self.good >= rules.growth_steps:
                self.good = 0
                bigger = self.scale * np.float32(rules.growth_factor)
                if rules.max_scale is not None:
                    self.scale = min(bigger, np.float32(rules.max_scale))
                elif np.isfinite(bigger):
                    self.scale = bigger
        else:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= rules.hysteresis:
                self.bad = 0
                self.scale = max(self.scale * np.float32(rules.backoff_factor), np.float32(rules.min_scale))
        return finite


class Model:
    """Takes the steps of a random training program eagerly, with an optimizer that no loss scale optimizer wraps.

    Args:
        program: a Program.
        optimizers: the module of the inner optimizers.
    """

    def __init__(self, program, optimizers):
        self.program, self.loss_scale = program, LossScale(program.rules)
        self.variables, self.bare = new_variables(program), inner_optimizer(program, optimizers)
        if hasattr(self.bare, "build"):  # Keras's optimizers refuse variables that are added later
            self.bare.build(self.variables)
        self.steps, self._sizes = 0, [1.0] * len(program.dtypes)

    def step(self, step):
        """Take the step as many times as the training loop repeats it."""
        loop = self.program.loops[step.loop]
        times = {"no": 1, "if": int(step.number > 1), "while": step.number}[loop.repeated]
        for _ in range(times):
            self.steps += 1
            summed = self._summed(loop, step, loop.unscaled)
            showing = self._showing_overflows(loop)
            shown = summed if showing == [*loop.unscaled] else self._summed(loop, step, showing)
            finite = all(g is None or np.isfinite(np.float64(tf.convert_to_tensor(g))).all() for g in shown)
            if self.loss_scale.step(finite):
                self._apply(summed)
            else:
                self._skip(counts=self.program.family in COUNTING and loop.calls not in SCALED)

    def _showing_overflows(self, loop):
        """Return the changes to unscaled gradients without those that hide an overflow, but not from the loss scale.

        In a graph, a loss scale also sees the overflow of a gradient that is left out after a change that mixes all.
        """
        changes = [name for name in loop.unscaled if name not in HIDING_OVERFLOWS]
        is_traced = are_traced(self.program.mode, loop.calls)
        mixing = [i for i, name in enumerate(changes) if name in MIXING and is_traced]
        first = min(mixing, default=len(changes))
        return [*changes[:first], *(name for name in changes[first:] if name not in DROPPING)]

    def _summed(self, loop, step, changes):
        """Return the gradients of the step after some changes, summed over the replicas."""
        of_replicas = [self._gradients(loop, step, replica, changes) for replica in range(self.program.replicas)]
        return list(map(_sum, zip(*of_replicas)))

    def _gradients(self, loop, step, replica, changes):
        values, rows = self.program.gradients(step)
        scale, number = self.loss_scale.scale, tf.constant(step.number)
        scaled = [tf.cast(scale * g[replica], v.dtype) for g, v in zip(values, self.variables)]
        if loop.sparse:
            scaled[1] = tf.IndexedSlices(scaled[1], tf.constant(rows[replica]), self.variables[1].shape)
        if loop.missing is not None:
            scaled[loop.missing] = None
        unscaled = [
            of_values(lambda values: tf.cast(tf.cast(values, tf.float64) / np.float64(scale), values.dtype), g)
            for g in changed(loop.scaled, scaled, number)
        ]
        return changed(changes, unscaled, number)

    def _apply(self, gradients):
        before = [np.float64(variable) for variable in self.variables]
        if self.program.family == "sonnet":
            self.bare.apply(gradients, self.variables)
        else:
            self.bare.apply_gradients([pair for pair in zip(gradients, self.variables) if pair[0] is not None])
        for i, (old, variable) in enumerate(zip(before, self.variables)):
            self._sizes[i] = max(self._sizes[i], np.abs(old).max(), np.abs(np.float64(variable)).max())

    def _skip(self, counts):
        if self.program.ema is not None and self.program.family == "keras3" and int(self.bare.iterations) == 0:
            # In Keras 3, the averages start as the variables' values in the first step.
            for average, variable in zip(self.bare._model_variables_moving_average, self.variables):
                average.assign(variable)
        if counts:
            self.bare.iterations.assign_add(1)

    def check(self, machine, where):
        """Raise an AssertionError if a machine's state differs from that of the model.

        Args:
            machine: the Machine that takes the same steps.
            where: the beginning of the error's message, such as "after step 3".
        """
        scale = self.loss_scale
        wanted = {
            "loss_scale": float(scale.scale),
            "dynamic_counter": scale.good,
            "bad_steps": scale.bad,
            "total_steps": scale.total,
            "skipped_steps": scale.skipped,
        }
        for name, value in machine.optimizer.state().items():
            assert wanted.get(name, value) == value, f"{where}: {name} is {value}, not {wanted[name]}"
        if self.program.family in COUNTING:
            found, expected = {*map(int, machine.copies(machine.optimizer.iterations))}, {int(self.bare.iterations)}
            assert found == expected, f"{where}: {found} iterations, not {expected}"
        for variable in machine.all_variables():
            for copy in machine.copies(variable):
                assert np.isfinite(np.float64(copy)).all(), f"{where}: {variable}"
        compared = zip(self.variables, machine.variables, tolerances(self.program), self._sizes)
        for i, (expected, got, tolerance, size) in enumerate(compared):
            for copy in machine.copies(got):
                values, message = (np.float64(copy), np.float64(expected)), f"{where}: variable {i}"
                np.testing.assert_allclose(*values, rtol=0, atol=tolerance * size, err_msg=message)
            # The model goes on from the machine's value, so that rounding errors do not accumulate over the steps.
            expected.assign(copy)


def _sum(gradients):
    """Return the sum of the replicas' gradients of a variable, as each library's optimizer receives it."""
    if len(gradients) == 1 or gradients[0] is None:
        return gradients[0]
    if isinstance(gradients[0], tf.IndexedSlices):
        values, indices = zip(*((gradient.values, gradient.indices) for gradient in gradients))
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradients[0].dense_shape)
    return tf.add_n(gradients)


def run(program):
    """Run a program with this package's loss scale optimizer and with the model. Compare them after each step.

    Args:
        program: a Program.

    Raises:
        AssertionError: the results differ. The message names the step after which they differ.
    """
    optimizers = next(family.optimizers for family in ALL_FAMILIES if family.name == program.family)
    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as directory:
        machine, model = Machine(program, optimizers, LossScaleOptimizer), Model(program, optimizers)
        for i, step in enumerate(program.steps):
            machine.between(step.before, directory)
            try:
                machine.call(step)
            except RuntimeError as error:
                if not _is_ambiguous(error, program):
                    raise
            else:
                model.step(step)
            model.check(machine, f"after step {i}")
        if program.ema is not None and model.steps:
            with (machine.strategy or tf.distribute.get_strategy()).scope():
                machine.optimizer.finalize_variable_values()
            model.bare.finalize_variable_values(model.variables)
            model.check(machine, "after finalize_variable_values")


def _is_ambiguous(error, program):
    """Return whether an error means that the optimizer cannot tell whether the gradients are scaled.

    Only a program in which one loop passes scaled gradients and another loop passes unscaled gradients may cause this
    error.
    """
    contracts = {loop.calls in SCALED for loop in program.loops}
    return len(contracts) == 2 and "one of two ways" in str(error)
