"""Changes that a training loop makes to gradients before applying them, implemented in TensorFlow and NumPy.

To add a change, add a `Change` to `CHANGES`. Its two functions take a list of all gradients, some of which may be None
or sparse, and an integer from 0 to 3 that varies from step to step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tools.fuzz.model import Rows, on_values


def _of_values(function, gradient):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change to gradients, implemented in TensorFlow and in NumPy.

    Args:
        ours: the implementation in TensorFlow.
        model: the implementation in NumPy.
        compiled: whether XLA can compile the implementation in TensorFlow.
    """

    ours: Callable[[list[Any], tf.Tensor], list[Any]]
    model: Callable[[list[Any], int], list[Any]]
    compiled: bool = True


def _each(ours, model, compiled=True):
    """Return a `Change` that applies a function to the values of every gradient."""
    return Change(
        lambda gradients, number: [_of_values(lambda values: ours(values, number), g) for g in gradients],
        lambda gradients, number: [on_values(lambda values: model(values, number), g) for g in gradients],
        compiled,
    )


def _present(gradients):
    return [i for i, gradient in enumerate(gradients) if gradient is not None]


def _drop_first(gradients, number):
    """Set the first gradient that is not None to None. If only one gradient is not None, keep it."""
    del number
    present = _present(gradients)
    return [None if len(present) > 1 and i == present[0] else g for i, g in enumerate(gradients)]


def _fit(a, b):
    """Return whether two gradients are both dense and have the same shape and dtype."""
    sparse_or_none = (type(None), tf.IndexedSlices, Rows)
    return not isinstance(a, sparse_or_none) and not isinstance(b, sparse_or_none) and _kind(a) == _kind(b)


def _kind(gradient):
    return gradient.shape, gradient.dtype


def _reuse(gradients, number):
    """Replace the last gradient with an earlier gradient of the same shape and dtype, if there is one."""
    del number
    fitting = [g for g in gradients[:-1] if _fit(g, gradients[-1])]
    return [*gradients[:-1], fitting[0]] if fitting else gradients


def _swap(gradients, number):
    del number
    first, last = gradients[0], gradients[-1]
    return [last, *gradients[1:-1], first] if _fit(first, last) and len(gradients) > 1 else gradients


def _add(gradients, number):
    del number
    first, last = gradients[0], gradients[-1]
    return [*gradients[:-1], first + last] if _fit(first, last) else gradients


def _in_cond(gradients, number):
    present = _present(gradients)
    chosen = tf.cond(
        number > 1,
        lambda: [_of_values(lambda values: values + values, gradients[i]) for i in present],
        lambda: [_of_values(tf.identity, gradients[i]) for i in present],
    )
    chosen = dict(zip(present, chosen))
    return [chosen.get(i) for i in range(len(gradients))]


def _in_while(values, number):
    return tf.while_loop(lambda i, _: i < number, lambda i, v: (i + 1, v * tf.cast(0.5, v.dtype)), (0, values))[1]


def _in_map(values, number):
    del number
    return tf.map_fn(lambda row: row + row, values) if values.shape.rank else values + values


@tf.function
def _doubled(values):
    return values + values


def _in_python(values, number):
    del number
    found = tf.py_function(lambda v: v * tf.cast(0.5, v.dtype), [values], values.dtype)
    found.set_shape(values.shape)
    return found


def _by_norm(gradients, number):
    """Clip by the global norm. Compute the norm in float32, because the gradients may have several dtypes."""
    del number
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    factor = 1.0 / tf.maximum(1.0, tf.linalg.global_norm([tf.cast(v, tf.float32) for v in values]))
    return [_of_values(lambda v: v * tf.cast(factor, v.dtype), g) for g in gradients]


def _by_norm_in_numpy(gradients, number):
    del number
    found = [getattr(g, "values", g).astype(np.float32) for g in gradients if g is not None]
    total = np.float32(sum(np.sum(np.square(v), dtype=np.float32) for v in found))
    factor = np.float32(1.0) / np.maximum(np.float32(1.0), np.sqrt(total))
    return [on_values(lambda v: v * factor.astype(v.dtype), g) for g in gradients]


def _within_one(values):
    one = np.asarray(1.0, values.dtype)
    return np.minimum(np.maximum(values, -one), one)


def _twice(values, number):
    del number
    return values + values


def _half(values, number):
    del number
    return values * np.asarray(0.5, values.dtype)


CHANGES = {
    "drop_first": Change(_drop_first, _drop_first),
    "reuse": Change(_reuse, _reuse),
    "swap": Change(_swap, _swap),
    "add": Change(_add, _add),
    "cond": Change(_in_cond, lambda gradients, n: [on_values(lambda v: v + v if n > 1 else v, g) for g in gradients]),
    "while": _each(_in_while, lambda values, n: values * np.asarray(0.5**n, values.dtype)),
    "map_fn": _each(_in_map, _twice),
    "function": _each(lambda values, n: _doubled(values), _twice),
    "py_function": _each(_in_python, _half, compiled=False),
    "stop_gradient": _each(lambda values, n: tf.stop_gradient(values), lambda values, n: values),
    # XLA must not compile this change: tf.clip_by_value in a compiled tf.while_loop turns a NaN into a number.
    "clip_by_value": _each(
        lambda values, n: tf.clip_by_value(values, -1.0, 1.0), lambda values, n: _within_one(values), compiled=False
    ),
    "clip_by_norm": Change(_by_norm, _by_norm_in_numpy),
}
