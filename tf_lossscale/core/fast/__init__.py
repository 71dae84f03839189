"""Faster twins of plain functions in the core: the same arguments, the same results bit for bit.

`packing` works on small gradients together, and unscales large ones as late as possible; `branching` has the cheapest
conditional of each backend; `checks` proves gradients finite by their sums. Each trick can be switched off, for tests
and benchmarks; with all of them off the plain functions run.
"""

from tf_lossscale.core.fast import branching, checks, packing
from tf_lossscale.core.fast.tricks import TRICKS, on, without

__all__ = ["TRICKS", "branching", "checks", "on", "packing", "without"]
