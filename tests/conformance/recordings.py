"""Behaviour of the original implementations, recorded by running them; floats are exact, nan and inf are strings."""

import functools
import gzip
import json
import pathlib
import tarfile
import tempfile

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
    """Returns what gradients are unscaled to here: the rounded quotients.

    The recorded products with a rounded reciprocal are up to one unit in the last place away, if the reciprocal is no
    subnormal number. What is smaller than a normal number is as recorded, since kernels may take it for zero.

    Args:
        recorded: a recording of a scaling, with the `input`.
        dense: the unscaled gradients in it.
        scale: the loss scale.
        dtype: of the gradients, a name.
    """
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(all="ignore"):
        quotients = (array(recorded["input"]).astype(kind).astype("float64") / np.float64(np.float32(scale))).astype(
            kind
        )
    quotients, unscaled = quotients.astype("float64"), array(dense)
    small = np.abs(quotients) <= float(ml_dtypes.finfo(dtype).smallest_normal)
    return np.where(small & ~np.isnan(unscaled), unscaled, quotients)


def passed_over(scale_before, scale_after, gradient, learning_rate):
    """Returns by how much SGD moves a variable in a step in which the originals let it stand still.

    Their reciprocal of a scale above 2**126 is zero.
    """
    applied = float(scale_after) >= scale_before
    return learning_rate * float(gradient) if applied and 2.0**126 < scale_before < np.inf else 0.0


@functools.cache
def _extracted():
    folder = tempfile.TemporaryDirectory(prefix="checkpoints")
    with tarfile.open(_DATA / "checkpoints.tar.gz") as archive:
        archive.extractall(folder.name, filter="data")
    return folder  # which is deleted when this process ends


def checkpoints():
    """Returns the folder of the originals' checkpoints, and the names of the folders in it."""
    folder = pathlib.Path(_extracted().name)
    return folder, sorted(path.name for path in folder.iterdir() if path.is_dir())


def checkpoint(name):
    """Returns the folder of one checkpoint and its `meta.json`."""
    folder = checkpoints()[0] / name
    return folder, json.loads((folder / "meta.json").read_text())
