"""What float16 loses of gradients that were counted by exponent, and the loss scale at which it loses least."""

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

#: float16's largest number is 65504, which has the exponent 15. Normal numbers have 11 significant bits and begin at
#: 2**-14. Below them, down to 2**-24, subnormal numbers have fewer. 2**-25 and everything below it rounds to zero.
MAXIMUM, NORMAL, SUBNORMAL = 15, -14, -24

#: A variable is affected if more than this share of its values lies below float16's normal range.
AFFECTED = 0.1

_LARGEST_SCALE = 127  # the exponent of float32's largest power of two


@dataclasses.dataclass(frozen=True)
class VariablePrecision:
    """A row of a precision report: what float16 loses of one variable's gradient.

    `zeros` is a share of all values. The other shares are of the values that are not zero: many gradients are mostly
    zero in any format, those behind an inactive ReLU for example.

    >>> row = VariablePrecision("kernel", values=9, zeros=0.1, subnormal=0.2, overflow=0.0, nan=0.0, headroom=3,
    ...                         vanished=0.05, vanished_unscaled=1.0, vanished_at_half=0.1, vanished_at_twice=0.0)
    >>> row.below_normal
    0.25

    Args:
        variable: the variable's name.
        values: the number of values.
        zeros: the share of zeros.
        subnormal: the share in float16's subnormal range, at the loss scale of the counts.
        overflow: the share above float16's range, infinite values included.
        nan: the share of NaNs.
        headroom: by how many powers of two the loss scale can grow before the largest value overflows; negative if it
            overflows. None if the largest value is unknown: none is finite, or one is infinite.
        vanished: the share that rounds to zero in float16.
        vanished_unscaled: the share that would round to zero at a loss scale of 1.
        vanished_at_half: the share that would do so at half the loss scale.
        vanished_at_twice: the share that would do so at twice the loss scale.
        rounded: whether float16 has rounded these values already, so that values that vanished are among the zeros.
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
        """The share of the values below float16's normal range: those that vanish, and those that lose bits."""
        return self.vanished + self.subnormal

    @property
    def any_nonzero(self) -> bool:
        """Whether any value is not zero; otherwise the shares of such values are 0 and mean nothing."""
        return self.values > 0 and self.zeros < 1

    @property
    def only_zeros(self) -> bool:
        """Whether float16 may have left only zeros: all values are zero, and float16 rounded them."""
        return self.rounded and self.zeros == 1


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PrecisionReport:
    """What float16 loses of the gradients of one step; printed, sentences and a table.

    >>> from tf_lossscale.precision.counts import COLUMNS
    >>> counts = np.zeros([1, COLUMNS], np.int64)
    >>> counts[0, [column(-30), column(-5)]] = 25, 75
    >>> report = precision_report(ExponentCounts(("kernel",), counts, scale=1.0, step=1, full_precision=True))
    >>> report.best_scale
    1048576.0
    >>> report.rows[0].vanished, report.at(report.best_scale).rows[0].vanished
    (0.25, 0.0)

    Args:
        counts: the gradients of the step.
        scale: the loss scale of the report; None for the one that multiplied the gradients.
    """

    counts: ExponentCounts
    scale: float = 0.0

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", self.counts.scale)

    @property
    def step(self) -> int:
        """The step whose gradients were counted."""
        return self.counts.step

    @property
    def rows(self) -> tuple[VariablePrecision, ...]:
        """A row for each variable, in their order."""
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
        """The highest power of two at which no value overflows, and so the scale at which float16 loses least.

        None if no gradient says how high that is: all are zero, infinite or NaN. If a loss scale made gradients
        infinite, it is an upper bound, below that scale: how large they would have been is unknown. It is one too
        if finite values reach 2**32, beyond the last bin.
        """
        top = _highest(self.counts.counts.sum(axis=0))
        before = math.log2(self.counts.scale)
        bounds = [] if top is None else [math.floor(before + MAXIMUM - top)]
        if self.overflow_is_open:
            bounds.append(math.ceil(before) - 1)
        return 2.0 ** min(*bounds, _LARGEST_SCALE) if bounds else None

    @property
    def overflow_is_open(self) -> bool:
        """Whether values became infinite or NaN in float16, so that the size of the largest one is unknown."""
        return bool(not self.counts.full_precision and self.counts.counts[:, [INFINITE, NAN]].any())

    @property
    def affected(self) -> tuple[VariablePrecision, ...]:
        """The rows that float16 hurts at this scale, worst first.

        Some values overflow or are NaN, more than a tenth lies below float16's normal range, or float16 left only
        zeros.
        """
        rows = [row for row in self.rows if row.overflow or row.nan or row.below_normal > AFFECTED or row.only_zeros]
        return tuple(sorted(rows, key=lambda row: -max(row.overflow + row.nan, row.below_normal, row.only_zeros)))

    def at(self, scale: float) -> PrecisionReport:
        """Return the report of the same gradients at another loss scale.

        >>> from tf_lossscale.precision.counts import COLUMNS
        >>> report = precision_report(ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1.0, step=1))
        >>> report.at(2.0**10).scale
        1024.0

        Args:
            scale: a finite number above 0.

        Raises:
            TypeError: the scale is no number.
            ValueError: the scale is out of range.
        """
        return PrecisionReport(self.counts, errors.positive_number("scale", scale, "Pass a loss scale such as 2**15."))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for a JSON file."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        facts = {"step": self.step, "scale": self.scale, "best_scale": self.best_scale}
        return {**facts, "sentences": list(self.sentences), "rows": rows, "total": dataclasses.asdict(self.total)}

    def write(self, folder: Any, step: int | None = None) -> None:
        """Add the counts to the file `exponents.jsonl` of a run, for `tf-lossscale plot`.

        >>> import tempfile
        >>> from tf_lossscale.precision.counts import COLUMNS
        >>> report = precision_report(ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1.0, step=1))
        >>> report.write(tempfile.mkdtemp())

        Args:
            folder: the folder of the run; it is made if it is missing.
            step: the step of the run. None for `report.step`, which begins at 1 again when an optimizer is loaded.

        Raises:
            OSError: the file cannot be written.
            TypeError: the step is no number.
            ValueError: the step is no whole number of at least 1.
        """
        step = errors.whole_number("step", self.step if step is None else step, "Pass the step of the run, from 1.")
        append(folder, dataclasses.replace(self.counts, step=step))

    @property
    def sentences(self) -> tuple[str, str]:
        """The report in words: the scale at which float16 loses least, and the variables that it hurts."""
        return about_the_scale(self), about_the_variables(self)

    def __rich__(self) -> Any:
        """Return the sentences and the table, which `rich.print` prints."""
        return table(self)

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(file=(printed := io.StringIO()), highlight=False, color_system=None)
        console.print(self)
        return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def precision_report(counts: ExponentCounts) -> PrecisionReport:
    """Return what float16 loses of the gradients that were counted.

    >>> from tf_lossscale.precision.counts import COLUMNS
    >>> counts = np.zeros([2, COLUMNS], np.int64)
    >>> counts[0, [column(-30), column(-20), column(-5)]] = 10, 20, 70
    >>> counts[1, [ZEROS, column(-9)]] = 1, 3
    >>> precision_report(ExponentCounts(("kernel", "bias"), counts, scale=1.0, step=1, full_precision=True))
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
    Zeros are a share of all values, the others of the values that are not zero.
    Headroom is in powers of two.

    Args:
        counts: of one step.

    Returns:
        The report. Figure 3 of Micikevicius and others, *Mixed Precision Training*, 2018
        (https://arxiv.org/abs/1710.03740), is such a histogram, of activation gradients.
    """
    return PrecisionReport(counts)


def _rows(counts: ExponentCounts, scale: float) -> Iterator[VariablePrecision]:
    """Yield a row for each variable, and one for all together."""
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
    """Return for each variable whether its values may be float16's: all finite ones are in the range of float16."""
    outside = np.array(counts.counts[:, FINITE])
    outside[:, SUBNORMAL - LOWEST : MAXIMUM + 1 - LOWEST] = 0
    return np.logical_and(not counts.full_precision, ~outside.any(axis=1))


def _lost(counts: ExponentCounts, rounded: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each variable how many values vanish, become subnormal and overflow at a loss scale."""
    at = counts.at(scale).counts
    vanished = at[:, column(LOWEST) : column(SUBNORMAL - 1)].sum(axis=1)
    halvings = math.log2(counts.scale) - math.log2(scale)
    if halvings >= 1:
        # 2**-25 itself rounds to zero. Of float32's values in its bin that is one of millions, of float16's, which are
        # 2**-24 apart before the halvings, a large part: at the first halving all, at the second every second one.
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
    """Return the highest exponent with a value; None if no value is finite and not zero."""
    exponents = np.flatnonzero(row[FINITE])
    return int(exponents[-1]) + LOWEST if exponents.size else None
