"""Runs a random training program in TensorFlow and in NumPy, and compares the results."""

import tempfile

import numpy as np

from fuzz.comparison import Comparison
from fuzz.library_loops import Fit, Probability, Session
from fuzz.machine import Machine

MACHINES = {"fit": Fit, "fit_compiled": Fit, "probability": Probability, "session": Session}


def run(program):
    """Run a program in TensorFlow and in the NumPy model.

    Args:
        program: a Program.

    Raises:
        AssertionError: the results differ. The message names the step after which they differ.
    """
    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as directory:
        machine = MACHINES.get(program.mode, Machine)(program)
        machine.run(Comparison(machine, program), directory)
