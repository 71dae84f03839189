"""Finds out which Keras library a layer or model belongs to, and which module of this folder handles the library."""

from __future__ import annotations

import importlib
from typing import Any

from tf_lossscale.wrapper import families


def layers_of(layer: Any) -> Any:
    """Return the module of `tf_lossscale.layers` that handles the library of a Keras layer.

    >>> import tensorflow as tf
    >>> layers_of(tf.keras.layers.Dense(1)).__name__
    'tf_lossscale.layers.keras3'

    Args:
        layer: a Keras 3 or tf_keras layer, or an instance of a class derived from one.

    Returns:
        The module `keras3` or `tf_keras` of `tf_lossscale.layers`.

    Raises:
        TypeError: the object is not a Keras layer.
    """
    library = _library_of(layer)
    if library is None:
        raise TypeError(f"`layer` must be a layer of Keras 3 or tf_keras, but got: {layer!r}.")
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
    """Return the name of a layer's Keras library. For any other object, return None."""
    found = (families.library_in(base.__module__) for base in type(value).__mro__ if base.__name__ == "Layer")
    return next((library for library in found if library in families.MODULES), None)


def layers_in(library: str) -> Any:
    """Return the module of `tf_lossscale.layers` that handles a Keras library.

    >>> layers_in("tf_keras").library.__name__
    'tf_keras'

    Args:
        library: "keras" or "tf_keras".

    Returns:
        The module `keras3` or `tf_keras` of `tf_lossscale.layers`.
    """
    return importlib.import_module(f"tf_lossscale.layers.{families.MODULES[library]}")


def library_of(layer: Any) -> Any:
    """Return the Keras library of a layer or model.

    >>> import tensorflow as tf
    >>> library_of(tf.keras.layers.Dense(1)).__name__
    'keras'

    Args:
        layer: a Keras 3 or tf_keras layer or model.

    Returns:
        The module `keras` or `tf_keras`.

    Raises:
        TypeError: the object belongs to neither library.
    """
    return layers_of(layer).library
