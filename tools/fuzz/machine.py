"""Runs a random training program with a loss scale optimizer, which may be this package's or another library's.

The module must also run on Python 3.8, which old releases of TensorFlow need.
"""

import functools

import tensorflow as tf

from tools.fuzz.loops import Loops
from tools.fuzz.program import ADAM, MOMENTUM, RATE, SHAPES


def new_variables(program):
    """Return new variables for a program to train."""
    return [tf.Variable(tf.ones(shape, dtype)) for shape, dtype in zip(SHAPES, program.dtypes)]


def inner_optimizer(program, optimizers):
    """Return a program's optimizer without a loss scale, from a module of optimizers."""
    if program.family == "tf1":
        makers = optimizers.GradientDescentOptimizer, optimizers.MomentumOptimizer, optimizers.AdamOptimizer
    else:
        makers = optimizers.SGD, getattr(optimizers, "Momentum", optimizers.SGD), optimizers.Adam
    make, arguments = dict(zip(("sgd", "momentum", "adam"), zip(makers, ((), (MOMENTUM,), ADAM))))[program.inner]
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": program.ema or None}
    optimizer = make(RATE, *arguments, **({} if program.ema is None else averages))
    if program.family == "sonnet":
        import sonnet

        # Sonnet's SGD has no variables, so accessing its `variables` attribute would raise an error.
        return sonnet.allow_empty_variables(optimizer)
    return optimizer


@functools.lru_cache(maxsize=1)
def mirrored():
    """Return this process's only MirroredStrategy. A second MirroredStrategy's collective operations would fail."""
    if len(tf.config.list_logical_devices("CPU")) < 2:
        raise RuntimeError("Several replicas need virtual CPUs: run `import conftest` before TensorFlow is used.")
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


class Machine(Loops):
    """A program's variables, optimizer and training loops.

    Args:
        program: a Program.
        optimizers: the module of the inner optimizers.
        wrapper: the class that wraps an inner optimizer.
    """

    def __init__(self, program, optimizers, wrapper):
        strategy = mirrored() if program.mode == "mirrored" else None
        with (strategy or tf.distribute.get_strategy()).scope():
            optimizer = wrapper(inner_optimizer(program, optimizers), **program.rules.arguments())
            super().__init__(program, new_variables(program), optimizer, strategy)

    def between(self, what, directory):
        """Do what precedes a step; see `Step.before`. Return a value to compare between two optimizers."""
        optimizer = self.optimizer
        if what == "state":
            state = optimizer.state()
            if self.program.rules.dynamic:
                optimizer.set_state({"loss_scale": 7.0, "dynamic_counter": 5})
            optimizer.set_state(state)
        elif what == "checkpoint":
            checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=self.variables)
            path = checkpoint.write(directory + "/checkpoint")
            for variable in self.all_variables():
                variable.assign(tf.cast(tf.ones(variable.shape), variable.dtype))
            checkpoint.read(path).assert_existing_objects_matched()
        elif what == "learning_rate":
            optimizer.learning_rate = 0.5 * float(tf.convert_to_tensor(optimizer.learning_rate))
            return float(tf.convert_to_tensor(optimizer.inner_optimizer.learning_rate))
        elif what == "config":
            again = type(optimizer).from_config(optimizer.get_config())
            inner = again.get_config()["inner_optimizer"]["class_name"]
            return [again.initial_scale, again.dynamic_growth_steps, inner]
        return None

    def all_variables(self):
        """Return the trained variables and the optimizer's variables."""
        variables = self.optimizer.variables  # a method in old versions of Keras
        return [*self.variables, *(variables() if callable(variables) else variables)]

    def copies(self, variable):
        """Return the value of a variable on each replica."""
        if not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            variable = variable.value  # the `value` of a Keras 3 variable is a tf.Variable
        results = self.strategy.experimental_local_results(variable) if self.strategy else [variable]
        return [each.numpy() for each in results]
