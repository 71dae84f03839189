"""Faster twins of plain functions in the core, with the same arguments and the same results, bit for bit.

`packing` stacks small gradients, and unscales large ones as late as possible; `branching` has the cheapest
conditional for each backend; `checks` proves gradients finite by their sums. Tests and benchmarks can switch each
trick off; without any trick the plain functions run.
"""

from tf_lossscale.core.fast import branching, checks, packing
from tf_lossscale.core.fast.tricks import TRICKS, in_use, without

__all__ = ["TRICKS", "branching", "checks", "in_use", "packing", "without"]
