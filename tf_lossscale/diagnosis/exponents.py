"""Counts the values of each gradient by binary exponent, at regular intervals and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.variables import LazyVariable, Variables, unless, value_or_zero
from tf_lossscale.diagnosis.precision import COLUMNS, INFINITE, NAN, ZEROS, ExponentCounts, column

#: By default, exponents are counted in the first step and then once every 100 steps.
EVERY = 100

_SUM, _FIRST = tf.VariableAggregation.SUM, tf.VariableAggregation.ONLY_FIRST_REPLICA


class Exponents(Variables):
    """Counts gradient values by variable and exponent, and keeps the most recent counts.

    Gradients are counted in the first step, and then once every `every` steps. All other steps only increment the step
    count. The counts are variables that checkpoints do not contain. Each replica counts its own gradients in its own
    copies of these variables, and `last` returns the sums of the copies.
    """

    def __init__(self, every: int):
        _require_own_copies()
        super().__init__(name="exponents")
        # `_tables` has an item for each table of counts: the names of the variables that are the table's rows.
        self.__dict__.update(every=every, _tables=[])

    #: An int64 scalar variable: the number of steps taken.
    steps: Any = LazyVariable(0, tf.int64, tracked=False, aggregation=_FIRST)
    #: An int64 scalar variable: the number of the next step whose gradients are counted.
    following: Any = LazyVariable(0, tf.int64, tracked=False, aggregation=_FIRST)

    def record(
        self, names: Callable[[], tuple[str, ...]], gradients: Callable[[], list[Any]], scale: Callable[[], tf.Tensor]
    ) -> list[tf.Operation]:
        """Increment the step count. If this step's gradients are due to be counted, count them by exponent.

        Call this in a replica context.
        """
        if not self.counts_next():
            self.steps.assign_add(1)
            return []
        _require_own_copies()
        rows = names()
        replicas.once(lambda: self._make(rows))
        step = value_or_zero(self.steps) + 1

        def count() -> list[Any]:
            counts, counted_step, counted_scale = self._table(rows)
            return [
                counts.assign(table(gradients())),
                counted_step.assign(step),
                counted_scale.assign(tf.cast(scale(), tf.float32)),
                self.following.assign(step + self.every),
            ]

        counted = unless(step < value_or_zero(self.following), count)
        return [*counted, *operations(self.steps.assign(step))]

    def counts_next(self) -> bool:
        """Return whether the next step might count gradients.

        In a graph or a cross-replica context, always return True.
        """
        following = self._all().get("following")
        if not tf.executing_eagerly() or tf.distribute.in_cross_replica_context() or following is None:
            return True
        return replicas.is_missing_copies(following) or int(_value(self.steps)) + 1 >= int(_value(following))

    def count_next(self) -> None:
        """Make the next step count its gradients, even if no count is due yet."""
        # Before the first step, the variable does not exist. The gradients of the first step are counted in any case.
        if "following" not in self._all():
            return
        if tf.compat.v1.executing_eagerly_outside_functions():
            self.following.assign(0)
        else:
            # Running the variable's initializer assigns 0. This works in a finalized graph, because it adds no
            # operation.
            tf.compat.v1.get_default_session().run(self.following.initializer)

    def last(self) -> ExponentCounts | None:
        """In eager mode or in the default session, read the most recent counts."""
        made = self._all()
        tables = [(self._table(names), names) for i, names in enumerate(self._tables) if f"counts_{i}" in made]
        steps = [int(_value(counted_step)) for (_, counted_step, _), _ in tables]
        if not any(steps):
            return None
        (counts, _, scale), names = tables[int(np.argmax(steps))]
        return ExponentCounts(names, _value(counts), float(_value(scale)), max(steps))

    def _make(self, names: tuple[str, ...]) -> None:
        if names not in self._tables:
            self._tables.append(names)
        # Reading these attributes creates their variables.
        _ = self.steps, self.following, self._table(names)

    def _table(self, names: tuple[str, ...]) -> tuple[tf.Variable, tf.Variable, tf.Variable]:
        """Return three variables: the most recent counts, and the number and loss scale of the step they come from."""
        i = self._tables.index(names)
        zeros: Any = np.zeros([len(names), COLUMNS], np.int64)
        return (
            self._weight(f"counts_{i}", zeros, tf.int64, tracked=False, aggregation=_SUM),
            self._weight(f"counted_step_{i}", 0, tf.int64, tracked=False, aggregation=_FIRST),
            self._weight(f"counted_scale_{i}", 0.0, tf.float32, tracked=False, aggregation=_FIRST),
        )


def table(gradients: list[Any]) -> tf.Tensor:
    """Count the values of each gradient by exponent."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return tf.stack([tf.zeros([COLUMNS], tf.int64) if each is None else _row(each) for each in values])


def _row(values: tf.Tensor) -> tf.Tensor:
    # The exponent is read from the bits of a value, so it is exact for powers of two and for subnormal numbers. Float32
    # represents all values of float16 and bfloat16. The bits are compared as unsigned integers, because TensorFlow
    # compares int32 tensors of a GPU on the host.
    if values.dtype == tf.float64:
        signed, unsigned, mantissa, exponent = tf.int64, tf.uint64, 52, 11
    else:
        values = tf.cast(values, tf.float32)
        signed, unsigned, mantissa, exponent = tf.int32, tf.uint32, 23, 8
    bits = tf.bitcast(tf.reshape(values, [-1]), unsigned)
    magnitude = tf.bitwise.bitwise_and(bits, tf.constant(signed.max, unsigned))
    infinite_or_nan = 2**exponent - 1
    kinds = tf.bitcast(tf.bitwise.right_shift(magnitude, tf.constant(mantissa, unsigned)), signed)
    for special, kind in ((0, infinite_or_nan + 1), (infinite_or_nan << mantissa, infinite_or_nan + 2)):
        kinds = tf.where(tf.equal(magnitude, tf.constant(special, unsigned)), tf.constant(kind, signed), kinds)
    bias = 2 ** (exponent - 1) - 1
    columns = [*(column(kind - bias) for kind in range(infinite_or_nan)), NAN, ZEROS, INFINITE]
    # The raw operation is faster than tf.math.bincount, which also computes the maximum of all values.
    histogram = tf.raw_ops.DenseBincount(
        input=kinds, size=tf.constant(len(columns), signed), weights=tf.constant([], tf.int32)
    )
    # TensorFlow cannot stack int32 tensors on a GPU.
    return tf.cast(tf.math.unsorted_segment_sum(histogram, np.array(columns), COLUMNS), tf.int64)


def _require_own_copies() -> None:
    strategy = tf.distribute.get_strategy()
    shared = (tf.distribute.ParameterServerStrategy, tf.distribute.experimental.CentralStorageStrategy)
    if isinstance(strategy, shared):
        raise ValueError(
            f"Gradients cannot be counted by exponent under {type(strategy).__name__}, whose replicas share one copy "
            'of each variable. Leave out diagnose="exponents", or count under MirroredStrategy or without a strategy.'
        )


def _value(variable: tf.Variable) -> Any:
    """Return the value of a variable, or 0 if the session has not initialized the variable."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(variable).numpy()
    try:
        return tf.compat.v1.get_default_session().run(variable)
    except tf.errors.FailedPreconditionError:
        return 0
