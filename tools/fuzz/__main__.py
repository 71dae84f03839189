"""`python -m tools.fuzz`: compares random training programs with a model for a given number of minutes.

    python -m tools.fuzz [--minutes 10] [--seed 1]

A program that fails is shrunk and printed as a test case. The exit code is 1 if a program failed; otherwise it is 0.
"""

import argparse
import logging
import os
import random
import sys
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import conftest  # noqa: F401  the virtual CPUs
from tools.fuzz import drawing, model, programs

MOST_FAILURES = 3


def options(command, description, originals=()):
    """Parse the command line, and return its options with a seed. Silence the libraries."""
    parser = argparse.ArgumentParser(prog=command, description=description.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="start no further program after this time")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="repeat an earlier run"
    )
    if originals:
        parser.add_argument("--only", choices=originals, help="compare only with this original")
    parsed = parser.parse_args()
    print(f"seed {parsed.seed}: repeat with --seed {parsed.seed}", flush=True)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    return parsed


def main():
    """Run random programs, and return the exit code."""
    chosen = options("python -m tools.fuzz", __doc__)
    counts = dict.fromkeys(("programs", "steps", "failures"), 0)
    deadline = time.monotonic() + 60 * chosen.minutes

    def check(program):
        model.run(program)
        counts["programs"] += 1
        counts["steps"] += len(program.steps)

    seed = chosen.seed
    while time.monotonic() < deadline and counts["failures"] < MOST_FAILURES:
        found = drawing.failure(programs.programs(), check, seed, deadline)
        seed += 1
        if found:
            counts["failures"] += 1
            print("\n{}\nAdd to FOUND in tests/test_fuzz.py:\n    {!r},".format(*found), flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
