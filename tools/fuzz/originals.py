"""Runs random training programs with the loss scale optimizer from another library or TensorFlow release.

    python -m tools.fuzz.originals NAME

The command reads one program per line from stdin, as a Python expression. For each program, it writes one line to
stdout: a JSON list of the state after each step. The module must also run on Python 3.8, which old releases of
TensorFlow need.
"""

import json
import logging
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

from tools.fuzz import program as program_lib
from tools.fuzz.machine import Machine
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


class Running(Machine):
    """Runs a program with an optimizer that has the methods of the originals."""

    def __init__(self, program, optimizers, wrapper):
        super().__init__(program, optimizers, wrapper)
        with (self.strategy or tf.distribute.get_strategy()).scope():
            # Create the slots before the first step, because some optimizers create no slots in a skipped step.
            build = getattr(self.optimizer, "build", None) or self.optimizer._create_all_weights
            build(self.variables)

    def states(self, directory):
        """Take the program's steps. Yield the state after each step, or the class of the error that ends the run."""
        for step in self.program.steps:
            try:
                note = self.between(step.before, directory)
                self.call(step)
            except Exception as error:
                yield {"error": type(error).__name__}
                return
            yield dict(self.state(), note=note)

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
            "variables": [[np.float64(copy).tolist() for copy in self.copies(each)] for each in self.variables],
        }


def run(program, name, wrapper=None):
    """Run a program; return the state after each step. If an error ends the run, its class is the last entry.

    Args:
        program: a Program.
        name: a key of ORIGINALS.
        wrapper: the class that wraps an inner optimizer; by default, the original's.
    """
    optimizers, theirs = ORIGINALS[name]()
    tf.keras.backend.clear_session()
    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as directory:
        try:
            running = Running(program, optimizers, wrapper or theirs)
        except Exception as error:
            return [{"error": type(error).__name__}]
        return list(running.states(directory))


def main(name):
    """Run the program in each line of stdin, and print one line with the state after each step."""
    answers = os.fdopen(os.dup(1), "w")
    # Redirect the output of the libraries to stderr, because stdout must contain only the states.
    os.dup2(2, 1)
    logging.disable(logging.ERROR)
    virtual_cpus()
    for line in sys.stdin:
        program = eval(line, vars(program_lib))  # `repr` of a Program, from the process that started this one
        answers.write(json.dumps(run(program, name)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
