"""Draws random training programs with Hypothesis, and shrinks the first program that fails."""

import time
import traceback

import hypothesis

# The maximum number of programs that Hypothesis draws in one run.
AT_ONCE = 10


def settings(most, shrink=True, **more):
    """Return Hypothesis settings for training programs, which are slow and large.

    Args:
        most: the maximum number of programs.
        shrink: whether to shrink a program that fails.
        **more: additional Hypothesis settings.
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
    """Check up to `AT_ONCE` random programs. Stop at the deadline, or once a failed program has been shrunk.

    Args:
        strategy: the Hypothesis strategy that draws the programs.
        check: a function that runs a program, and raises an error if the program fails.
        seed: the seed of the programs.
        deadline: a time on the `time.monotonic` clock. Only shrinking a failed program may continue after the deadline.

    Returns:
        None if no program fails. Otherwise a pair: the end of the traceback, and the shrunk program.
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
