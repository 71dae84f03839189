"""Twins: faster versions of core functions that take the same arguments and give bit-identical training results.

`packing` stacks small gradients, and unscales each large gradient as late as possible. `branching` uses the cheapest
conditional for each backend. `checks` uses sums to prove that gradients are finite. Tests and benchmarks can switch
off each optimization (see `tricks`).
"""

from tf_lossscale.core.fast import branching, checks, packing
from tf_lossscale.core.fast.tricks import TRICKS, in_use, without

__all__ = ["TRICKS", "branching", "checks", "in_use", "packing", "without"]
