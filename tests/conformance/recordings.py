"""Behaviour of the original implementations, recorded by running them; floats are exact, nan and inf are strings."""

import functools
import gzip
import json
import pathlib

import ml_dtypes
import numpy as np

_DATA = pathlib.Path(__file__).parent / "data"


@functools.cache
def load(name):
    """Returns a recording, a dict; see README.md beside this file for its parts."""
    return json.loads(gzip.decompress((_DATA / f"{name}.json.gz").read_bytes()))


def array(value, dtype="float64"):
    """Returns a recorded number or nested list of numbers as an array; "nan" and "inf" are parsed."""
    return np.array(value, dtype=object).astype(dtype)


def right_gradients(recorded, dense, scale, dtype):
    """Returns recorded unscaled gradients; the true quotient where the recorded one is further from it than rounding.

    Args:
        recorded: a recording of a scaling, with the `input`.
        dense: the unscaled gradients in it.
        scale: the loss scale.
        dtype: of the gradients, a name.
    """
    unscaled, given, info = array(dense), array(recorded["input"]), ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        true = given / np.float64(np.float32(scale))
        true = np.where(np.abs(true) > float(info.max), np.sign(true) * np.inf, true)
        # A reciprocal and a product are rounded: to within one and a half units in the last place.
        right = np.abs(unscaled - true) <= 1.5 * float(info.eps) * np.abs(true) + float(info.smallest_normal)
    return np.where(right | (unscaled == true) | np.isnan(given), unscaled, true)


def passed_over(scale_before, scale_after, gradient, learning_rate):
    """Returns by how much SGD moves a variable in a step in which the originals let it stand still.

    Their reciprocal of a scale above 2**126 is zero.
    """
    applied = float(scale_after) >= scale_before
    return learning_rate * float(gradient) if applied and 2.0**126 < scale_before < np.inf else 0.0
