"""Runs random training programs with the loss scale optimizer from another library or TensorFlow release.

    python -m tools.fuzz.originals NAME

The command reads one program per line from stdin. For each program, it writes one line to stdout, which contains the
state after each step. Input and output lines are JSON. The module must also run on Python 3.8, which old releases of
TensorFlow need.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

from tools.fuzz.loops import Loops
from tools.fuzz.model import Rules
from tools.fuzz.program import ADAM, MOMENTUM, RATE, SHAPES, Loop, Program, Step
from tools.record.program import virtual_cpus


def _tf_keras():
    import tf_keras

    return tf_keras


def _keras3():
    import keras

    return keras


#: Maps the name of a loss scale optimizer to a function that returns the module of the inner optimizers and the class
#: of the loss scale optimizer.
ORIGINALS = {
    "tensorflow": lambda: (tf.keras.optimizers, tf.keras.mixed_precision.LossScaleOptimizer),
    "tf_keras_legacy": lambda: (_tf_keras().optimizers.legacy, _tf_keras().mixed_precision.LossScaleOptimizer),
    "tf_keras": lambda: (_tf_keras().optimizers, _tf_keras().mixed_precision.LossScaleOptimizer),
    "keras3": lambda: (_keras3().optimizers, _keras3().optimizers.LossScaleOptimizer),
}


@functools.lru_cache(maxsize=1)
def mirrored():
    """Return this process's only MirroredStrategy. A second MirroredStrategy's collective operations would fail."""
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


class Running(Loops):
    """Runs a program with a loss scale optimizer, which may be this package's or another library's.

    Args:
        program: a Program.
        gradients: the result of `Program.gradients` for each step. They are an argument because different versions of
            NumPy may generate different random numbers.
        optimizers: the module of the inner optimizers.
        wrapper: the class that wraps an inner optimizer.
    """

    def __init__(self, program, gradients, optimizers, wrapper):
        self._gradients, self._taken = gradients, 0
        momentum = MOMENTUM if program.inner == "momentum" else 0.0
        strategy = mirrored() if program.mode == "mirrored" else None
        with (strategy or tf.distribute.get_strategy()).scope():
            sgd = optimizers.SGD(RATE, momentum=momentum)
            inner = optimizers.Adam(RATE, **ADAM) if program.inner == "adam" else sgd
            optimizer = wrapper(inner, **arguments(program.rules))
            variables = [tf.Variable(tf.ones(shape, dtype)) for shape, dtype in zip(SHAPES, program.dtypes)]
            # Create the slots before the first step, because some optimizers create no slots in a skipped step.
            build = getattr(optimizer, "build", None) or optimizer._create_all_weights
            build(variables)
        super().__init__(program, variables, optimizer, strategy)

    def gradients(self, step):
        return self._gradients[self._taken]

    def states(self, directory):
        """Take the program's steps. Yield the state after each step, or the class of the error that ends the run."""
        for step in self.program.steps:
            try:
                note = self.between(step.before, directory)
                self.call(step)
            except Exception as error:
                yield {"error": type(error).__name__}
                return
            self._taken += 1
            yield dict(self.state(), note=note)

    def between(self, what, directory):
        """Save and restore the state, halve the learning rate, or create a second optimizer from the config; see
        `Step.before`."""
        optimizer = self.optimizer
        if what == "checkpoint":
            checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=self.variables)
            path = checkpoint.write(directory + "/checkpoint")
            for variable in [*self.variables, optimizer.iterations]:
                variable.assign(tf.cast(tf.ones(variable.shape), variable.dtype))
            checkpoint.read(path)
        elif what == "learning_rate":
            optimizer.learning_rate = 0.5 * float(np.asarray(optimizer.learning_rate))
            return float(np.asarray(optimizer.inner_optimizer.learning_rate))
        elif what == "config":
            again = type(optimizer).from_config(optimizer.get_config())
            inner = again.get_config()["inner_optimizer"]["class_name"]
            return [again.initial_scale, again.dynamic_growth_steps, inner]
        return None

    def state(self):
        """Return the loss scale, its counter, the step count, and the variables on each replica."""
        optimizer = self.optimizer
        keras3 = not hasattr(optimizer, "get_scaled_loss")
        scale = optimizer.dynamic_scale if keras3 else optimizer.loss_scale
        counter = optimizer.step_counter if keras3 else optimizer.dynamic_counter
        return {
            "loss_scale": float(tf.convert_to_tensor(scale)),
            "dynamic_counter": None if counter is None else int(tf.convert_to_tensor(counter)),
            "iterations": int(tf.convert_to_tensor(optimizer.iterations)),
            "variables": [self._values(variable) for variable in self.variables],
        }

    def _values(self, variable):
        """Return the values of a variable as nested lists, whose first axis is the replica."""
        copies = self.strategy.experimental_local_results(variable) if self.strategy else [variable]
        return [np.asarray(copy.numpy(), np.float64).tolist() for copy in copies]


def arguments(rules):
    """Return the loss scale's settings as constructor arguments. Omit settings that other libraries do not support."""
    if not rules.dynamic:
        return {"dynamic": False, "initial_scale": rules.initial_scale}
    return {"initial_scale": rules.initial_scale, "dynamic_growth_steps": rules.growth_steps}


def run(program, gradients, optimizers, wrapper):
    """Run a program, and return the state after each step. If an error ends the run, its class is the last entry."""
    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as directory:
        try:
            running = Running(program, gradients, optimizers, wrapper)
        except Exception as error:
            return [{"error": type(error).__name__}]
        return list(running.states(directory))


def encoded(program, gradients):
    """Encode a program and its gradients as a line of JSON."""
    lists = [[[each.tolist() for each in dense], rows.tolist()] for dense, rows in gradients]
    return json.dumps({"program": dataclasses.asdict(program), "gradients": lists})


def decoded(line):
    """Decode a program and its gradients from a line of JSON that `encoded` returned."""
    message = json.loads(line)
    given = message["program"]
    loops = tuple(Loop(**{key: _tuples(value) for key, value in loop.items()}) for loop in given["loops"])
    steps = tuple(Step(**step) for step in given["steps"])
    given.update(rules=Rules(**given["rules"]), loops=loops, steps=steps, dtypes=tuple(given["dtypes"]))
    gradients = [([np.float32(each) for each in dense], np.asarray(rows)) for dense, rows in message["gradients"]]
    return Program(**given), gradients


def _tuples(value):
    return tuple(value) if isinstance(value, list) else value


def main(name):
    """Run the program in each line of stdin, and print one line with the state after each step."""
    answers = os.fdopen(os.dup(1), "w")
    # Redirect the output of the libraries to stderr, because stdout must contain only the states.
    os.dup2(2, 1)
    logging.disable(logging.ERROR)
    virtual_cpus()
    optimizers, wrapper = ORIGINALS[name]()
    for line in sys.stdin:
        tf.keras.backend.clear_session()
        answers.write(json.dumps(run(*decoded(line), optimizers, wrapper)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
