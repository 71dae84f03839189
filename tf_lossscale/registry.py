"""Which adapter fits which optimizer. A new family is one line here and one file in `adapters/`."""

from __future__ import annotations

import importlib
from typing import Any

# (package, module, class) of the base class that marks a family -> the adapter's module.
# The module is "" where the class's name says enough within its package.
_FAMILIES = (
    ("keras", "", "BaseOptimizer", "keras3"),
    ("tf_keras", "", "OptimizerV2", "tf_keras_legacy"),
    ("tf_keras", "", "_BaseOptimizer", "tf_keras"),
    ("tensorflow", "tensorflow.python.training.optimizer", "Optimizer", "tf1"),
    ("sonnet", "", "Optimizer", "sonnet"),
)

ACCEPTED = (
    "an optimizer of tf.keras.optimizers (Keras 3), tf_keras.optimizers, tf_keras.optimizers.legacy, "
    "tf.compat.v1.train or Sonnet 2, or a subclass of one"
)


def adapter_for(optimizer: Any) -> type | None:
    """Returns the wrapper class for an optimizer, or None if no family knows it.

    >>> adapter_for(3) is None
    True

    Args:
        optimizer: any object.

    Returns:
        A subclass of `tf_lossscale.LossScaleOptimizer`, its library loaded.
    """
    for base in type(optimizer).__mro__:
        package = base.__module__.split(".", maxsplit=1)[0]
        for family_package, module, name, adapter in _FAMILIES:
            if (package, base.__name__) == (family_package, name) and base.__module__.startswith(module):
                return load(adapter)
    return None


def load(adapter: str) -> type:
    """Returns an adapter's wrapper class by the name of its module in `adapters/`.

    >>> load("keras3").__name__
    'LossScaleOptimizer'

    Args:
        adapter: for example "keras3".

    Returns:
        A subclass of `tf_lossscale.LossScaleOptimizer`.
    """
    return importlib.import_module(f"tf_lossscale.adapters.{adapter}").LossScaleOptimizer


def load_all(package: str) -> list[type]:
    """Returns the wrapper classes for all families of a library.

    >>> len(load_all("tf_keras"))
    2

    Args:
        package: the library's name, as it is imported.

    Returns:
        Subclasses of `tf_lossscale.LossScaleOptimizer`.
    """
    return [load(adapter) for family_package, _, _, adapter in _FAMILIES if family_package == package]


def of_config(config: dict[str, Any]) -> type:
    """Returns the wrapper class for an optimizer's config, told by the keys that only one family writes.

    >>> of_config({"config": {"is_legacy_optimizer": False}}).__module__
    'tf_lossscale.adapters.tf_keras'

    Args:
        config: a serialized optimizer; where it does not tell, the family is that of `tf.keras`.

    Returns:
        A subclass of `tf_lossscale.LossScaleOptimizer`.
    """
    keys = config.get("config", {})
    if "is_legacy_optimizer" in keys:
        return load("tf_keras")
    if str(config.get("module")).endswith(".legacy") or ("decay" in keys and "weight_decay" not in keys):
        return load("tf_keras_legacy")
    return load("tf_keras" if keras_of_tensorflow() == "tf_keras" else "keras3")


def keras_of_tensorflow() -> str:
    """Returns the name of the library that `tf.keras` is: "keras" (Keras 3) or "tf_keras".

    >>> keras_of_tensorflow()
    'keras'
    """
    import tensorflow as tf

    return tf.keras.optimizers.Optimizer.__module__.split(".", maxsplit=1)[0]


# Package of a Keras layer -> the adapter's module.
_LAYERS = {"keras": "keras3_layers", "tf_keras": "tf_keras_layers"}


def layers_of(layer: Any) -> Any:
    """Returns the adapter module for a Keras layer.

    >>> import tensorflow as tf
    >>> layers_of(tf.keras.layers.Dense(1)).__name__
    'tf_lossscale.adapters.keras3_layers'

    Args:
        layer: a layer of Keras 3 or tf_keras, or of a class derived from one.

    Returns:
        A module of `adapters/`.

    Raises:
        TypeError: the object is no Keras layer.
    """
    for base in type(layer).__mro__:
        package = base.__module__.split(".", maxsplit=1)[0]
        if base.__name__ == "Layer" and package in _LAYERS:
            return layers_in(package)
    raise TypeError(f"`layer` must be a layer of Keras 3 or tf_keras, but got: {layer!r}.")


def layers_in(library: str) -> Any:
    """Returns the adapter module for the layers and dtype policies of a Keras library.

    >>> layers_in("tf_keras").library.__name__
    'tf_keras'

    Args:
        library: "keras" or "tf_keras".

    Returns:
        A module of `adapters/`.
    """
    return importlib.import_module(f"tf_lossscale.adapters.{_LAYERS[library]}")


def library_of(layer: Any) -> Any:
    """Returns the Keras library that a layer or model is of.

    >>> import tensorflow as tf
    >>> library_of(tf.keras.layers.Dense(1)).__name__
    'keras'

    Args:
        layer: a layer or model of Keras 3 or tf_keras.

    Returns:
        The module `keras` or `tf_keras`.

    Raises:
        TypeError: the object is of neither.
    """
    return layers_of(layer).library
