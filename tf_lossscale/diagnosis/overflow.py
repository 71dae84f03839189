"""Records how often the gradient of each variable was infinite or NaN, and the norm of all gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.finite import nonfinite_kind
from tf_lossscale.core.norm import global_norm
from tf_lossscale.core.variables import LazyVariable, Variables, unless, value_or_zero


class Diagnosis(Variables):
    """Counts, for each trained variable, the steps in which its gradient was not finite. The counts are not saved.

    In an applied step, only the norm of the gradients is computed. In a skipped step, each gradient is also checked.

    >>> diagnosis = Diagnosis()
    >>> gradients = [tf.constant([1.0]), tf.constant([float("inf")])]
    >>> _ = diagnosis.record(("kernel", "bias"), tf.constant(False), gradients, gradients)
    >>> diagnosis.counts()["bias"].tolist()
    [1, 1, 1, 0]
    """

    def __init__(self) -> None:
        super().__init__(name="diagnosis")
        # A list with an item for each table of counts. An item is a tuple of variable names, one for each row of the
        # table.
        self.__dict__["_tables"] = []

    #: An int64 scalar variable: the number of steps, including skipped ones.
    steps = LazyVariable(0, tf.int64, tracked=False)
    #: A float32 scalar variable: the norm of all gradients in the last step.
    gradient_norm = LazyVariable(0.0, tf.float32, tracked=False)

    def prepare(self, names: tuple[str, ...]) -> None:
        """Create the variables in which steps are recorded. They are created outside of the step's graph.

        Args:
            names: the names of the trained variables.
        """
        if names not in self._tables:
            # All replicas look for the table before any of them creates it, so either all or none of them call
            # `replicas.once`.
            replicas.once(lambda: self._make(names))

    def record(
        self, names: tuple[str, ...], applied: tf.Tensor, gradients: list[Any], checked: list[Any]
    ) -> list[tf.Operation]:
        """Record a step.

        Args:
            names: the names of the trained variables, one for each gradient.
            applied: bool scalar, False if the step was skipped.
            gradients: the gradients, reduced over the replicas; each may be None.
            checked: for each gradient, a value that shows whether the gradient is infinite or NaN on any replica: its
                `finite.nonfinite_kind`, summed over the replicas, or the gradient itself.

        Returns:
            The operations that a session has to run in a TF1 graph.
        """
        self.prepare(names)
        step = value_or_zero(self.steps) + 1
        assigned = [self.steps.assign(step), self.gradient_norm.assign(global_norm(gradients))]
        table = self._table(names)

        def note() -> Any:
            return table.assign(_after(value_or_zero(table), checked, step))

        return assigned + unless(applied, note)

    def counts(self) -> dict[str, np.ndarray]:
        """Return a dict that maps variable names to [bad steps, last bad step, steps with infinity, steps with NaN].

        A step is bad for a variable if the variable's gradient was infinite or NaN.
        """
        counts: dict[str, np.ndarray] = {}
        for names in self._tables:
            for name, row in zip(names, tf.convert_to_tensor(self._table(names)).numpy()):
                before = counts.get(name, np.zeros_like(row))
                steps, _, infinities, nans = before + row
                counts[name] = np.array([steps, max(before[1], row[1]), infinities, nans])
        return counts

    def _make(self, names: tuple[str, ...]) -> None:
        self._tables.append(names)
        # Reading these attributes creates their variables.
        _ = self.steps, self.gradient_norm, self._table(names)

    def _table(self, names: tuple[str, ...]) -> tf.Variable:
        return self._weight(f"table_{self._tables.index(names)}", [[0] * 4] * len(names), tf.int64, tracked=False)


def _after(table: tf.Tensor, checked: list[Any], step: tf.Tensor) -> tf.Tensor:
    """Return the table of counts, updated for a skipped step."""
    kinds = tf.stack([tf.constant(0.0) if g is None else nonfinite_kind(g) for g in checked])
    infinite, nan = (tf.cast(is_so(kinds), tf.int64) for is_so in (tf.math.is_inf, tf.math.is_nan))
    bad = infinite + nan
    last = tf.where(bad > 0, step, table[:, 1])
    return tf.stack([table[:, 0] + bad, last, table[:, 2] + infinite, table[:, 3] + nan], axis=1)
