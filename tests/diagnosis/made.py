"""Gradients whose exponents NumPy counts: the meaning of `ExponentCounts`, for tests."""

import numpy as np

from tf_lossscale.diagnosis.precision import COLUMNS, INFINITE, NAN, ZEROS, ExponentCounts, column


def counted(gradients, scale=1.0, step=1, float16=False):
    """Return the counts of gradients, by name, times a loss scale, and rounded to float16 if float16 computed them."""
    rows = []
    for gradient in gradients.values():
        with np.errstate(over="ignore"):
            values = np.abs(np.asarray(gradient, np.float64) * scale).astype(np.float16 if float16 else np.float64)
        row = np.zeros(COLUMNS, np.int64)
        row[ZEROS], row[INFINITE], row[NAN] = (values == 0).sum(), np.isinf(values).sum(), np.isnan(values).sum()
        exponents = np.frexp(values[np.isfinite(values) & (values != 0)].astype(np.float64))[1] - 1
        np.add.at(row, [column(int(exponent)) for exponent in exponents], 1)
        rows.append(row)
    counts = np.array(rows, np.int64).reshape(len(gradients), COLUMNS)
    return ExponentCounts(tuple(gradients), counts, scale, step)
