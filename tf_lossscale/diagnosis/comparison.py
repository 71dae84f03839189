"""Judges how the change of a variable in a training step depends on the loss scale."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

# The loss scales are a power of 8 apart: float16 rounds alike at each of them, except for subnormal numbers.
FACTOR = 8.0

NOT_DIVIDED = "not divided"
NOT_SCALED = "divided twice, or its loss was not scaled"
PART_NOT_SCALED = "part of its loss is not scaled"
OTHER_SCALE = "scaled and divided by the loss scales of two optimizers"
MOVED = "the scale changed between scaling and dividing"
ANOTHER_WAY = "depends on the scale in another way"
RANDOM = "random: cannot be judged"
LOST = "float16 loses this gradient at the lower scale"


class Comparison:
    """Compares the changes of a variable in the runs of a step with its change at the highest scale."""

    def __init__(self, old: np.ndarray, base: np.ndarray, again: np.ndarray):
        self._old, self._base, self._size = old, base, norm(base)
        self._noise = norm(again - base)
        # float32 rounds each new value.
        self._blur = max(10 * self._noise, 4e-7 * norm(old))
        self.is_random = self._noise > max(1e-2 * self._size, 4e-7 * norm(old))

    def finding(
        self,
        runs: Mapping[float, np.ndarray | None],
        lower: Sequence[float],
        moved: np.ndarray | None,
        is_random: bool,
    ) -> str:
        """Return what is wrong with the variable, or an empty string.

        Args:
            runs: the changes at lower scales, or None where the step was skipped. The keys are the highest scale
                divided by each of them, and contain `FACTOR` and `FACTOR**2`.
            lower: the keys of the runs that show how the change grows toward low scales, in ascending order.
            moved: the change if the scale grows in the step, or None if it was skipped.
            is_random: whether the step is random.
        """
        near, nearer, lowest = runs[FACTOR], runs[FACTOR**2], runs[lower[-1]]
        grows = _falls_by((lowest, runs[lower[0]]), FACTOR, FACTOR**2)
        if is_random:
            highest = max(map(norm, (self._base, near, nearer)))
            return self._finding_of_random(near, nearer, grows and norm(lowest) > FACTOR / 2 * highest)
        grows = grows and self._differs(lowest) and _grows(self._base, {each: runs[each] for each in lower}, 0.4)
        if near is not None and self._differs(near):
            return self._finding_at_high_scales(near, nearer, grows)
        if grows:
            return PART_NOT_SCALED
        return MOVED if self._differs(moved) else ""

    def _finding_of_random(self, near: np.ndarray | None, nearer: np.ndarray | None, grows: bool) -> str:
        if _falls_by((self._base, near, nearer), FACTOR, FACTOR**2):
            return NOT_DIVIDED
        if _falls_by((nearer, near, self._base), FACTOR, FACTOR**2):
            return NOT_SCALED if grows else ANOTHER_WAY
        if grows:
            return PART_NOT_SCALED
        return RANDOM if self._noise > 0.5 * self._size else ""

    def _finding_at_high_scales(self, near: np.ndarray, nearer: np.ndarray | None, grows: bool) -> str:
        change = near - self._base
        if _falls_by((self._base, near), FACTOR, FACTOR**2, tolerance=0.05):
            return NOT_DIVIDED
        if grows:
            is_whole = _falls_by((change, self._base), FACTOR - 1, FACTOR**2 - 1, tolerance=0.05)
            return NOT_SCALED if is_whole or self._has_only_old_parts(change) else PART_NOT_SCALED
        # The change of a slot that a mistake in earlier steps has filled is a + c * scale.
        at_lower = change if nearer is None else nearer - self._base
        is_falling = _falls_by((at_lower, change), 1 + 1 / 8, 1 + 1 / 64, tolerance=2e-3)
        if is_falling and _cosine(at_lower, change) > 0.9999:
            return NOT_DIVIDED
        if np.all(np.abs(near) <= 2 * np.abs(self._base) + self._blur) and np.all(near * self._base >= 0):
            return LOST
        return ANOTHER_WAY

    def _differs(self, change: np.ndarray | None) -> bool:
        if change is None:
            return False
        return norm(change - self._base) > max(1e-2 * self._size, 1e-2 * norm(change), self._blur)

    def _has_only_old_parts(self, change: np.ndarray) -> bool:
        """Return whether the part of the change that does not depend on the scale is a multiple of a slot's value."""
        rest = self._base - change / (FACTOR - 1)
        return norm(rest) * norm(self._old) > 0 and abs(_cosine(rest, self._old)) > 0.999


def _falls_by(changes: tuple[np.ndarray | None, ...], *factors: float, tolerance: float = 0.4) -> bool:
    """Return whether each change is smaller by one of the factors than the change before it."""
    sizes = list(map(norm, changes))
    if not all(sizes):
        return False
    ratios = [one / other for one, other in itertools.pairwise(sizes)]
    return any(all(abs(ratio - factor) <= tolerance * factor for ratio in ratios) for factor in factors)


def norm(change: np.ndarray | None) -> float:
    """Return the L2 norm of a change, or zero if the step was skipped."""
    return 0.0 if change is None else float(np.linalg.norm(change))


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other) / max(norm(one) * norm(other), 1e-300)


def has_growing_part(base: np.ndarray, changes: Mapping[float, np.ndarray | None]) -> bool:
    """Return whether a part of a change grows toward low scales, and is small at the highest of them.

    Args:
        base: the change at the highest scale.
        changes: the changes at lower scales. The keys are the highest scale divided by each of them.
    """
    highest = changes[min(changes)]
    is_small = highest is not None and 1e-5 * norm(base) < norm(highest - base) < 0.1 * norm(base)
    return is_small and _grows(base, changes, tolerance=0.2)


def _grows(base: np.ndarray, changes: Mapping[float, np.ndarray | None], tolerance: float) -> bool:
    """Return whether the difference from `base` grows as 1 / scale, or as its square, and keeps its direction.

    The rounding errors of float16 grow as well, but have another direction at each scale.
    """
    parts = {factor: change - base for factor, change in changes.items() if change is not None}
    if len(parts) < len(changes):
        return False
    lowest = max(parts)
    for power in (1, 2):
        expected = {factor: parts[lowest] * (factor**power - 1) / (lowest**power - 1) for factor in parts}
        if all(norm(parts[factor] - part) <= tolerance * norm(part) for factor, part in expected.items()):
            return True
    return False
