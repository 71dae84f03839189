"""Hints about known errors that old programs raise."""

from __future__ import annotations

import os
import sys
import traceback
import types

_KERAS_2 = (
    "This program seems to be written for Keras 2. Install tf_keras and set the environment variable "
    "TF_USE_LEGACY_KERAS=1."
)
_IMPORTS_KERAS = (
    "This program imports keras, which is Keras 3 even if TF_USE_LEGACY_KERAS=1 is set. Replace it with Keras 2 at the "
    "start of the program: import sys, tf_keras; sys.modules['keras'] = tf_keras."
)
_MIXES_KERAS = (
    "The model and the optimizer are not from the same Keras library. Take both from tf.keras, or both from tf_keras. "
    "If the environment variable TF_USE_LEGACY_KERAS=1 is set, tf.keras is tf_keras, but `import keras` still imports "
    "Keras 3."
)
_ESTIMATOR = (
    "TensorFlow 2.16 removed tf.estimator. Run the program with TensorFlow 2.15 (pip install 'tensorflow==2.15.*'), or "
    "train with a Keras model or a tf.compat.v1.train.MonitoredTrainingSession."
)
_DEVICES_FIRST = (
    "TensorFlow listed or configured its devices before tf.compat.v1.disable_eager_execution() or "
    "disable_v2_behavior() was called. Call it first, right after the imports."
)
# Words in Keras 3's error messages about arguments that only Keras 2 accepts, and about tensors that only Keras 2
# converts to arrays.
_OF_KERAS_3 = ("not recognized", "unexpected keyword argument", "Unrecognized keyword arguments", "KerasTensor")


def hint(error: BaseException) -> str | None:
    """Return a hint for a known error. For any other error, return None.

    >>> hint(ModuleNotFoundError("No module named 'keras.engine'", name="keras.engine"))[:51]
    'This program seems to be written for Keras 2. Insta'
    >>> hint(ValueError("anything else")) is None
    True

    Args:
        error: an exception that ended a program.
    """
    if isinstance(error, AttributeError):
        text = _of_attribute(error)
    elif isinstance(error, ImportError):
        text = _of_import(error)
    elif _is_of_an_optimizer_of_another_keras(error):
        text = _MIXES_KERAS
    elif isinstance(error, RuntimeError) and "Attempting to capture an EagerTensor" in str(error):
        text = _DEVICES_FIRST
    else:
        text = None
    if text is None and _is_of_keras_3(error) and any(words in str(error) for words in _OF_KERAS_3):
        text = _KERAS_2
    if text is not _KERAS_2 or os.environ.get("TF_USE_LEGACY_KERAS", "").lower() not in ("1", "true"):
        return text
    imports_keras = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "keras"
    return _IMPORTS_KERAS if imports_keras else None


def _of_attribute(error: AttributeError) -> str | None:
    owner, name = getattr(error, "obj", None), getattr(error, "name", None)
    if owner is None or name is None:
        return None
    if isinstance(owner, types.ModuleType):
        return _of_module(owner.__name__, name)
    kind = type(owner)
    if name == "get_updates":
        return f"{kind.__name__} cannot train in graph mode. Use an optimizer from tf_keras.optimizers.legacy."
    if not kind.__module__.startswith("keras."):
        return None
    if kind.__name__ == "LossScaleOptimizer":
        return (
            f"This object is Keras 3's own LossScaleOptimizer, which has no {name}. Wrap the optimizer in "
            "tf_lossscale.LossScaleOptimizer."
        )
    return _KERAS_2


def _of_import(error: ImportError) -> str | None:
    module = error.name or ""
    if isinstance(error, ModuleNotFoundError) or "cannot import name" not in str(error):
        return _of_module(module, "")
    return _of_module(module, getattr(error, "name_from", None) or str(error).split("'")[1])


def _of_module(module: str, name: str) -> str | None:
    """Return a hint for a missing attribute of a module, or for a missing module."""
    module = module.replace("tensorflow._api.v2", "tensorflow")
    root, _, rest = module.partition(".")
    if root == "tensorflow_estimator" or (root == "tensorflow" and "estimator" in [*rest.split("."), name]):
        return _ESTIMATOR
    if module.startswith(("tensorflow.keras", "tensorflow.python.keras")) or (root == "keras" and (rest or name)):
        return _KERAS_2
    if module.startswith(("tensorflow.python", "tensorflow.core", "tensorflow_core")):
        return (
            f"{f'{module}.{name}'.rstrip('.')} is a private TensorFlow name that has moved or no longer exists. "
            "Change the program to use a public name."
        )
    tensorflow = sys.modules.get("tensorflow")
    if root == "tensorflow" and name and tensorflow is not None:
        v1 = tensorflow.compat.v1
        for part in rest.split(".") if rest else ():
            v1 = getattr(v1, part, None)
        if hasattr(v1, name):
            old = f"{rest}.{name}".lstrip(".")
            return (
                f"tf.{old} is a TensorFlow 1 name, and is now tf.compat.v1.{old}. In a TensorFlow 1 program, replace "
                "`import tensorflow as tf` with `import tensorflow.compat.v1 as tf`, and call "
                "tf.disable_v2_behavior() right after the imports."
            )
    return None


def _is_of_an_optimizer_of_another_keras(error: BaseException) -> bool:
    # Keras's error message quotes the argument. An optimizer object appears as "<...>", a class as "<class ...>", and a
    # misspelled name as it was written.
    _, said, identifier = str(error).partition("Could not interpret optimizer identifier: ")
    return bool(said) and identifier.startswith("<") and not identifier.startswith("<class")


def _is_of_keras_3(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("keras.")
