"""Changes that a training loop makes to gradients before applying them.

To add a change, add a function to `CHANGES`. It takes a list of all gradients, some of which may be None or sparse, and
an integer tensor from 0 to 3 that varies from step to step. It returns the changed list.
"""

import tensorflow as tf


def of_values(function, gradient):
    """Apply a function to the values of a dense or sparse gradient. A gradient that is None is left unchanged."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def _each(function):
    """Return a change that applies a function of a tensor and the integer to the values of every gradient."""
    return lambda gradients, number: [of_values(lambda values: function(values, number), g) for g in gradients]


def _present(gradients):
    return [i for i, gradient in enumerate(gradients) if gradient is not None]


def _drop_first(gradients, number):
    """Set the first gradient that is not None to None. If only one gradient is not None, keep it."""
    del number
    present = _present(gradients)
    return [None if len(present) > 1 and i == present[0] else g for i, g in enumerate(gradients)]


def _fit(a, b):
    """Return whether two gradients are both dense and have the same shape and dtype."""
    return isinstance(a, tf.Tensor) and isinstance(b, tf.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


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
        lambda: [of_values(lambda values: values + values, gradients[i]) for i in present],
        lambda: [of_values(tf.identity, gradients[i]) for i in present],
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
    return [of_values(lambda v: v * tf.cast(factor, v.dtype), g) for g in gradients]


CHANGES = {
    "drop_first": _drop_first,
    "reuse": _reuse,
    "swap": _swap,
    "add": _add,
    "cond": _in_cond,
    "while": _each(_in_while),
    "map_fn": _each(_in_map),
    "function": _each(lambda values, number: _doubled(values)),
    "py_function": _each(_in_python),
    "stop_gradient": _each(lambda values, number: tf.stop_gradient(values)),
    "clip_by_value": _each(lambda values, number: tf.clip_by_value(values, -1.0, 1.0)),
    "clip_by_norm": _by_norm,
}
HIDING_OVERFLOWS = ("clip_by_value",)
# In a graph, these compute each gradient from all of them.
MIXING = ("cond", "clip_by_norm")
# These leave gradients out.
DROPPING = ("drop_first", "reuse")
# XLA cannot compile a Python function, and tf.clip_by_value in a compiled tf.while_loop turns a NaN into a number.
NOT_COMPILED = ("py_function", "clip_by_value")


@tf.autograph.experimental.do_not_convert
def changed(names, gradients, number):
    """Apply the named changes to gradients, one after another."""
    for name in names:
        gradients = CHANGES[name](list(gradients), number)
    return gradients


def are_traced(mode, calls):
    """Return whether one graph shows how gradients were unscaled and changed, so that no overflow stays hidden."""
    return mode != "eager" and calls != "two_functions"
