"""`python -m fuzz`: random programs and faults, for some minutes.

    python -m fuzz [--minutes 10] [--seed 1] [--only programs|libraries|faults]

What fails is shrunk and printed as a test. The exit code is 1 then, else 0.
"""

import argparse
import logging
import os
import random
import sys
import time
import traceback
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import conftest  # noqa: F401  the virtual CPUs
import hypothesis

from fuzz import programs, running

PROGRAMS_AT_ONCE = 10


def main(arguments=None):
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="nothing is begun after them")
    parser.add_argument("--seed", type=int, help="of an earlier run, which is repeated")
    parser.add_argument("--only", choices=["programs", "libraries", "faults"], help="a part of it")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: repeat with `make fuzz SEED={seed}`", flush=True)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")

    counts, failures = {"programs": 0, "steps": 0, "faults": 0}, []
    deadline = time.monotonic() + 60 * options.minutes
    for turn in _turns(options.only):
        if time.monotonic() > deadline or len(failures) >= 5:
            break
        seed += 1
        failures += _random_programs(turn, seed, counts, deadline)
    print(*(f"{number} {what}" for what, number in counts.items()), f"{len(failures)} failures", sep=", ")
    for failure in failures:
        print(f"\n{failure}")
    return 1 if failures else 0


def _turns(only):
    """Endlessly what to do next."""
    while True:
        yield from [only] if only else ["programs", "programs", "libraries"]


def _random_programs(which, seed, counts, deadline):
    """Runs some programs; returns a description of the failure, shrunk, if there is one."""
    strategy = {"programs": programs.programs, "libraries": programs.library_programs}[which]()
    last = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=PROGRAMS_AT_ONCE,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(strategy)
    def run_one(program):
        if time.monotonic() > deadline and not last:
            return
        last[:] = [program]
        running.run(program)
        counts["programs"] += 1
        counts["steps"] += len(program.steps)
        last.clear()

    try:
        run_one()
    except Exception as error:
        return [_as_test(last, error)]
    return []


def _as_test(last, error):
    return "".join(traceback.format_exception(error)[-3:]) + f"\nAdd to FOUND in tests/test_fuzz.py:\n    {last[0]!r},"


if __name__ == "__main__":
    sys.exit(main())
