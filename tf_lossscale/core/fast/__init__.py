"""Faster twins of plain functions in the core: the same arguments, the same results bit for bit.

`packing` works on small gradients together, and unscales large ones as late as possible; `branching` has the cheapest
conditional of each backend; `checks` proves gradients finite by their sums. Each trick can be switched off, for tests
and benchmarks; with all of them off the plain functions run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: What each trick does. `python -m benchmarks.ablation` measures a step without it.
TRICKS = {
    "stacks": "one operation for all small gradients of a shape",
    "stacked sums": "one all-reduce for all small gradients of a shape",
    "stacks through merge_call": "one value for all small gradients of a shape goes to the cross-replica context",
    "late unscaling": "large gradients are unscaled in the branch that applies them",
    "one at a time": "the next large gradient is unscaled when the last one was applied",
    "one call": "the conditional of a small step is one operation, which calls a function",
    "loop": "XLA gets a loop of at most one round for a conditional, on the CPU",
    "sum first": "values are checked one by one only where their sum is not finite",
    "product": "XLA gets a product in float64 for a quotient in float32, on the CPU",
}
_off: set[str] = set()


def on(trick: str) -> bool:
    """Returns whether a trick is in use.

    >>> on("stacks")
    True

    Args:
        trick: a key of `TRICKS`.
    """
    return trick not in _off


@contextlib.contextmanager
def without(*tricks: str) -> Iterator[None]:
    """Switches tricks off for a block: functions that are traced there, and eager steps taken there, go without.

    >>> with without("stacks"):
    ...     on("stacks")
    False

    Args:
        *tricks: keys of `TRICKS`; all of them if none is given.

    Raises:
        KeyError: there is no such trick.
    """
    added = {trick for trick in tricks or TRICKS if TRICKS[trick] and on(trick)}
    _off.update(added)
    try:
        yield
    finally:
        _off.difference_update(added)
