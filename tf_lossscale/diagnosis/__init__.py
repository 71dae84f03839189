"""Everything that looks at gradients: which of them overflow, which of them float16 loses, and how the scale moves.

| name | purpose |
|---|---|
| `OverflowReport` | returned by `LossScaleOptimizer.overflow_report()`, with one `Overflow` for each variable |
| `exponent_counts` | counts the values of gradients by binary exponent |
| `precision_report` | returns a `PrecisionReport`: what float16 loses of gradients, with one `VariablePrecision` each |
| `ExponentCounts` | the counts from which a `PrecisionReport` is computed |
| `plot` | draws a precision report or a training run |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy

# Maps each public name to the module that defines it.
_HOMES = {
    **dict.fromkeys(("ExponentCounts", "PrecisionReport", "VariablePrecision"), "precision"),
    **dict.fromkeys(("exponent_counts", "precision_report"), "exponents"),
    **dict.fromkeys(("Overflow", "OverflowReport"), "overflow"),
    "plot": "plotting",
}

__all__ = [
    "ExponentCounts",
    "Overflow",
    "OverflowReport",
    "PrecisionReport",
    "VariablePrecision",
    "exponent_counts",
    "plot",
    "precision_report",
]

if TYPE_CHECKING:
    from tf_lossscale.diagnosis.exponents import exponent_counts, precision_report
    from tf_lossscale.diagnosis.overflow import Overflow, OverflowReport
    from tf_lossscale.diagnosis.plotting import plot
    from tf_lossscale.diagnosis.precision import ExponentCounts, PrecisionReport, VariablePrecision

__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = lazy.names(__name__, _HOMES)
