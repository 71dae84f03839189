"""Finds the Keras library that a layer or model belongs to, and this package's module for that library."""

from __future__ import annotations

import importlib
from typing import Any

from tf_lossscale.families import registry as families


def layers_of(layer: Any) -> Any:
    """Return the `tf_lossscale.layers` module for the Keras library that a layer belongs to.

    >>> import tensorflow as tf
    >>> layers_of(tf.keras.layers.Dense(1)).__name__
    'tf_lossscale.layers.keras3'

    Args:
        layer: a Keras 3 or tf_keras layer; its class may be user-defined.

    Returns:
        The module `tf_lossscale.layers.keras3` or `tf_lossscale.layers.tf_keras`.

    Raises:
        TypeError: the object is not a Keras layer.
    """
    library = _library_of(layer)
    if library is None:
        raise TypeError(f"`layer` must be a Keras 3 or tf_keras layer, but got: {layer!r}.")
    return layers_in(library)


def is_layer(value: Any) -> bool:
    """Return whether an object is a Keras 3 or tf_keras layer or model.

    >>> is_layer("Dense")
    False

    Args:
        value: any object.
    """
    return _library_of(value) is not None


def _library_of(value: Any) -> str | None:
    libraries = (families.library_in(base.__module__) for base in type(value).__mro__ if base.__name__ == "Layer")
    return next((library for library in libraries if library in families.MODULES), None)


def layers_in(library: str) -> Any:
    """Return the `tf_lossscale.layers` module for a Keras library.

    >>> layers_in("tf_keras").library.__name__
    'tf_keras'

    Args:
        library: "keras" for Keras 3, or "tf_keras".

    Returns:
        The module `tf_lossscale.layers.keras3` or `tf_lossscale.layers.tf_keras`.
    """
    return importlib.import_module(f"tf_lossscale.layers.{families.MODULES[library]}")
