"""Reports on gradients, on activations and on the loss scale: what overflows, and what float16 loses.

| name | purpose |
|---|---|
| `OverflowReport` | returned by `LossScaleOptimizer.overflow_report()`, with one `Overflow` for each variable |
| `exponent_counts` | counts the values of gradients by binary exponent |
| `precision_report` | returns a `PrecisionReport`: what float16 loses of gradients, with one `VariablePrecision` each |
| `ExponentCounts` | the counts from which a `PrecisionReport` is computed |
| `activation_report` | runs a model on one batch; returns an `ActivationReport` with one `LayerActivations` each |
| `invariance_report` | returns an `InvarianceReport` on a training loop, with `ScaleDependence` rows |
| `plot` | draws a precision report or a training run |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy

# Maps each public name to the module that defines it.
_HOMES = {
    **dict.fromkeys(("ActivationReport", "LayerActivations", "activation_report"), "activations"),
    **dict.fromkeys(("ExponentCounts", "PrecisionReport", "VariablePrecision"), "precision"),
    **dict.fromkeys(("exponent_counts", "precision_report"), "exponents"),
    **dict.fromkeys(("InvarianceReport", "ScaleDependence", "invariance_report"), "invariance"),
    **dict.fromkeys(("Overflow", "OverflowReport"), "overflow"),
    "plot": "plotting",
}

__all__ = [
    "ActivationReport",
    "ExponentCounts",
    "InvarianceReport",
    "LayerActivations",
    "Overflow",
    "OverflowReport",
    "PrecisionReport",
    "ScaleDependence",
    "VariablePrecision",
    "activation_report",
    "exponent_counts",
    "invariance_report",
    "plot",
    "precision_report",
]

if TYPE_CHECKING:
    from tf_lossscale.diagnosis.activations import ActivationReport, LayerActivations, activation_report
    from tf_lossscale.diagnosis.exponents import exponent_counts, precision_report
    from tf_lossscale.diagnosis.invariance import InvarianceReport, ScaleDependence, invariance_report
    from tf_lossscale.diagnosis.overflow import Overflow, OverflowReport
    from tf_lossscale.diagnosis.plotting import plot
    from tf_lossscale.diagnosis.precision import ExponentCounts, PrecisionReport, VariablePrecision

__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = lazy.names(__name__, _HOMES)
