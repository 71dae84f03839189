"""Runs a random training program in TensorFlow, with this package's loss scale optimizer."""

import tempfile

import numpy as np
import sonnet
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer
from tools.fuzz.comparison import Comparison
from tools.fuzz.loops import Loops
from tools.fuzz.program import ADAM, MOMENTUM, RATE, SCALED, SHAPES


def inner_optimizer(family, name, ema=None):
    """Return an optimizer. `name` is the name of an update rule, such as "adam". For `ema`, see `Program.ema`."""
    makers = family.optimizers
    averages = {} if ema is None else {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": ema or None}
    if family.name == "tf1":
        return {
            "sgd": lambda: makers.GradientDescentOptimizer(RATE),
            "momentum": lambda: makers.MomentumOptimizer(RATE, MOMENTUM),
            "adam": lambda: makers.AdamOptimizer(RATE, *ADAM.values()),
        }[name]()
    # Sonnet's SGD has no variables, so accessing its `variables` attribute would raise an error.
    if family.name == "sonnet":
        inner = {
            "sgd": lambda: makers.SGD(RATE),
            "momentum": lambda: makers.Momentum(RATE, MOMENTUM),
            "adam": lambda: makers.Adam(RATE, *ADAM.values()),
        }[name]()
        return sonnet.allow_empty_variables(inner)
    if name == "adam":
        return makers.Adam(RATE, **ADAM, **averages)
    return makers.SGD(RATE, momentum=MOMENTUM if name == "momentum" else 0.0, **averages)


class Machine(Loops):
    """Runs a random program in TensorFlow. Creates the program's variables, optimizer and training loops."""

    def __init__(self, program):
        self.family = next(family for family in ALL_FAMILIES if family.name == program.family)
        self.applies_by_position = program.family == "sonnet"
        strategy = strategies.get("mirrored_2" if program.mode == "mirrored" else "none")
        with (strategy or tf.distribute.get_strategy()).scope():
            variables = [
                tf.Variable(tf.ones(shape, dtype), name=f"v{i}")
                for i, (shape, dtype) in enumerate(zip(SHAPES, program.dtypes))
            ]
            optimizer = LossScaleOptimizer(
                inner_optimizer(self.family, program.inner, program.ema),
                **program.rules.arguments(),
                jit_compile=program.jit_compile,
            )
        super().__init__(program, variables, optimizer, strategy)

    def run(self, comparison, directory):
        """Take all steps. After each step, compare the state with the NumPy model.

        Args:
            comparison: a Comparison.
            directory: the directory for checkpoints.
        """
        for i, step in enumerate(self.program.steps):
            self.between(step.before, directory)
            try:
                self.call(step)
            except RuntimeError as error:
                if not self._is_ambiguous(error):
                    raise
            else:
                comparison.step(step)
            comparison.check(f"after step {i}")
        if self.program.ema is not None and comparison.expected.training.averages:
            with (self.strategy or tf.distribute.get_strategy()).scope():
                self.optimizer.finalize_variable_values()
            comparison.expected.training.finalize()
            comparison.check("after finalize_variable_values")

    def _is_ambiguous(self, error):
        """Return whether an error means that the optimizer cannot tell whether the gradients are scaled.

        Only a program in which one loop passes scaled gradients and another loop passes unscaled gradients may cause
        this error.
        """
        contracts = {loop.calls in SCALED for loop in self.program.loops}
        return len(contracts) == 2 and "one of two ways" in str(error)

    def between(self, what, directory):
        """Save the state, overwrite it and restore it.

        If `what` is "state", use the `state` and `set_state` methods. If `what` is "checkpoint", use a checkpoint.
        Otherwise do nothing.
        """
        if what == "state":
            state = self.optimizer.state()
            if self.program.rules.dynamic:
                self.optimizer.set_state({"loss_scale": 7.0, "dynamic_counter": 5})
            self.optimizer.set_state(state)
        elif what == "checkpoint":
            checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, variables=self.variables)
            path = checkpoint.write(f"{directory}/checkpoint")
            for variable in self.all_variables():
                variable.assign(tf.cast(tf.ones(variable.shape), variable.dtype))
            checkpoint.read(path).assert_existing_objects_matched()

    def state(self):
        """Return a dictionary of the loss scale and its counters."""
        return self.optimizer.state()

    def iterations(self):
        """Return the optimizer's step count on each replica."""
        return list(map(int, self.copies(self.optimizer.iterations)))

    def all_variables(self):
        """Return the trained variables and the optimizer's variables."""
        return [*self.variables, *self.optimizer.variables]

    def copies(self, variable):
        """Return the value of a variable on each replica."""
        if not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            # The `value` of a Keras 3 variable is a tf.Variable.
            variable = variable.value
        return [
            each.numpy()
            for each in (self.strategy.experimental_local_results(variable) if self.strategy else [variable])
        ]


def run(program):
    """Run a program in TensorFlow and in the NumPy model.

    Args:
        program: a Program.

    Raises:
        AssertionError: the results differ. The message names the step after which they differ.
    """
    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as directory:
        machine = Machine(program)
        machine.run(Comparison(machine, program), directory)
