"""Tricks: the optimizations in `core/fast`. Tests and benchmarks can switch each trick off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: Maps each trick to a description: what the trick does, and the time or memory of a step without the trick
#: (docs/performance.md, "What each trick gains"). Times are relative to a step with all tricks.
TRICKS = {
    "stacks": "one operation for all small gradients of a shape: 1.09 to 1.17 for 200 x 1k",
    "stacked sums": "one all-reduce for all small gradients of a shape: 1.06 for 200 x 1k",
    "late unscaling": "large gradients are unscaled where they are applied: 1.25 with XLA, 1042 MB for 16 x 16M",
    "one at a time": "a large gradient is unscaled only after the previous one was applied: 860 MB for 16 x 16M",
    "one call": "the conditional of a small step is a single operation, a call: 1.06 to 1.17 for 200 x 1k",
    "loop": "on the CPU, XLA compiles a loop of at most one iteration instead of a conditional: 1.93 for 4 x 4M",
    "sum first": "values are checked one by one only if the sum is not finite: 1.10 for 4 x 4M, 1.11 for ResNet-50",
    "one check": "XLA checks all small gradients as one, which compiles faster: 1.3 for 60 x 1k",
    "product": "on the CPU, XLA computes a float32 quotient as a float64 product: 1.21 for 4 x 4M",
}
#: All tricks are in use, except those that an enclosing `without` block switches off.
in_use = set(TRICKS)


@contextlib.contextmanager
def without(*tricks: str) -> Iterator[None]:
    """Switch tricks off in a `with` block, for eager steps and for functions that are traced inside the block.

    >>> with without("stacks"):
    ...     "stacks" in in_use
    False

    Args:
        *tricks: keys of `TRICKS`. If no key is passed, all tricks are switched off.

    Raises:
        KeyError: an argument is not a key of `TRICKS`.
    """
    removed = {trick for trick in tricks or TRICKS if TRICKS[trick] and trick in in_use}
    in_use.difference_update(removed)
    try:
        yield
    finally:
        in_use.update(removed)
