"""Reports on how much of the gradients is lost in float16, and on the loss scale at which the least is lost."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_lossscale import errors
from tf_lossscale.precision.counts import FINITE, INFINITE, LOWEST, NAN, ZEROS, ExponentCounts, column
from tf_lossscale.precision.records import append
from tf_lossscale.precision.report_text import about_the_scale, about_the_variables, table

#: The exponents of float16's largest number (65504), smallest normal number and smallest subnormal number. Normal
#: numbers have 11 significant bits; subnormal numbers have fewer. Values of at most 2**-25 round to zero.
MAXIMUM, NORMAL, SUBNORMAL = 15, -14, -24

#: A report lists a variable as affected by float16 if more than this fraction of its gradient's values lies below
#: float16's normal range.
AFFECTED = 0.1

# A loss scale is a float32 number. The largest power of two in float32 is 2**127.
_LARGEST_SCALE = 127


@dataclasses.dataclass(frozen=True)
class VariablePrecision:
    """A row of a precision report: how much of one variable's gradient is lost in float16.

    `zeros` is a fraction of all values. All other fractions are fractions of the nonzero values, because many gradients
    consist mostly of zeros even in float32, for example in networks with ReLU activations.

    >>> row = VariablePrecision("kernel", values=9, zeros=0.1, subnormal=0.2, overflow=0.0, nan=0.0, headroom=3,
    ...                         vanished=0.05, vanished_unscaled=1.0, vanished_at_half=0.1, vanished_at_twice=0.0)
    >>> row.below_normal
    0.25

    Args:
        variable: the variable's name.
        values: the number of values.
        zeros: the fraction of zeros.
        subnormal: the fraction in float16's subnormal range, at the report's loss scale.
        overflow: the fraction above float16's range, including infinite values.
        nan: the fraction of NaNs.
        headroom: the number of times that the loss scale can double before the largest value overflows. It is negative
            if the largest value already overflows. It is None if all values are zero, or if the largest value is
            unknown because some value is infinite or NaN.
        vanished: the fraction that rounds to zero in float16.
        vanished_unscaled: the fraction that would round to zero at a loss scale of 1.
        vanished_at_half: the fraction that would round to zero at half the loss scale.
        vanished_at_twice: the fraction that would round to zero at twice the loss scale.
        rounded: whether the values may already have been rounded to float16. If so, some of the zeros may be values
            that vanished.
    """

    variable: str
    values: int
    zeros: float
    subnormal: float
    overflow: float
    nan: float
    headroom: int | None
    vanished: float
    vanished_unscaled: float
    vanished_at_half: float
    vanished_at_twice: float
    rounded: bool = False

    @property
    def below_normal(self) -> float:
        """The fraction of values below float16's normal range. These values vanish or lose precision."""
        return self.vanished + self.subnormal

    @property
    def any_nonzero(self) -> bool:
        """Whether any value is nonzero. If all values are zero, the fractions other than `zeros` are meaningless."""
        return self.values > 0 and self.zeros < 1

    @property
    def only_zeros(self) -> bool:
        """Whether all values are zero and float16 may have rounded them to zero."""
        return self.rounded and self.zeros == 1


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PrecisionReport:
    """A report on how much of one step's gradients is lost in float16. It prints as two sentences and a table.

    >>> from tf_lossscale.precision.counts import COLUMNS
    >>> counts = np.zeros([2, COLUMNS], np.int64)
    >>> counts[0, [column(-30), column(-20), column(-5)]] = 10, 20, 70
    >>> counts[1, [ZEROS, column(-9)]] = 1, 3
    >>> counted = ExponentCounts(("kernel", "bias"), counts, scale=1.0, step=1, full_precision=True)
    >>> report = PrecisionReport(counted)
    >>> report
    Gradients in step 1
    The highest loss scale at which no value overflows is 2**20; of the values that
    are not zero, 0% vanish and 0% are subnormal at this scale (without a loss
    scale: 9.7% vanish and 19.4% are subnormal).
    Without a loss scale float16 affects 1 variable: kernel (30.0% vanish or are
    subnormal, 0% at 2**20).
    <BLANKLINE>
                     sub- over- head- vanish vanish
    variable zeros normal  flow  room      1  2**20
    kernel      0%  20.0%    0%    20  10.0%     0%
    bias     25.0%     0%    0%    24     0%     0%
    all       1.0%  19.4%    0%    20   9.7%     0%
    <BLANKLINE>
    Zeros are a percentage of all values. The other percentages refer to the values
    that are not zero. Headroom is in powers of two.
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

    @functools.cached_property
    def best_scale(self) -> float | None:
        """The loss scale that is best for float16: the highest power of two at which no value overflows.

        It is None if there is neither a finite nonzero value nor a value that overflowed in float16.

        If some values overflowed in float16, their true size is unknown. In this case the result is only an upper
        bound. It is lower than the loss scale that caused the overflow. The result is also only an upper bound if a
        finite value is 2**32 or larger, because all such values are counted in the same bin.
        """
        top = _highest(self.counts.counts.sum(axis=0))
        before = math.log2(self.counts.scale)
        bounds = [] if top is None else [math.floor(before + MAXIMUM - top)]
        if self.overflow_is_open:
            bounds.append(math.ceil(before) - 1)
        return 2.0 ** min(*bounds, _LARGEST_SCALE) if bounds else None

    @property
    def overflow_is_open(self) -> bool:
        """Whether values may have overflowed in float16. If so, the size of the largest value is unknown."""
        return bool(not self.counts.full_precision and self.counts.counts[:, [INFINITE, NAN]].any())

    @property
    def affected(self) -> tuple[VariablePrecision, ...]:
        """The rows of the variables whose gradients float16 affects at the report's scale, the most affected first.

        A gradient is affected if some of its values overflow or are NaN, if more than a tenth of them lie below
        float16's normal range, or if all of them are zero and float16 may have rounded them to zero.
        """
        rows = [row for row in self.rows if row.overflow or row.nan or row.below_normal > AFFECTED or row.only_zeros]
        return tuple(sorted(rows, key=lambda row: -max(row.overflow + row.nan, row.below_normal, row.only_zeros)))

    def at(self, scale: float) -> PrecisionReport:
        """Return a report on the same gradients at a different loss scale.

        >>> from tf_lossscale.precision.counts import COLUMNS
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

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of numbers and strings, which can be written as JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        facts = {"step": self.step, "scale": self.scale, "best_scale": self.best_scale}
        return {**facts, "sentences": list(self.sentences), "rows": rows, "total": dataclasses.asdict(self.total)}

    def write(self, folder: Any, step: int | None = None) -> None:
        """Append the exponent counts to a run's `exponents.jsonl` file, which `tf-lossscale plot` reads.

        >>> import tempfile
        >>> from tf_lossscale.precision.counts import COLUMNS
        >>> report = PrecisionReport(ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1.0, step=1))
        >>> report.write(tempfile.mkdtemp())

        Args:
            folder: the folder of the run. It is created if it does not exist.
            step: the number of the step in the run, or None for `report.step`, which starts from 1 again after an
                optimizer is loaded from a file.

        Raises:
            OSError: the file cannot be written.
            TypeError: the step is not a number.
            ValueError: the step is not a whole number that is at least 1.
        """
        step = errors.whole_number("step", self.step if step is None else step, "Pass the step of the run, from 1.")
        append(folder, dataclasses.replace(self.counts, step=step))

    @property
    def sentences(self) -> tuple[str, str]:
        """A sentence about the best scale, and a sentence about the variables that float16 affects."""
        return about_the_scale(self), about_the_variables(self)

    def __rich__(self) -> Any:
        """Return the sentences and the table as an object that `rich.print` can print."""
        return table(self)

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(file=(printed := io.StringIO()), highlight=False, color_system=None)
        console.print(self)
        return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _rows(counts: ExponentCounts, scale: float) -> Iterator[VariablePrecision]:
    """Yield a row for each variable, and a last row for all variables together."""
    rounded = _rounded(counts)
    zeros, nonzero = counts.counts[:, ZEROS], counts.counts[:, ZEROS + 1 :].sum(axis=1)
    vanished, subnormal, overflow = _lost(counts, rounded, scale)
    shares = {
        "subnormal": subnormal,
        "overflow": overflow,
        "nan": counts.counts[:, NAN],
        "vanished": vanished,
        "vanished_unscaled": _lost(counts, rounded, 1.0)[0],
        "vanished_at_half": _lost(counts, rounded, scale / 2)[0],
        "vanished_at_twice": _lost(counts, rounded, scale * 2)[0],
    }
    variables = [(name, [i]) for i, name in enumerate(counts.names)]
    for name, which in [*variables, ("all", list(range(len(counts.names))))]:
        values, of = int(zeros[which].sum() + nonzero[which].sum()), int(nonzero[which].sum())
        yield VariablePrecision(
            name,
            values,
            zeros=float(zeros[which].sum()) / max(values, 1),
            headroom=_headroom(counts, counts.counts[which].sum(axis=0), scale),
            rounded=bool(rounded[which].any()),
            **{kind: float(number[which].sum()) / max(of, 1) for kind, number in shares.items()},
        )


def _rounded(counts: ExponentCounts) -> np.ndarray:
    """For each variable, return whether its gradient may have been rounded to float16.

    A gradient was not rounded if it was computed in float32, or if a finite nonzero value lies outside float16's range.
    """
    outside = np.array(counts.counts[:, FINITE])
    outside[:, SUBNORMAL - LOWEST : MAXIMUM + 1 - LOWEST] = 0
    return np.logical_and(not counts.full_precision, ~outside.any(axis=1))


def _lost(counts: ExponentCounts, rounded: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays: how many of each variable's values vanish, are subnormal, and overflow at a loss scale."""
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
    return vanished, below_normal - vanished, overflow


def _headroom(counts: ExponentCounts, row: np.ndarray, scale: float) -> int | None:
    top = _highest(row)
    if top is None or row[[INFINITE, NAN]].any():
        return None
    return math.floor(MAXIMUM - top - math.log2(scale) + math.log2(counts.scale))


def _highest(row: np.ndarray) -> int | None:
    """Return the highest exponent of the finite nonzero values. If there are no such values, return None."""
    exponents = np.flatnonzero(row[FINITE])
    return int(exponents[-1]) + LOWEST if exponents.size else None
