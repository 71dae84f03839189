"""`python -m tools.fuzz.differential`: compares this package with other loss scale optimizers on random programs.

    python -m tools.fuzz.differential [--minutes 10] [--seed 1] [--only tf24]

The other optimizers, called originals, come from tf_keras, Keras 3, TensorFlow 2.4 and TensorFlow 2.8. Each original
runs in a separate process. TensorFlow 2.4 and 2.8 run in virtual environments that `tools.record` creates.

A program is a random sequence of training steps. Programs in the "mirrored" mode train on two virtual CPUs under
MirroredStrategy. A program fails if this package's results differ from an original's, unless a row in
docs/differences.md describes the difference. A program that fails is shrunk and printed. The exit code is 1 if a
program failed; otherwise it is 0.
"""

import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import tf_lossscale
from tools.fuzz import __main__ as command
from tools.fuzz import drawing, originals, programs
from tools.fuzz.model import tolerances
from tools.fuzz.program import LARGEST_SCALE, MODES
from tools.record import originals as environments

MOST_FAILURES = 3
SAME_ERROR = "the same class of error"


@dataclasses.dataclass(frozen=True)
class Original:
    """A loss scale optimizer from another library or TensorFlow release, with which this package is compared.

    Args:
        name: a key of `tools.fuzz.originals.ORIGINALS`.
        family: the optimizer family that this package wraps for the comparison.
        modes: the ways in which programs run: "eager", "function" (in a `tf.function`), "compiled" (by XLA) or
            "mirrored" (under MirroredStrategy).
        environment: the name of a virtual environment that `tools.record` creates. None selects the current
            environment.
    """

    name: str
    family: str
    modes: tuple[str, ...] = ("function", "eager", "mirrored")
    environment: str | None = None


ORIGINALS = {
    "tf_keras": Original("tf_keras", "tf_keras", MODES),
    # Keras 3 is not compared under MirroredStrategy, because Keras 3's wrapper checks only the first replica's
    # gradients (docs/differences.md).
    "keras3": Original("keras3", "keras3", ("function", "eager", "compiled")),
    "tf_keras_legacy": Original("tf_keras_legacy", "tf_keras_legacy", MODES),
    "tf24": Original("tensorflow", "tf_keras_legacy", environment="tf24"),
    "tf28": Original("tensorflow", "tf_keras_legacy", environment="tf28"),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A step after which this package's optimizer and another library's optimizer have different states."""

    original: Original
    program: Any
    step: Any
    #: The loss scale of both optimizers before the step.
    before: float
    theirs: dict[str, Any]
    ours: dict[str, Any]

    @property
    def loop(self):
        return self.program.loops[self.step.loop]

    @property
    def largest_scale(self):
        """An upper bound on the loss scale during the step. Each iteration of a loop may double the scale."""
        return self.before * 2.0 ** (self.step.number if self.loop.repeated == "while" else 0)

    @property
    def scale_is_too_large(self):
        """Whether the loss scale may be so large that gradients overflow or the scale's reciprocal becomes zero."""
        return self.largest_scale > min(LARGEST_SCALE[dtype] for dtype in self.program.dtypes)

    @property
    def only_here_skipped(self):
        """Whether this package skipped a step that the other optimizer applied."""
        return "error" not in {**self.theirs, **self.ours} and self.ours["loss_scale"] < self.theirs["loss_scale"]

    @property
    def only_there_broken(self):
        """Whether only the other optimizer has written infinity or NaN into a variable."""
        return _is_finite(self.ours) and not _is_finite(self.theirs)

    @property
    def only_variables_differ(self):
        """Whether the states differ only in the values of variables."""
        return {**self.theirs, "variables": None} == {**self.ours, "variables": None}


#: The deliberate differences from other loss scale optimizers. Maps the beginning of each row in docs/differences.md to
#: a function that returns whether the row describes a given `Difference`.
ROWS: dict[str, Callable[[Difference], bool]] = {
    "an overflow that only the scaling causes, in a `tf.function`": lambda d: (
        d.original.family != "keras3"
        and d.program.mode != "eager"
        and (d.step.bad == "huge" or d.largest_scale > 2.0**125)
        and d.only_here_skipped
    ),
    "`get_unscaled_gradients`": lambda d: d.original.family != "keras3" and d.scale_is_too_large,
    # The smallest nonzero gradients in a program are 2**-4. TensorFlow's graph optimizer may reorder operations so that
    # such a gradient is divided by the scale before it is multiplied by the scale. If the scale is above 2**122, the
    # quotient underflows to zero.
    "a small gradient under a scale near 2**127, in a `tf.function`": lambda d: (
        d.original.family != "keras3"
        and d.program.mode != "eager"
        and d.largest_scale > 2.0**122
        and d.only_variables_differ
    ),
    "sparse rows with the same index": lambda d: (
        # In a loop, later iterations may bring both to the same scale.
        d.loop.sparse
        and (d.step.bad is not None or d.scale_is_too_large)
        and (d.only_here_skipped or d.only_there_broken)
    ),
    "bounds of the scale": lambda d: d.original.family == "keras3" and not 1 <= d.theirs["loss_scale"] < np.inf,
}


class Child:
    """Runs random programs with another loss scale optimizer in a separate process.

    Raises:
        NotHere: the optimizer's virtual environment cannot be created on this computer.
    """

    def __init__(self, original):
        python = environments.environment(original.environment) if original.environment else sys.executable
        self._process = subprocess.Popen(
            [python, "-m", "tools.fuzz.originals", original.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=environments.ROOT,
            env={**os.environ, "PYTHONPATH": str(environments.ROOT)},
        )

    def __call__(self, program):
        """Run a program, and return the state after each step."""
        self._process.stdin.write(f"{program!r}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the original's process ended with exit code {self._process.wait()}"
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def compare(original, run_original, program):
    """Run a program with this package's loss scale optimizer and with another one, and compare the states.

    Args:
        original: the Original to compare with.
        run_original: a function that runs the program with the original, such as a Child.
        program: a Program.

    Returns:
        The number of steps before the states first differ or both optimizers raise an error, and the key in `ROWS`
        that describes the difference, or `SAME_ERROR`. The key is None if the states agree after all steps.

    Raises:
        AssertionError: the states differ, and no function in `ROWS` recognizes the difference.
    """
    theirs = run_original(program)
    found = originals.run(program, original.family, tf_lossscale.LossScaleOptimizer)
    allowed = [8 * tolerance for tolerance in tolerances(program)]
    before = program.rules.initial_scale
    for i, (expected, got) in enumerate(zip(theirs, found)):
        if not _agree(expected, got, allowed):
            step = program.steps[min(i, len(program.steps) - 1)]
            difference = Difference(original, program, step, before, expected, got)
            for row, is_it in ROWS.items():
                if is_it(difference):
                    return i, row
            raise AssertionError(
                f"the states differ after step {i} at scale {before}:\n original:     {expected}\n tf-lossscale: {got}"
            )
        before = expected.get("loss_scale")
    assert len(theirs) == len(found)
    return (len(theirs) - 1, SAME_ERROR) if "error" in theirs[-1] else (len(theirs), None)


def _is_finite(state):
    return all(np.isfinite(value).all() for value in state.get("variables", ()))


def _agree(expected, got, tolerances):
    exact = ("error", "loss_scale", "dynamic_counter", "iterations", "note")
    if any(expected.get(key) != got.get(key) for key in exact):
        return False
    pairs = zip(expected.get("variables", ()), got.get("variables", ()), tolerances)
    return all(np.allclose(one, other, rtol=atol, atol=atol, equal_nan=True) for one, other, atol in pairs)


def main():
    """Compare the results of random programs until the time limit, and return the exit code."""
    chosen = command.options("python -m tools.fuzz.differential", __doc__, [*ORIGINALS])
    seed = chosen.seed
    children = _children([chosen.only] if chosen.only else list(ORIGINALS))
    counts, failures = {name: collections.Counter() for name in children}, 0
    deadline = time.monotonic() + 60 * chosen.minutes
    while time.monotonic() < deadline and failures < MOST_FAILURES:
        for name, child in children.items():
            failure = _some_programs(seed, ORIGINALS[name], child, counts[name], deadline)
            if failure:
                failures += 1
                print(f"\n{name}: {failure}", flush=True)
        seed += 1
    for name, child in children.items():
        child.close()
        rows = ", ".join(f"{count} {what}" for what, count in counts[name].items())
        print(f"{name}: {rows}")
    print(f"{failures} failures")
    return 1 if failures else 0


def _children(names):
    children = {}
    for name in names:
        try:
            children[name] = Child(ORIGINALS[name])
        except environments.NotHere as error:
            print(f"skipped: {name}: {error}", flush=True)
    return children


def _some_programs(seed, original, child, counts, deadline):
    """Compare both optimizers on some programs. Return a description of the first failure, or None."""

    def check(program):
        steps, row = compare(original, child, program)
        counts["programs"] += 1
        counts["steps"] += steps
        if row:
            counts[row] += 1

    found = drawing.failure(programs.original_programs((original.family,), original.modes), check, seed, deadline)
    return found and "{}\n    {!r}".format(*found)


if __name__ == "__main__":
    sys.exit(main())
