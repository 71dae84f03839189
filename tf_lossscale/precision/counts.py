"""Counts of gradients by exponent: how many values of each variable's gradient lie between two powers of two."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

#: The lowest and the highest exponent floor(log2|g|) with a bin. The first bin also counts all smaller values, and the
#: last bin all larger finite values.
LOWEST, HIGHEST = -64, 31
BINS = HIGHEST - LOWEST + 1

#: Columns of `ExponentCounts.counts`: the zeros, the bins, the infinite values, the NaNs.
ZEROS, FINITE, INFINITE, NAN = 0, slice(1, BINS + 1), BINS + 1, BINS + 2
COLUMNS = BINS + 3


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentCounts:
    """The values of each variable's gradient in one step, counted by exponent.

    >>> row = np.zeros([1, COLUMNS], np.int64)
    >>> row[0, column(-20)] = 5
    >>> counts = ExponentCounts(("kernel",), row, scale=1024.0, step=100)
    >>> counts.at(1.0).counts[0, column(-30)].item()
    5.0

    Args:
        names: the names of the variables, all different.
        counts: int64 of shape [variables, COLUMNS]: the zeros, the finite values by exponent from LOWEST to HIGHEST,
            the infinite values, the NaNs.
        scale: the loss scale that multiplied the gradients; 1.0 if none did.
        step: the step that was counted, from 1.
        full_precision: True if the gradients were computed in float32, as when `probe` counts them. If a layer computes
            its gradient in float16, values that are too small for float16 are counted as zeros.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    scale: float
    step: int
    full_precision: bool = False

    def __post_init__(self) -> None:
        if self.counts.shape != (len(self.names), COLUMNS):
            raise ValueError(
                f"`counts` must have the shape {(len(self.names), COLUMNS)}, a row for each name, but got: "
                f"{self.counts.shape}."
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"`names` must differ from each other, but got: {self.names}.")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"`scale` must be a finite number above 0, but got: {self.scale!r}.")

    def at(self, scale: float) -> ExponentCounts:
        """Return the counts that the same gradients would have at another loss scale, without rounding to float16.

        Multiplying gradients by 2**k moves every count by k bins. For factors between two powers of two, the logarithms
        of the values in a bin are assumed to be spread evenly: for a factor of 2**(k + f) with 0 < f < 1, the share
        1 - f of the values moves by k bins, and the share f by k + 1 bins.

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
    """Return the column of `ExponentCounts.counts` that counts the values with an exponent.

    >>> column(LOWEST), column(HIGHEST), column(HIGHEST + 5)
    (1, 96, 96)

    Args:
        exponent: floor(log2|g|) of a finite value g other than zero.
    """
    return 1 + min(max(exponent, LOWEST), HIGHEST) - LOWEST
