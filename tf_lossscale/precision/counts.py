"""Exponent counts: how many values of each variable's gradient lie between consecutive powers of two."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

#: The lowest and the highest exponent, floor(log2|g|), that have a bin. The first bin also counts all smaller nonzero
#: values, and the last bin also counts all larger finite values.
LOWEST, HIGHEST = -64, 31
BINS = HIGHEST - LOWEST + 1

#: The columns of `ExponentCounts.counts`: zeros, a bin for each exponent, infinite values, NaNs.
ZEROS, FINITE, INFINITE, NAN = 0, slice(1, BINS + 1), BINS + 1, BINS + 2
COLUMNS = BINS + 3


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentCounts:
    """The number of values with each exponent, for each variable's gradient in one step.

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
        full_precision: True if the gradients were computed in float32, for example in a program that `probe` observes.
            If they were computed in float16, values too small for float16 became zeros and are counted as zeros.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    scale: float
    step: int
    full_precision: bool = False

    def __post_init__(self) -> None:
        if self.counts.shape != (len(self.names), COLUMNS):
            raise ValueError(
                f"`counts` must have the shape {(len(self.names), COLUMNS)}, with a row for each name, but got: "
                f"{self.counts.shape}."
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"`names` must not contain the same name twice, but got: {self.names}.")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"`scale` must be a finite number above 0, but got: {self.scale!r}.")

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


def column(exponent: int) -> int:
    """Return the column of `ExponentCounts.counts` that counts the values with the given exponent.

    >>> column(LOWEST), column(HIGHEST), column(HIGHEST + 5)
    (1, 96, 96)

    Args:
        exponent: floor(log2|g|) of a finite nonzero value g.
    """
    return 1 + min(max(exponent, LOWEST), HIGHEST) - LOWEST
