"""The text of a precision report: its sentences and its table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tf_lossscale.precision.counts import INFINITE, NAN

if TYPE_CHECKING:
    from tf_lossscale.precision.report import PrecisionReport, VariablePrecision

#: Gradients fit in float16 if the fraction of values outside float16's normal range is at most `LITTLE` for all
#: variables together, and at most `LITTLE_OF_ONE` for each variable.
LITTLE, LITTLE_OF_ONE = 0.01, 0.1

# The largest number of variables that a sentence lists by name.
_NAMED = 3
_NOTE = (
    "* All values are in float16's range. If float16 computed them, values that vanished are among the zeros.\n"
    "Zeros are a percentage of all values. The other percentages refer to the values that are not zero. Headroom is in "
    "powers of two."
)


def about_the_scale(report: PrecisionReport) -> str:
    """Return the sentence about the best scale, at which no value overflows and the fewest values are lost.

    Args:
        report: the report.
    """
    best, total, counted = report.best_scale, report.total, power(report.counts.scale)
    if not total.values:
        return "No variable had a gradient."
    if best is None and total.zeros < 1:
        return "All values except zeros are infinite or NaN: no loss scale helps."
    if best is None:
        return f"All values are zero{': count again with a higher loss scale' if total.rounded else ''}."
    if report.overflow_is_open and report.counts.scale <= 1:
        return (
            f"Values are infinite or NaN although the loss scale is only {counted}: look for the cause in the loss, "
            "the layers and the data."
        )
    if report.overflow_is_open:
        return (
            f"Values became infinite or NaN at the loss scale {counted}, so it is unknown how large they would be. A "
            f"scale that fits is at most {power(best)}: count again at a lower one."
        )
    now = "" if best == report.scale else f" ({_at(report.scale)}: {_losses(total)})"
    return (
        f"The highest loss scale at which no value overflows is {power(best)}; of the values that are not zero, "
        f"{_losses(report.at(best).total)} at this scale{now}."
    )


def about_the_variables(report: PrecisionReport) -> str:
    """Return the sentence about the variables that float16 affects at the report's scale.

    Args:
        report: the report.
    """
    affected, best = report.affected, report.best_scale
    where = _at(report.scale)[0].upper() + _at(report.scale)[1:]
    if not affected and not report.total.any_nonzero:
        return "No variable has values that float16 could lose."
    if not affected:
        return f"{where} no variable is affected: each has at least 90% of its values in float16's normal range."
    at_best = {} if best in (None, report.scale) else {row.variable: row for row in report.at(best).rows}
    named = [f"{row.variable} ({_harm(row, at_best.get(row.variable), best)})" for row in affected[:_NAMED]]
    if len(affected) > _NAMED:
        named.append(f"and {len(affected) - _NAMED} more")
    variables = f"{len(affected)} variable{'s' * (len(affected) > 1)}"
    return f"{where} float16 affects {variables}: {', '.join(named)}."


def whether_float16_fits(report: PrecisionReport) -> str:
    """Return a sentence on whether the gradients fit in float16, with no loss scale or with the best one.

    Args:
        report: a report on gradients that were computed in float32.
    """
    best = report.best_scale
    if not report.counts.full_precision:
        return (
            "These gradients do not tell whether float16 fits: they were computed in float16, and values that vanished "
            "are lost. Run the program in float32."
        )
    if report.counts.counts[:, [INFINITE, NAN]].any():
        return (
            "These gradients do not tell whether float16 fits: some are infinite or NaN even in this program, without "
            "float16. Count a step with finite gradients."
        )
    if best is None:
        return "These gradients do not tell whether float16 fits: all of their values are zero."
    without, at_best = report.at(1.0), report.at(best)
    bare, scaled = percent(_outside(without.total)), percent(_outside(at_best.total))
    values = "of the values that are not zero are outside its normal range"
    if _fits(without):
        return f"Float16 fits even without a loss scale: {bare} {values}."
    if _fits(at_best):
        return (
            f"Float16 fits with a loss scale: without one {bare} {values}, with a loss scale of {power(best)} {scaled}."
        )
    worst = sorted((row for row in at_best.rows if _outside(row) > LITTLE), key=_outside, reverse=True)
    named = ", ".join(f"{row.variable} ({percent(_outside(row))})" for row in worst[:_NAMED])
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    return (
        f"Float16's range is too narrow: without a loss scale {bare} {values}, with the best loss scale, "
        f"{power(best)}, {scaled}. Use bfloat16 or float32 for the variables with the largest fraction "
        f"outside the range: {named}{more}."
    )


def table(report: PrecisionReport) -> Any:
    """Return an object that `rich.print` can print: the step, a summary, the table and a note about the table.

    The table shows what fraction of the values vanishes without a loss scale, at the report's scale, and at half and
    twice the report's scale. If the report's scale is 1, the table shows only the fractions without a loss scale and at
    the best scale.

    Args:
        report: the report.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows, scale = (*report.rows, report.total), report.scale
    best = report.best_scale or 1.0
    scales = sorted({1.0, best} if scale == 1 else {1.0, scale / 2, scale, scale * 2})
    shown = Table(box=None, pad_edge=False, collapse_padding=True, header_style="")
    shown.add_column("\nvariable", overflow="fold")
    for name in ("\nzeros", "sub-\nnormal", "over-\nflow", "head-\nroom", *(f"vanish\n{power(s)}" for s in scales)):
        shown.add_column(name, justify="right", no_wrap=True)
    vanished = [[row.vanished for row in (*other.rows, other.total)] for other in map(report.at, scales)]
    for i, row in enumerate(rows):
        headroom = "-" if row.headroom is None else str(row.headroom)
        zeros = (percent(row.zeros) if row.values else "-") + ("*" if row.rounded and row.zeros else "")
        shares = [
            percent(n) if row.any_nonzero else "-" for n in (row.subnormal, row.overflow, *(at[i] for at in vanished))
        ]
        shown.add_row(Text(row.variable), zeros, *shares[:2], headroom, *shares[2:])
    starred = any(row.rounded and row.zeros for row in rows)
    note = _NOTE if starred else _NOTE.partition("\n")[2]
    heading = f"Gradients in step {report.step}"
    return Group(Text("\n".join((heading, *report.sentences))), "", shown, "", Text(note))


def power(scale: float) -> str:
    """Return a loss scale as text: in the form 2**15 if it is a power of two, otherwise as a number.

    >>> power(32768.0), power(1.0), power(0.25), power(1000.0)
    ('2**15', '1', '2**-2', '1000')

    Args:
        scale: a number above 0.
    """
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent != 1 else f"{scale:g}"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage. Only the fractions 0 and 1 become 0% and 100%.

    >>> percent(0.0), percent(1e-5), percent(0.25), percent(1 - 1e-9), percent(1.0)
    ('0%', '<0.1%', '25.0%', '>99.9%', '100%')

    Args:
        fraction: the fraction, a number from 0 to 1.
    """
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return "<0.1%" if fraction < 0.001 else ">99.9%" if fraction > 0.999 else f"{fraction:.1%}"


def _outside(row: VariablePrecision) -> float:
    return row.below_normal + row.overflow


def _fits(report: PrecisionReport) -> bool:
    return _outside(report.total) <= LITTLE and all(_outside(row) <= LITTLE_OF_ONE for row in report.rows)


def _at(scale: float) -> str:
    return "without a loss scale" if scale == 1 else f"at {power(scale)}"


def _losses(row: VariablePrecision) -> str:
    parts = [f"{percent(row.vanished)} vanish"] * (row.vanished > 0 or not row.rounded)
    parts += [f"{percent(row.subnormal)} are subnormal"]
    parts += [f"{percent(row.overflow)} overflow"] * (row.overflow > 0)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _harm(row: VariablePrecision, at_best: VariablePrecision | None, best: float | None) -> str:
    if row.only_zeros:
        return "only zeros"
    if row.overflow or row.nan:
        parts = [f"{percent(row.overflow)} overflow"] * (row.overflow > 0) + [f"{percent(row.nan)} NaN"] * (row.nan > 0)
        return " and ".join(parts)
    what = "are subnormal" if row.rounded else "vanish or are subnormal"
    better = f", {percent(at_best.below_normal)} at {power(best)}" if at_best is not None and best is not None else ""
    return f"{percent(row.below_normal)} {what}{better}"
