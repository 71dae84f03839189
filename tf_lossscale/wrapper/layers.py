"""The adapter for a Keras layer or model."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from tf_lossscale.core.variables import as_number
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import families


def layers_of(layer: Any) -> Any:
    """Return the adapter module for a Keras layer.

    >>> import tensorflow as tf
    >>> layers_of(tf.keras.layers.Dense(1)).__name__
    'tf_lossscale.adapters.keras3_layers'

    Args:
        layer: a layer of Keras 3 or tf_keras, or of a class derived from one.

    Returns:
        A module of `adapters/`.

    Raises:
        TypeError: the object is not a Keras layer.
    """
    library = _library_of(layer)
    if library is None:
        raise TypeError(f"`layer` must be a layer of Keras 3 or tf_keras, but got: {layer!r}.")
    return layers_in(library)


def is_layer(value: Any) -> bool:
    """Return whether an object is a layer or model of Keras 3 or tf_keras.

    >>> is_layer("Dense")
    False

    Args:
        value: any object.
    """
    return _library_of(value) is not None


def _library_of(value: Any) -> str | None:
    """Return the name of a layer's Keras library, or None for another object."""
    found = (families.library_in(base.__module__) for base in type(value).__mro__ if base.__name__ == "Layer")
    return next((library for library in found if library in families.MODULES), None)


def layers_in(library: str) -> Any:
    """Return the adapter module for the layers and dtype policies of a Keras library.

    >>> layers_in("tf_keras").library.__name__
    'tf_keras'

    Args:
        library: "keras" or "tf_keras".

    Returns:
        A module of `adapters/`.
    """
    return importlib.import_module(f"tf_lossscale.adapters.{families.MODULES[library]}_layers")


def value_of(variable: Any) -> Any:
    """Return the value of a variable as a Python number; in graph mode, in the session of Keras 2.

    >>> import tensorflow as tf
    >>> value_of(tf.Variable(3))
    3

    Args:
        variable: a scalar variable, tensor or Python number.
    """
    if tf.executing_eagerly():
        return as_number(variable)
    return keras_versions.keras_2("backend").get_value(tf.convert_to_tensor(variable)).item()


def set_value(variable: Any, value: Any) -> None:
    """Set a variable; in graph mode, in the session of Keras 2.

    >>> import tensorflow as tf
    >>> variable = tf.Variable(3)
    >>> set_value(variable, 4)
    >>> variable.numpy().item()
    4

    Args:
        variable: a scalar variable.
        value: a Python number.
    """
    if tf.executing_eagerly():
        variable.assign(value)
    else:
        keras_versions.keras_2("backend").set_value(variable, value)


def library_of(layer: Any) -> Any:
    """Return the Keras library of a layer or model.

    >>> import tensorflow as tf
    >>> library_of(tf.keras.layers.Dense(1)).__name__
    'keras'

    Args:
        layer: a layer or model of Keras 3 or tf_keras.

    Returns:
        The module `keras` or `tf_keras`.

    Raises:
        TypeError: the object belongs to neither library.
    """
    return layers_of(layer).library
