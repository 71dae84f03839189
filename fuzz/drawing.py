"""Draws random programs, and shrinks the first one that fails."""

import time
import traceback

import hypothesis

AT_ONCE = 10  # number of programs in one run of Hypothesis


def settings(most, shrink=True, **more):
    """Return settings of Hypothesis for training programs, which are slow and large.

    Args:
        most: the largest number of programs.
        shrink: whether to shrink a program that fails.
        **more: further settings.
    """
    return hypothesis.settings(
        max_examples=most,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, *[hypothesis.Phase.shrink] * shrink],
        **more,
    )


def failure(strategy, check, seed, deadline):
    """Check some programs until a deadline.

    Args:
        strategy: the Hypothesis strategy that draws the programs.
        check: a function that runs a program, and raises an error if the program fails.
        seed: the seed of the programs.
        deadline: a value of the clock `time.monotonic`. Shrinking a failed program may take longer.

    Returns:
        The end of the traceback of the shrunk failure, and the shrunk program; None if no program fails.
    """
    failed = []

    @hypothesis.seed(seed)
    @settings(AT_ONCE, report_multiple_bugs=False)
    @hypothesis.given(strategy)
    def run_one(program):
        if time.monotonic() > deadline and not failed:
            return
        try:
            check(program)
        except Exception:
            failed[:] = [program]
            raise

    try:
        run_one()
    except Exception:
        return traceback.format_exc(limit=-1)[:3000], failed[0]
    return None
