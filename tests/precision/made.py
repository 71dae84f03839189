"""Gradients whose exponents NumPy counts: the meaning of `ExponentCounts`, for tests."""

import numpy as np

from tf_lossscale.precision import records
from tf_lossscale.precision.counts import COLUMNS, INFINITE, NAN, ZEROS, ExponentCounts, column


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
    return ExponentCounts(tuple(gradients), counts, scale, step, full_precision=not float16)


VALUES = np.random.default_rng(0).normal(size=400) * 2.0 ** np.arange(-40, 0).repeat(10)


def run(steps, names=("model/dense/kernel", "model/dense/bias"), scale=2.0**10):
    """Return the counts of a run, at some steps, whose gradients reach from 2**-40 to 1."""
    return [counted(dict.fromkeys(names, VALUES), scale, step, float16=True) for step in steps]


def write(folder, steps, **kwargs):
    """Write the counts of a run to a folder."""
    for counts in run(steps, **kwargs):
        records.append(folder, counts)
