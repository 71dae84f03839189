"""`python -m fuzz`: runs random training programs and injects faults for a given number of minutes.

    python -m fuzz [--minutes 10] [--seed 1] [--only programs|libraries|faults]

A program is a random sequence of training steps. Its results are compared with a NumPy model's results. If a program
fails, it is shrunk and printed as a test case. If an injected fault reveals a bug, the command prints a function call
that reproduces the fault. The exit code is 1 if anything failed; otherwise it is 0.
"""

import argparse
import itertools
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import conftest  # noqa: F401  the virtual CPUs
from fuzz import cluster_faults, drawing, faults, programs, running

MOST_FAILURES = 3
STRATEGIES = {"programs": programs.programs, "libraries": programs.library_programs}


def main(arguments=None):
    """Run random programs and fault injections, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="start no further program or fault after this time")
    parser.add_argument("--seed", type=int, help="the seed of an earlier run, to repeat it")
    parser.add_argument("--only", choices=[*STRATEGIES, "faults"], help="run only this part")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: repeat with `make fuzz SEED={seed}`", flush=True)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")

    counts = dict.fromkeys(("programs", "steps", "faults", "failures"), 0)
    deadline = time.monotonic() + 60 * options.minutes
    for number, turn in enumerate(_turns(options.only), seed):
        if time.monotonic() > deadline or counts["failures"] == MOST_FAILURES:
            break
        failure = turn(number, counts, deadline)
        if failure:
            counts["failures"] += 1
            print(f"\n{failure}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["failures"] else 0


def _turns(only):
    """Yield an endless sequence of functions. Each function runs some random programs or injects a fault."""
    local, clusters = iter(faults.FAULTS), iter(cluster_faults.FAULTS)
    # Fault injections in clusters are slow. They come early in the sequence, so that a short run also reaches them.
    in_turn = [*itertools.islice(local, 2), *clusters, *local]
    each = itertools.cycle(map(_fault, filter(_possible, in_turn)))
    while True:
        for which in [only] if only else ["programs", "faults", "libraries", "faults"]:
            yield next(each) if which == "faults" else _programs(which)


def _possible(fault):
    """Return whether the fault can be injected on this computer. If it cannot, print the reason."""
    reason = getattr(fault, "why_not", None)
    if reason:
        print(f"skipped: {fault.__name__}, which {reason}", flush=True)
    return not reason


def _fault(fault):
    def turn(seed, counts, deadline):
        """Inject a fault. If the fault reveals a bug, return a description of the bug; otherwise return None."""
        del deadline
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            try:
                fault(random.Random(seed), directory)
            except Exception:
                call = f"{fault.__module__}.{fault.__name__}(random.Random({seed}), DIRECTORY)"
                return f"{traceback.format_exc(limit=-2)}Call {call}"
        counts["faults"] += 1
        return None

    return turn


def _programs(which):
    def turn(seed, counts, deadline):
        """Run some random programs. If one fails, return a description of the failure; otherwise return None."""

        def check(program):
            running.run(program)
            counts["programs"] += 1
            counts["steps"] += len(program.steps)

        found = drawing.failure(STRATEGIES[which](), check, seed, deadline)
        return found and "{}\nAdd to FOUND in tests/test_fuzz.py:\n    {!r},".format(*found)

    return turn


if __name__ == "__main__":
    sys.exit(main())
