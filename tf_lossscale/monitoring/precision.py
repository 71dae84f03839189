"""What float16 loses of the gradients that were counted, and the loss scale at which it loses least."""

from __future__ import annotations

import dataclasses

from tf_lossscale.monitoring.exponents import ExponentCounts


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """What float16 loses of the gradients of one step.

    Args:
        counts: of the step.
    """

    counts: ExponentCounts


def precision_report(counts: ExponentCounts) -> PrecisionReport:
    """Return what float16 loses of the gradients that were counted.

    Args:
        counts: of one step.

    Returns:
        The report.
    """
    return PrecisionReport(counts)
