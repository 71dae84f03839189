"""How close a computed tensor has to come to the expected one, whatever processor computes it.

The same bits on every machine are out of reach: a reciprocal square root starts from the processor's own approximation,
the graph optimizer turns `x / sqrt(y)` into `x * rsqrt(y)`, and the order of a sum depends on vector width and threads.
So there is a tolerance, and its unit is the size of what was rounded: a step that takes almost all of a parameter away
leaves the rounding of the parameter, not of the rest.
"""

import os

import numpy as np

# TensorFlow 2.21 fails to compile any float16 when it is told to use nothing newer than SSE.
XLA_HAS_FLOAT16 = "xla_cpu_max_isa=SSE" not in os.environ.get("XLA_FLAGS", "")


def size(*tensors):
    """Returns the largest finite magnitude among some tensors; 0 if there is none."""
    flat = np.concatenate([np.asarray(each, "float64").ravel() for each in tensors])
    return np.abs(flat[np.isfinite(flat)]).max(initial=0.0)


def difference(actual, expected, *operands):
    """Returns the largest difference, relative to the size of what is expected and of what it was computed from.

    Args:
        actual: a tensor of numbers.
        expected: a tensor of the same shape.
        *operands: tensors of the same unit that were added or subtracted on the way, such as a parameter before the
            steps that led to `expected`.

    Returns:
        A number; infinity if the shapes or the elements that are not finite differ.
    """
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    if actual.shape != expected.shape:
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return np.inf
    return size((actual - expected)[finite]) / max(size(expected, *operands), np.finfo("float32").tiny)


def assert_close(actual, expected, tolerance, *operands, where=""):
    """Asserts that the `difference` is at most a tolerance."""
    found = difference(actual, expected, *operands)
    assert found <= tolerance, f"{where}: {actual} is not {expected}, by {found:.3g} of the size of the operands"
