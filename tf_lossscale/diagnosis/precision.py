"""Reports on how much of the gradients is lost in float16. This module does not use TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from tf_lossscale import errors
from tf_lossscale.writing import aligned

#: The lowest and the highest exponent, floor(log2|g|), that have a bin. The first bin also counts all smaller nonzero
#: values, and the last bin also counts all larger finite values.
LOWEST, HIGHEST = -64, 31
BINS = HIGHEST - LOWEST + 1

#: The columns of `ExponentCounts.counts`: zeros, a bin for each exponent, infinite values, NaNs.
ZEROS, FINITE, INFINITE, NAN = 0, slice(1, BINS + 1), BINS + 1, BINS + 2
COLUMNS = BINS + 3

#: The exponents of float16's largest number (65504), smallest normal number and smallest subnormal number. Normal
#: numbers have 11 significant bits; subnormal numbers have fewer. Values of at most 2**-25 round to zero.
MAXIMUM, NORMAL, SUBNORMAL = 15, -14, -24

# A loss scale is a float32 number. The largest power of two in float32 is 2**127.
_LARGEST_SCALE = 127


def column(exponent: int) -> int:
    """Return the column of `ExponentCounts.counts` that counts the values with the given exponent."""
    return 1 + min(max(exponent, LOWEST), HIGHEST) - LOWEST


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentCounts:
    """The number of values with each exponent, for each variable's gradient in one step.

    >>> import numpy as np
    >>> from tf_lossscale.diagnosis.precision import COLUMNS, column
    >>> row = np.zeros([1, COLUMNS], np.int64)
    >>> row[0, column(-20)] = 5
    >>> counts = ExponentCounts(("kernel",), row, scale=1024.0, step=100)
    >>> counts.at(1.0).counts[0, column(-30)].item()
    5.0

    Args:
        names: the names of the variables, all different.
        counts: int64 of shape [variables, COLUMNS]: the zeros, the finite values by exponent from LOWEST to HIGHEST,
            the infinite values, the NaNs.
        scale: the loss scale by which the gradients were multiplied; 1.0 without loss scaling.
        step: the number of the step whose gradients were counted, starting from 1.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    scale: float
    step: int

    def at(self, scale: float) -> ExponentCounts:
        """Return the counts that the same gradients would have at a different loss scale, without rounding to float16.

        If the gradients are multiplied by 2**k, every count moves by k bins. If the factor is 2**(k + f), with f
        between 0 and 1, the logarithms of the values in a bin are assumed to be spread evenly: a fraction 1 - f of the
        values moves by k bins, and a fraction f moves by k + 1 bins.

        Args:
            scale: a finite number above 0.

        Returns:
            The counts, as float64.
        """
        shift = math.log2(scale) - math.log2(self.scale)
        whole = math.floor(shift)
        moved = np.array(self.counts, np.float64)
        moved[:, FINITE] = 0
        for by, share in ((whole, 1 - (shift - whole)), (whole + 1, shift - whole)):
            bins = np.clip(np.arange(BINS) + by, 0, BINS - 1)
            np.add.at(moved[:, FINITE], (slice(None), bins), share * self.counts[:, FINITE])
        return dataclasses.replace(self, counts=moved, scale=scale)


@dataclasses.dataclass(frozen=True)
class VariablePrecision:
    """A row of a precision report: how much of one variable's gradient is lost in float16.

    `zeros` is a fraction of all values. All other fractions are fractions of the nonzero values, because many gradients
    consist mostly of zeros even in float32, for example in networks with ReLU activations.

    >>> row = VariablePrecision("kernel", 9, zeros=0.1, vanished=0.05, subnormal=0.2, overflow=0.0, nan=0.0, headroom=3)
    >>> row.vanished
    0.05

    Args:
        variable: the variable's name.
        values: the number of values.
        zeros: the fraction of zeros.
        vanished: the fraction that rounds to zero in float16, at the report's loss scale.
        subnormal: the fraction in float16's subnormal range.
        overflow: the fraction above float16's range, including infinite values.
        nan: the fraction of NaNs.
        headroom: the number of times that the loss scale can double before the largest value overflows. It is negative
            if the largest value already overflows. It is None if all values are zero, or if the largest value is
            unknown because some value is infinite or NaN.
        rounded: whether the values may already have been rounded to float16. If so, some of the zeros may be values
            that vanished.
    """

    variable: str
    values: int
    zeros: float
    vanished: float
    subnormal: float
    overflow: float
    nan: float
    headroom: int | None
    rounded: bool = False


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PrecisionReport:
    """A report on how much of one step's gradients is lost in float16. It prints as a table and a line of advice.

    >>> import numpy as np
    >>> from tf_lossscale.diagnosis.precision import COLUMNS, ZEROS, column
    >>> counts = np.zeros([2, COLUMNS], np.int64)
    >>> counts[0, [column(-30), column(-20), column(-5)]] = 10, 20, 70
    >>> counts[1, [ZEROS, column(-9)]] = 1, 3
    >>> report = PrecisionReport(ExponentCounts(("kernel", "bias"), counts, scale=1.0, step=1))
    >>> report
    Gradients of step 1 at the loss scale 1
    variable   zeros  vanish  subnormal  overflow  NaN  headroom
    kernel        0%   10.0%      20.0%        0%   0%        20
    bias      25.0%*      0%         0%        0%   0%        24
    all        1.0%*    9.7%      19.4%        0%   0%        20
    *: if float16 computed this gradient, values that vanished are among its zeros.
    Best loss scale: 2**20, at which 0% vanish and 0% are subnormal.
    >>> report.best_scale
    1048576.0
    >>> report.rows[0].vanished, report.at(report.best_scale).rows[0].vanished
    (0.1, 0.0)

    Args:
        counts: the exponent counts of the step's gradients.
        scale: the loss scale for which the report is computed; 0 for the scale by which the gradients were multiplied.

    Source: the histogram of the exponents of activation gradients in figure 3 of Micikevicius et al., *Mixed Precision
    Training*, 2018 (https://arxiv.org/abs/1710.03740).
    """

    counts: ExponentCounts
    scale: float = 0.0

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", self.counts.scale)

    @property
    def step(self) -> int:
        """The number of the step whose gradients were counted."""
        return self.counts.step

    @property
    def rows(self) -> tuple[VariablePrecision, ...]:
        """A row for each variable, in the order of `counts.names`."""
        return self._all_rows[:-1]

    @property
    def total(self) -> VariablePrecision:
        """A row for all variables together."""
        return self._all_rows[-1]

    @functools.cached_property
    def _all_rows(self) -> tuple[VariablePrecision, ...]:
        return tuple(_rows(self.counts, self.scale))

    @property
    def best_scale(self) -> float | None:
        """The loss scale that is best for float16: the highest power of two at which no value overflows.

        It is None if there is neither a finite nonzero value nor a value that overflowed.

        If some values are infinite or NaN, their true size is unknown. In this case the result is only an upper bound.
        It is lower than the loss scale that caused the overflow. The result is also only an upper bound if a finite
        value is 2**32 or larger, because all such values are counted in the same bin.
        """
        top = _highest(self.counts.counts.sum(axis=0))
        before = math.log2(self.counts.scale)
        bounds = [] if top is None else [math.floor(before + MAXIMUM - top)]
        if self._overflowed:
            bounds.append(math.ceil(before) - 1)
        return 2.0 ** min(*bounds, _LARGEST_SCALE) if bounds else None

    def at(self, scale: float) -> PrecisionReport:
        """Return a report on the same gradients at a different loss scale.

        >>> import numpy as np
        >>> from tf_lossscale.diagnosis.precision import COLUMNS
        >>> report = PrecisionReport(ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1.0, step=1))
        >>> report.at(2.0**10).scale
        1024.0

        Args:
            scale: a finite number above 0.

        Raises:
            TypeError: the scale is not a number.
            ValueError: the scale is not finite, or is not above 0.
        """
        return PrecisionReport(self.counts, errors.positive_number("scale", scale, "Pass a loss scale such as 2**15."))

    @property
    def advice(self) -> str:
        """One line on the loss scale that fits the gradients."""
        best, counted = self.best_scale, power(self.counts.scale)
        if best is None:
            if not self.total.values:
                return "No variable had a gradient."
            return "All values are zero. If float16 computed them, count again at a higher scale."
        if self._overflowed and self.counts.scale <= 1:
            return f"Infinite or NaN at the loss scale {counted}: look for the cause in the model and data."
        if self._overflowed:
            return f"Infinite or NaN at the loss scale {counted}: count again at {power(best)} or lower."
        total = self.at(best).total
        vanished, subnormal = percent(total.vanished), percent(total.subnormal)
        return f"Best loss scale: {power(best)}, at which {vanished} vanish and {subnormal} are subnormal."

    @property
    def _overflowed(self) -> bool:
        return bool(self.counts.counts[:, [INFINITE, NAN]].any())

    def __repr__(self) -> str:
        titles = ("variable", "zeros", "vanish", "subnormal", "overflow", "NaN", "headroom")
        cells = [titles, *map(_cells, self._all_rows)]
        lines = [f"Gradients of step {self.step} at the loss scale {power(self.scale)}", *aligned(cells)]
        if any(row.rounded and row.zeros for row in self.rows):
            lines.append("*: if float16 computed this gradient, values that vanished are among its zeros.")
        return "\n".join([*lines, self.advice])


def power(scale: float) -> str:
    """Return a loss scale as text: in the form 2**15 if it is a power of two, otherwise as a number."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent != 1 else f"{scale:g}"


def _cells(row: VariablePrecision) -> tuple[str, ...]:
    zeros = (percent(row.zeros) if row.values else "-") + "*" * (row.rounded and row.zeros > 0)
    shares = (row.vanished, row.subnormal, row.overflow, row.nan)
    lost = [percent(share) if row.zeros < 1 and row.values else "-" for share in shares]
    return row.variable, zeros, *lost, "-" if row.headroom is None else str(row.headroom)


def percent(fraction: float) -> str:
    """Format a fraction as a percentage. Only the fractions 0 and 1 become 0% and 100%."""
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return "<0.1%" if fraction < 0.001 else ">99.9%" if fraction > 0.999 else f"{fraction:.1%}"


def _rows(counts: ExponentCounts, scale: float) -> Iterator[VariablePrecision]:
    """Yield a row for each variable, and a last row for all variables together."""
    rounded = _rounded(counts)
    zeros, nonzero = counts.counts[:, ZEROS], counts.counts[:, ZEROS + 1 :].sum(axis=1)
    lost = {**_lost(counts, rounded, scale), "nan": counts.counts[:, NAN]}
    variables = [(name, [i]) for i, name in enumerate(counts.names)]
    for name, which in [*variables, ("all", list(range(len(counts.names))))]:
        of = int(nonzero[which].sum())
        values = int(zeros[which].sum()) + of
        yield VariablePrecision(
            name,
            values,
            zeros=float(zeros[which].sum()) / max(values, 1),
            headroom=_headroom(counts, counts.counts[which].sum(axis=0), scale),
            rounded=bool(rounded[which].any()),
            **{kind: float(number[which].sum()) / max(of, 1) for kind, number in lost.items()},
        )


def _rounded(counts: ExponentCounts) -> np.ndarray:
    """For each variable, return whether its gradient may have been rounded to float16.

    A gradient was not rounded if a finite nonzero value lies outside float16's range.
    """
    outside = np.array(counts.counts[:, FINITE])
    outside[:, SUBNORMAL - LOWEST : MAXIMUM + 1 - LOWEST] = 0
    return ~outside.any(axis=1)


def _lost(counts: ExponentCounts, rounded: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    """Return how many of each variable's values vanish, are subnormal, and overflow at a loss scale."""
    at = counts.at(scale).counts
    vanished = at[:, column(LOWEST) : column(SUBNORMAL - 1)].sum(axis=1)
    halvings = math.log2(counts.scale) - math.log2(scale)
    if halvings >= 1:
        # The bin of exponent -25 contains the values from 2**-25 to 2**-24. Only 2**-25 itself rounds to zero. Among
        # float32 values, this number is so rare that it is ignored. Float16 values, however, are multiples of 2**-24 at
        # the loss scale at which they were counted. At half that scale they are multiples of 2**-25, so all values in
        # the bin are 2**-25 and round to zero. At a quarter of that scale, about half of the values in the bin round to
        # zero, and so on.
        vanished = vanished + np.where(rounded, at[:, column(SUBNORMAL - 1)] * 2.0 ** (1 - halvings), 0)
    below_normal = at[:, column(LOWEST) : column(NORMAL)].sum(axis=1)
    overflow = at[:, column(MAXIMUM + 1) : INFINITE + 1].sum(axis=1)
    return {"vanished": vanished, "subnormal": below_normal - vanished, "overflow": overflow}


def _headroom(counts: ExponentCounts, row: np.ndarray, scale: float) -> int | None:
    top = _highest(row)
    if top is None or row[[INFINITE, NAN]].any():
        return None
    return math.floor(MAXIMUM - top - math.log2(scale) + math.log2(counts.scale))


def _highest(row: np.ndarray) -> int | None:
    """Return the highest exponent of the finite nonzero values. If there are no such values, return None."""
    exponents = np.flatnonzero(row[FINITE])
    return int(exponents[-1]) + LOWEST if exponents.size else None
