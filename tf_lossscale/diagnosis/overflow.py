"""Records how often the gradient of each variable was infinite or NaN, and the norm of all gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.gradients import nonfinite_kind, sums_of_rows
from tf_lossscale.core.variables import LazyVariable, Variables, unless, value_or_zero


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A row of an overflow report: one variable whose gradient was not finite in some steps.

    >>> Overflow("dense/kernel", steps=3, last_step=17, infinite_steps=3, nan_steps=0).kind
    'inf'
    """

    variable: str
    steps: int
    last_step: int
    infinite_steps: int
    nan_steps: int

    @property
    def kind(self) -> str:
        """The kinds of non-finite values that the gradient has had so far: "inf", "NaN" or "inf, NaN".

        A step whose gradient contained both infinity and NaN counts only as NaN. "inf, NaN" therefore means that the
        kinds occurred in different steps.
        """
        steps_of = {"inf": self.infinite_steps, "NaN": self.nan_steps}
        return ", ".join(kind for kind, steps in steps_of.items() if steps)


class OverflowReport(tuple[Overflow, ...]):
    """The result of `overflow_report()`: a tuple of `Overflow` rows that prints as a table.

    >>> OverflowReport([Overflow("dense/kernel", 3, 17, 3, 0), Overflow("dense/bias", 1, 2, 0, 1)])
    variable      steps  last step  kind
    dense/kernel      3         17  inf
    dense/bias        1          2  NaN
    >>> OverflowReport()
    No gradient was infinite or NaN.
    """

    def __repr__(self) -> str:
        if not self:
            return "No gradient was infinite or NaN."
        width = max(8, *(len(row.variable) for row in self))
        lines = [f"{'variable':{width}}  {'steps':>5}  {'last step':>9}  kind"]
        lines += [f"{row.variable:{width}}  {row.steps:>5}  {row.last_step:>9}  {row.kind}" for row in self]
        return "\n".join(lines)


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
    steps: Any = LazyVariable(0, tf.int64, tracked=False)
    #: A float32 scalar variable: the norm of all gradients in the last step.
    gradient_norm: Any = LazyVariable(0.0, tf.float32, tracked=False)

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
        self,
        names: tuple[str, ...],
        applied: tf.Tensor,
        gradients: list[Any],
        checked: list[Any],
        applies_only_finite: bool = True,
    ) -> list[tf.Operation]:
        """Record a step.

        Args:
            names: the names of the trained variables, one for each gradient.
            applied: bool scalar, False if the step was skipped.
            gradients: the gradients, reduced over the replicas; each may be None.
            checked: for each gradient, a value that shows whether the gradient is infinite or NaN on any replica: its
                `gradients.nonfinite_kind`, summed over the replicas, or the gradient itself.
            applies_only_finite: whether all gradients of an applied step are finite. A user-defined `check` may apply
                others.

        Returns:
            The operations that a session has to run in a TF1 graph.
        """
        self.prepare(names)
        step, norm = value_or_zero(self.steps) + 1, global_norm(gradients)
        assigned = [self.steps.assign(step), self.gradient_norm.assign(norm)]
        table = self._table(names)

        def note() -> Any:
            return table.assign(_after(value_or_zero(table), checked, step))

        # A predicate of its own would make the host wait for a GPU once more.
        fine = applied if applies_only_finite else tf.logical_and(applied, tf.math.is_finite(norm))
        return assigned + unless(fine, note)

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


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Return the global norm of the gradients.

    >>> global_norm([tf.constant([3.0]), None, tf.constant([4.0])]).numpy().item()
    5.0

    Args:
        gradients: tensors, IndexedSlices or None.

    Returns:
        A float32 scalar tensor, which is infinite or NaN if any gradient contains infinity or NaN.
    """
    dense = [sums_of_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    wide = [tf.cast(values, tf.float32) for values in dense]
    if not wide:
        return tf.constant(0.0)
    # The squares of values above 1e19 would overflow, so all values are divided by the largest one.
    largest = tf.reduce_max(tf.stack([0.0, *(tf.reduce_max(tf.abs(values)) for values in wide)]))
    unit = tf.where(tf.logical_and(tf.math.is_finite(largest), largest > 0), largest, 1.0)
    return unit * tf.linalg.global_norm([values / unit for values in wide])
