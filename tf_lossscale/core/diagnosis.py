"""Records which variables' gradients overflowed, how often, and whether to infinity or NaN; and the gradient norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.finite import nonfinite_kind
from tf_lossscale.core.variables import LazyVariable, Variables, unless, value_or_zero


class Diagnosis(Variables):
    """Counts the steps in which each variable's gradient was not finite, in variables that are not saved.

    An applied step computes only the norm. A skipped step checks each gradient.

    >>> diagnosis = Diagnosis()
    >>> gradients = [tf.constant([1.0]), tf.constant([float("inf")])]
    >>> _ = diagnosis.record(("kernel", "bias"), tf.constant(False), gradients, gradients)
    >>> diagnosis.counts()["bias"].tolist()
    [1, 1, 1, 0]
    """

    def __init__(self) -> None:
        super().__init__(name="diagnosis")
        # For each table, a tuple with the names of the trained variables, one for each row.
        self.__dict__["_tables"] = []

    #: The number of steps, including skipped ones, an int64 scalar variable.
    steps = LazyVariable(0, tf.int64, tracked=False)
    #: The norm of the last step's gradients over all variables, a float32 scalar variable.
    gradient_norm = LazyVariable(0.0, tf.float32, tracked=False)

    def prepare(self, names: tuple[str, ...]) -> None:
        """Create the variables that record a step, outside of the step's graph.

        Args:
            names: the names of the trained variables.
        """
        if names not in self._tables:
            # No replica creates a table before all replicas have evaluated the condition above.
            replicas.once(lambda: self._make(names))

    def record(
        self, names: tuple[str, ...], applied: tf.Tensor, gradients: list[Any], evidence: list[Any]
    ) -> list[tf.Operation]:
        """Record a step.

        Args:
            names: the names of the trained variables, one for each gradient.
            applied: bool scalar, False if the step was skipped.
            gradients: the gradients, reduced over the replicas; each may be None.
            evidence: the gradients again, or for each gradient the `finite.nonfinite_kind` that all replicas agree on.

        Returns:
            The operations, for legacy graphs to run.
        """
        self.prepare(names)
        step = value_or_zero(self.steps) + 1
        done = [self.steps.assign(step), self.gradient_norm.assign(global_norm(gradients))]
        table = self._table(names)

        def note() -> Any:
            return table.assign(_after(value_or_zero(table), evidence, step))

        return done + unless(applied, note)

    def counts(self) -> dict[str, np.ndarray]:
        """Map each variable's name to [bad steps, last bad step, steps with infinity, steps with NaN]."""
        found: dict[str, np.ndarray] = {}
        for names in self._tables:
            for name, row in zip(names, tf.convert_to_tensor(self._table(names)).numpy()):
                before = found.get(name, np.zeros_like(row))
                steps, _, infinities, nans = before + row
                found[name] = np.array([steps, max(before[1], row[1]), infinities, nans])
        return found

    def _make(self, names: tuple[str, ...]) -> None:
        self._tables.append(names)
        # Reading these variables creates them.
        _ = self.steps, self.gradient_norm, self._table(names)

    def _table(self, names: tuple[str, ...]) -> tf.Variable:
        return self._weight(f"table_{self._tables.index(names)}", [[0] * 4] * len(names), tf.int64, tracked=False)


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Return the norm over all gradients.

    >>> global_norm([tf.constant([3.0]), None, tf.constant([4.0])]).numpy().item()
    5.0

    Args:
        gradients: tensors, IndexedSlices or None.

    Returns:
        A float32 scalar tensor; infinite or NaN if a gradient is.
    """
    wide = [tf.cast(_values(g), tf.float32) for g in gradients if g is not None]
    return tf.linalg.global_norm(wide) if wide else tf.constant(0.0)


def _after(table: tf.Tensor, evidence: list[Any], step: tf.Tensor) -> tf.Tensor:
    """Return the table of counts, updated for a skipped step."""
    kinds = tf.stack([tf.constant(0.0) if g is None else nonfinite_kind(g) for g in evidence])
    infinite, nan = (tf.cast(is_so(kinds), tf.int64) for is_so in (tf.math.is_inf, tf.math.is_nan))
    bad = infinite + nan
    last = tf.where(bad > 0, step, table[:, 1])
    return tf.stack([table[:, 0] + bad, last, table[:, 2] + infinite, table[:, 3] + nan], axis=1)


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
