"""Gradients whose exponents NumPy counts: the meaning of `ExponentCounts`, for tests."""

import numpy as np

from tf_lossscale.diagnosis.precision import COLUMNS, INFINITE, NAN, ZEROS, ExponentCounts, column


def row_of(values):
    """Count the values of a gradient by their exponents."""
    with np.errstate(invalid="ignore"):
        values = np.asarray(values).astype(np.float64)
    row = np.zeros(COLUMNS, np.int64)
    row[ZEROS], row[INFINITE], row[NAN] = (values == 0).sum(), np.isinf(values).sum(), np.isnan(values).sum()
    exponents = np.frexp(values[np.isfinite(values) & (values != 0)])[1] - 1
    np.add.at(row, [column(int(exponent)) for exponent in exponents], 1)
    return row


def counted(gradients, scale=1.0, step=1, float16=False):
    """Return the counts of gradients, by name, times a loss scale, and rounded to float16 if float16 computed them."""
    with np.errstate(over="ignore"):
        scaled = [np.abs(np.asarray(gradient, np.float64) * scale) for gradient in gradients.values()]
        rows = [row_of(values.astype(np.float16) if float16 else values) for values in scaled]
    counts = np.array(rows, np.int64).reshape(len(gradients), COLUMNS)
    return ExponentCounts(tuple(gradients), counts, scale, step)
