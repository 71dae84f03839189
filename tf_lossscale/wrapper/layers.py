"""The adapter for a Keras layer or model."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from tf_lossscale.core.variables import as_number
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
    for base in type(layer).__mro__:
        library = families.library_in(base.__module__)
        if base.__name__ == "Layer" and library in families.MODULES:
            return layers_in(library)
    raise TypeError(f"`layer` must be a layer of Keras 3 or tf_keras, but got: {layer!r}.")


def is_layer(value: Any) -> bool:
    """Return whether an object is a layer or model of Keras 3 or tf_keras.

    >>> is_layer("Dense")
    False

    Args:
        value: any object.
    """
    return any(
        base.__name__ == "Layer" and families.library_in(base.__module__) in families.MODULES
        for base in type(value).__mro__
    )


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
    return layers_in("tf_keras").value_of(tf.convert_to_tensor(variable))


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
        layers_in("tf_keras").set_value(variable, value)


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
