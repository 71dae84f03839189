"""Which adapter fits which optimizer. A new family is one line here and one file in `adapters/`."""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any

from tf_lossscale import errors
from tf_lossscale.libraries import keras_versions

# (library, module, class) of the base class that marks a family -> the adapter's module.
# The module is "" where the class's name says enough within its package.
_FAMILIES = (
    ("keras", "", "BaseOptimizer", "keras3"),
    ("tf_keras", "", "OptimizerV2", "tf_keras_legacy"),
    ("tf_keras", "", "_BaseOptimizer", "tf_keras"),
    ("tensorflow", "tensorflow.python.training.optimizer", "Optimizer", "tf1"),
    ("sonnet", "", "Optimizer", "sonnet"),
)

ACCEPTED = (
    "an optimizer of tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy, "
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
        library = library_in(base.__module__)
        for family_library, module, name, adapter in _FAMILIES:
            if (library, base.__name__) == (family_library, name) and base.__module__.startswith(module):
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


def library_in(module: str) -> str:
    """Returns the library that a module is of: "keras" for Keras 3, "tf_keras" for Keras 2, or the package's name.

    >>> library_in("keras.src.optimizers"), library_in("tf_keras"), library_in("sonnet.optimizers")
    ('keras', 'tf_keras', 'sonnet')

    Args:
        module: a dotted name.
    """
    package = module.partition(".")[0]
    if package in ("keras", "tf_keras") and keras_versions.package_of_keras_2() == "keras":
        return "tf_keras" if package == "keras" else "tf_keras beside a Keras 2"  # which nothing here is derived from
    return package


def load_all(library: str) -> list[type]:
    """Returns the wrapper classes for all families of a library.

    >>> len(load_all("tf_keras"))
    2

    Args:
        library: a name that `library_in` returns.

    Returns:
        Subclasses of `tf_lossscale.LossScaleOptimizer`.
    """
    return [load(adapter) for family_library, _, _, adapter in _FAMILIES if family_library == library]


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
    """Returns the library that `tf.keras` is: "keras" (Keras 3) or "tf_keras" (Keras 2).

    >>> keras_of_tensorflow()
    'keras'
    """
    import tensorflow as tf

    return library_in(tf.keras.optimizers.Optimizer.__module__)


# Library of a Keras layer -> the adapter's module.
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
        library = library_in(base.__module__)
        if base.__name__ == "Layer" and library in _LAYERS:
            return layers_in(library)
    raise TypeError(f"`layer` must be a layer of Keras 3 or tf_keras, but got: {layer!r}.")


def is_layer(value: Any) -> bool:
    """Whether an object is a layer or model of Keras 3 or tf_keras.

    >>> is_layer("Dense")
    False

    Args:
        value: any object.
    """
    return any(base.__name__ == "Layer" and library_in(base.__module__) in _LAYERS for base in type(value).__mro__)


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


# Optimizers that a wrapper already holds: checkpoints would mix up two wrappers of one optimizer.
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


def adapter_of(inner_optimizer: Any) -> Any:
    """Returns the wrapper class of an optimizer's family.

    >>> import tensorflow as tf
    >>> adapter_of(tf.keras.optimizers.SGD()).__module__
    'tf_lossscale.adapters.keras3'

    Args:
        inner_optimizer: what the user wants to wrap.

    Raises:
        NotWrappable: it is of no known family, or scales losses itself.
        ValueError: it is wrapped already.
    """
    if scales_losses(inner_optimizer):
        raise errors.NotWrappable(
            f"LossScaleOptimizer cannot wrap another LossScaleOptimizer, but got: {inner_optimizer!r}. "
            "Wrap the optimizer that is inside it."
        )
    if is_wrapped(inner_optimizer):
        raise ValueError(
            '"inner_optimizer" is already wrapped by a LossScaleOptimizer. An optimizer can only be wrapped by a '
            "single LossScaleOptimizer. Make a new inner optimizer, or go on with the first wrapper."
        )
    adapter = adapter_for(inner_optimizer)
    if adapter is None:
        raise errors.NotWrappable(
            f'"inner_optimizer" must be an instance of an optimizer class, but got: {inner_optimizer!r}. '
            f"Accepted is {ACCEPTED}."
        )
    return adapter


def scales_losses(optimizer: Any) -> bool:
    """Returns whether an optimizer is a LossScaleOptimizer, ours or another library's.

    >>> import tensorflow as tf
    >>> scales_losses(tf.keras.optimizers.SGD())
    False

    Args:
        optimizer: any object.
    """
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)


@functools.cache
def joined(cls: Any, adapter: Any) -> Any:
    """Returns the class for objects that are of the user's class and of a family's wrapper class at once.

    >>> class Mine: pass
    >>> class Adapter: pass
    >>> joined(Mine, Adapter).__mro__[:3] == (joined(Mine, Adapter), Mine, Adapter)
    True

    Args:
        cls: LossScaleOptimizer, or a user's class derived from it.
        adapter: a family's wrapper class.

    Returns:
        `adapter` itself if that is of `cls` already.
    """
    if cls in adapter.__mro__:
        return adapter
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return _common_metaclass(type(cls), type(adapter))(cls.__name__, (cls, adapter), namespace)


def mark(inner_optimizer: Any) -> None:
    """Notes that an optimizer has a wrapper.

    >>> class Optimizer: pass
    >>> inner = Optimizer()
    >>> mark(inner)
    >>> is_wrapped(inner)
    True
    """
    _wrapped.add(inner_optimizer)


def is_wrapped(inner_optimizer: Any) -> bool:
    """Returns whether an optimizer has a wrapper.

    >>> is_wrapped(3)
    False
    """
    try:
        return inner_optimizer in _wrapped
    except TypeError:  # nothing that can be wrapped
        return False


def release(inner_optimizer: Any) -> None:
    """Lets an optimizer be wrapped again, whose wrapper is gone.

    >>> class Optimizer: pass
    >>> release(Optimizer())

    Args:
        inner_optimizer: an optimizer that may have been wrapped.
    """
    if is_wrapped(inner_optimizer):
        _wrapped.discard(inner_optimizer)


def _common_metaclass(one: Any, other: Any) -> Any:
    if issubclass(one, other) or issubclass(other, one):
        return one if issubclass(one, other) else other
    return type(one.__name__, (one, other), {})
