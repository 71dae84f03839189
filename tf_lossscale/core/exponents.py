"""Counts the values of each gradient by binary exponent, at regular intervals and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.variables import LazyVariable, Variables, unless, value_or_zero
from tf_lossscale.precision.counts import COLUMNS, INFINITE, LOWEST, NAN, ZEROS, ExponentCounts, column

#: By default, exponents are counted in the first step and then once every 100 steps.
EVERY = 100

_SUM, _FIRST = tf.VariableAggregation.SUM, tf.VariableAggregation.ONLY_FIRST_REPLICA


class Exponents(Variables):
    """Counts gradient values by variable and exponent, and keeps the most recent counts.

    Gradients are counted in the first step, and then once every `every` steps. All other steps only increment the step
    count. The counts are variables that checkpoints do not contain. Each replica counts its own gradients in its own
    copies of these variables, and `last` returns the sums of the copies.

    >>> exponents = Exponents(every=100)
    >>> gradients = [tf.constant([0.75, 0.0])]
    >>> _ = exponents.record(lambda: ("kernel",), lambda: gradients, lambda: tf.constant(1.0))
    >>> last = exponents.last()
    >>> last.names, last.counts[0, [ZEROS, column(-1)]].tolist(), last.scale, last.step
    (('kernel',), [1, 1], 1.0, 1)

    Args:
        every: the number of steps from one count to the next.

    Raises:
        ValueError: the strategy in use does not give each replica its own copy of the variables.
    """

    def __init__(self, every: int):
        _require_own_copies()
        super().__init__(name="exponents")
        self.__dict__.update(
            every=every,
            # A list with an item for each table of counts. An item is a tuple of variable names, one for each row of
            # the table.
            _tables=[],
            # Maps each replica's index to cached values of `steps` and `following`. The cache is used only while
            # no graph can change these variables.
            _known={},
            _in_graphs=False,
        )

    #: An int64 scalar variable: the number of steps taken.
    steps = LazyVariable(0, tf.int64, tracked=False, aggregation=_FIRST)
    #: An int64 scalar variable: the number of the next step whose gradients are counted.
    following = LazyVariable(0, tf.int64, tracked=False, aggregation=_FIRST)

    def record(
        self, names: Callable[[], tuple[str, ...]], gradients: Callable[[], list[Any]], scale: Callable[[], tf.Tensor]
    ) -> list[tf.Operation]:
        """Increment the step count. If this step's gradients are due to be counted, count them by exponent.

        Call this in a replica context.

        Args:
            names: a function that returns the names of the variables, one for each gradient.
            gradients: a function that returns this replica's gradients: tensors, IndexedSlices or None.
            scale: a function that returns the loss scale of these gradients, a float32 scalar.

        Returns:
            The operations that a session has to run in a TF1 graph.

        Raises:
            ValueError: the strategy in use does not give each replica its own copy of the variables.
        """
        if tf.executing_eagerly() and not self.counts_next():
            steps, following = self._numbers()
            self.steps.assign(steps + 1)
            self._keep((steps + 1, following))
            return []
        _require_own_copies()
        if not tf.executing_eagerly():
            self.__dict__["_in_graphs"] = True
        # Each replica discards only its own cached values. If a replica discarded a slower replica's values, the slower
        # replica would read the variables again in the current step, and wait forever for the others.
        self._known.pop(replicas.replica(), None)
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
        if not tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
            return True
        steps, following = self._numbers()
        return steps + 1 >= following

    def count_next(self) -> None:
        """Make the next step count its gradients, even if no count is due yet."""
        # Before the first step, the variable does not exist. The gradients of the first step are counted in any case.
        if "following" not in self._all():
            return
        if tf.compat.v1.executing_eagerly_outside_functions():
            self.following.assign(0)
            self._known.clear()
        else:
            # Running the variable's initializer assigns 0. This works in a finalized graph, because it adds no
            # operation.
            tf.compat.v1.get_default_session().run(self.following.initializer)

    def stop(self) -> None:
        """Stop counting gradients, even in functions that were traced before this call. Call this in eager mode."""
        if "following" in self._all():
            self.following.assign(tf.int64.max)
            self._known.clear()

    def last(self) -> ExponentCounts | None:
        """In eager mode or in the default session, read the most recent counts.

        Returns:
            The counts. If no gradients have been counted yet, the result is None.
        """
        made = self._all()
        tables = [(self._table(names), names) for i, names in enumerate(self._tables) if f"counts_{i}" in made]
        steps = [int(_value(counted_step)) for (_, counted_step, _), _ in tables]
        if not any(steps):
            return None
        (counts, _, scale), names = tables[int(np.argmax(steps))]
        return ExponentCounts(names, _value(counts), float(_value(scale)), max(steps))

    def steps_taken(self) -> int:
        """In eager mode or in the default session, read the number of steps taken."""
        return int(_value(self.steps)) if "steps" in self._all() else 0

    def _numbers(self) -> tuple[int, int]:
        """Return the values of the `steps` and `following` variables, in eager mode.

        The values are cached unless a graph may also change these two variables.
        """
        numbers = None if self._in_graphs else self._known.get(replicas.replica())
        if numbers is None:
            replicas.once(self._make_numbers)
            numbers = int(_value(self.steps)), int(_value(self.following))
            self._keep(numbers)
        return numbers

    def _keep(self, numbers: tuple[int, int]) -> None:
        # Once a step has been traced in a graph, the graph can change the variables without updating the cache, so
        # nothing is cached from then on.
        if not self._in_graphs:
            self._known[replicas.replica()] = numbers

    def _make_numbers(self) -> None:
        _ = self.steps, self.following

    def _make(self, names: tuple[str, ...]) -> None:
        self._make_numbers()
        if names not in self._tables:
            self._tables.append(names)
        self._table(names)

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
    """Count the values of each gradient by exponent.

    The exponent is read from the bits of a value, so it is exact for powers of two and for subnormal numbers.

    >>> table([tf.constant([2.0, -3.0, 0.0]), None]).numpy()[:, [ZEROS, column(1)]].tolist()
    [[1, 2], [0, 0]]

    Args:
        gradients: tensors or IndexedSlices of any floating-point dtype and shape, or None. All rows of
            IndexedSlices are counted, including rows with the same index.

    Returns:
        An int64 tensor of shape [number of gradients, COLUMNS]. If a gradient is None, its row contains only zeros.
    """
    each = [_Bits(gradient) for gradient in gradients]
    rows = tf.stack([bits.by_exponent() for bits in each])
    zeros = tf.stack([bits.number(0) for bits in each])
    # Counting infinities reads the values a third time, so infinities are counted only if any value is infinite or NaN.
    infinite = tf.cond(
        tf.reduce_any(rows[:, NAN] > 0),
        lambda: tf.stack([bits.number(bits.infinity) for bits in each]),
        lambda: tf.zeros_like(zeros),
    )
    moved = zeros * _from_to(column(LOWEST), ZEROS) + infinite * _from_to(NAN, INFINITE)
    return rows + moved


def _from_to(before: int, after: int) -> np.ndarray:
    """Return a row that, added to a row of counts, moves one count from one column to another."""
    return np.eye(COLUMNS, dtype=np.int64)[[after]] - np.eye(COLUMNS, dtype=np.int64)[[before]]


class _Bits:
    """The bits of a gradient's values: sign, exponent and mantissa."""

    def __init__(self, gradient: Any):
        if gradient is None:
            gradient = tf.zeros([0])
        values = tf.reshape(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient, [-1])
        if values.dtype == tf.float64:
            self._signed, self._unsigned, self._mantissa, self._exponent = tf.int64, tf.uint64, 52, 11
        else:
            # The cast is exact, because float32 represents all float16 and bfloat16 values.
            values = tf.cast(values, tf.float32)
            self._signed, self._unsigned, self._mantissa, self._exponent = tf.int32, tf.uint32, 23, 8
        self._bits = tf.bitcast(values, self._unsigned)
        self.infinity = (2**self._exponent - 1) << self._mantissa

    def by_exponent(self) -> tf.Tensor:
        """Return the counts by exponent as one row of the int64 table.

        Zeros are counted in the column for the lowest exponent, and infinities in the column for NaN.
        """
        exponents = 2**self._exponent
        histogram = _histogram(
            self._as_index(tf.bitwise.right_shift(self._bits, self._constant(self._mantissa))), 2 * exponents
        )
        columns = [column(bits - exponents // 2 + 1) for bits in range(exponents - 1)] + [NAN]
        row = tf.math.unsorted_segment_sum(histogram, np.array(columns * 2), COLUMNS)
        # TensorFlow cannot stack int32 tensors on a GPU.
        return tf.cast(row, tf.int64)

    def number(self, of: int) -> tf.Tensor:
        """Count the values that equal `of` in all bits except the sign bit. Return an int64 tensor of shape [1]."""
        magnitude = tf.bitwise.bitwise_and(self._bits, self._constant(2 ** (self._mantissa + self._exponent) - 1))
        histogram = _histogram(self._as_index(tf.bitwise.bitwise_xor(magnitude, self._constant(of))), 1)
        return tf.cast(histogram, tf.int64)

    def _constant(self, value: int) -> tf.Tensor:
        return tf.constant(value, self._unsigned)

    def _as_index(self, bits: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(bits, self._signed)


def _histogram(indices: tf.Tensor, size: int) -> tf.Tensor:
    """Return how often each number below `size` occurs; larger numbers are left out."""
    # The raw operation is faster than tf.math.bincount, which also computes the maximum of all values.
    return tf.raw_ops.DenseBincount(
        input=indices, size=tf.constant(size, indices.dtype), weights=tf.constant([], tf.int32)
    )


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
