"""Records how often the gradient of each variable was infinite or NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.finite import nonfinite_kind
from tf_lossscale.core.variables import Variables, value_or_zero


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

    >>> diagnosis = Diagnosis()
    >>> diagnosis.prepare(("kernel", "bias"))
    >>> gradients = [tf.constant([1.0]), tf.constant([float("inf")])]
    >>> _ = diagnosis.record(("kernel", "bias"), gradients, tf.constant(1, tf.int64))
    >>> diagnosis.counts()["bias"].tolist()
    [1, 1, 1, 0]
    """

    def __init__(self) -> None:
        super().__init__(name="diagnosis")
        # A list with an item for each table of counts. An item is a tuple of variable names, one for each row of the
        # table.
        self.__dict__["_tables"] = []

    def prepare(self, names: tuple[str, ...]) -> None:
        """Create the variables in which steps are recorded. They are created outside of the step's graph.

        Args:
            names: the names of the trained variables.
        """
        if names not in self._tables:
            # All replicas look for the table before any of them creates it, so either all or none of them call
            # `replicas.once`.
            replicas.once(lambda: self._make(names))

    def record(self, names: tuple[str, ...], checked: list[Any], step: tf.Tensor) -> Any:
        """Record which gradients of a step are infinite or NaN.

        Args:
            names: the names of the trained variables, one for each gradient.
            checked: for each gradient, a value that shows whether the gradient is infinite or NaN on any replica: its
                `nonfinite_kind`, summed over the replicas, or the gradient itself.
            step: int64 scalar, the number of the step, starting from 1.

        Returns:
            The result of `assign`, which a session has to run in a TF1 graph.
        """
        table = self._table(names)
        return table.assign(_after(value_or_zero(table), checked, step))

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
        _ = self._table(names)  # Reading the table creates its variable.

    def _table(self, names: tuple[str, ...]) -> tf.Variable:
        return self._variable_named(
            f"table_{self._tables.index(names)}", [[0] * 4] * len(names), tf.int64, tracked=False
        )


def _after(table: tf.Tensor, checked: list[Any], step: tf.Tensor) -> tf.Tensor:
    """Return the table of counts after a step, from its values before the step."""
    kinds = tf.stack([tf.constant(0.0) if g is None else nonfinite_kind(g) for g in checked])
    infinite, nan = (tf.cast(is_so(kinds), tf.int64) for is_so in (tf.math.is_inf, tf.math.is_nan))
    bad = infinite + nan
    last = tf.where(bad > 0, step, table[:, 1])
    return tf.stack([table[:, 0] + bad, last, table[:, 2] + infinite, table[:, 3] + nan], axis=1)
