"""The table of optimizer families, and functions that find the wrapper class for an optimizer or a config."""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from tf_lossscale import errors
from tf_lossscale.libraries import keras_versions

Cls = TypeVar("Cls", bound=type)


class _Row(NamedTuple):
    """An optimizer family.

    `adapter` is the name of the adapter's module in `families/`. An optimizer belongs to the family if one of its base
    classes is named `base`, comes from `library`, and is defined in a module whose name starts with `module`. Names are
    compared, so that no library has to be imported. `shown` is the family's name in error messages. `wrote` takes
    a serialized optimizer's module and its config's keys, and returns whether only this family writes such a config.
    """

    adapter: str
    library: str
    base: str
    shown: str
    module: str = ""
    wrote: Callable[[str, Collection[str]], bool] = lambda module, keys: False


_FAMILIES = [
    _Row("keras3", "keras", "BaseOptimizer", "tf.keras.optimizers"),
    _Row(
        "tf_keras",
        "tf_keras",
        "_BaseOptimizer",
        "tf_keras.optimizers",
        wrote=lambda module, keys: "is_legacy_optimizer" in keys,
    ),
    _Row(
        "tf_keras_legacy",
        "tf_keras",
        "OptimizerV2",
        "tf_keras.optimizers.legacy",
        wrote=lambda module, keys: module.endswith(".legacy") or ("decay" in keys and "weight_decay" not in keys),
    ),
    _Row("tf1", "tensorflow", "Optimizer", "tf.compat.v1.train", module="tensorflow.python.training.optimizer"),
    _Row("sonnet", "sonnet", "Optimizer", "Sonnet 2"),
]


def wrapper_class_of(optimizer: Any) -> type | None:
    """Return the wrapper class for an optimizer. If the optimizer belongs to no known family, return None."""
    for base in type(optimizer).__mro__:
        if base in REGISTERED:
            return REGISTERED[base]
        marks = (keras_versions.library_in(base.__module__), base.__name__)
        for row in _FAMILIES:
            if marks == (row.library, row.base) and base.__module__.startswith(row.module):
                return wrapper_class_in(row.adapter)
    return None


def family_of(optimizer: Any) -> Any:
    """Return an optimizer's `Family` object. If the optimizer belongs to no known family, return None."""
    wrapper_class: Any = wrapper_class_of(optimizer)
    return None if wrapper_class is None else wrapper_class._family_class(optimizer)


#: Maps the base class of an optimizer family to its wrapper class, for families added with `register_family`.
REGISTERED: dict[type, type] = {}


def wrapper_class_in(adapter: str) -> type:
    """Import an adapter, a module in `families/` such as "keras3", and return its wrapper class."""
    return importlib.import_module(f"tf_lossscale.families.{adapter}").LossScaleOptimizer


def named(wrapper_class: Cls) -> Cls:
    """Decorate a wrapper class, so that files, reprs and `type(optimizer).__name__` call it LossScaleOptimizer."""
    wrapper_class.__name__ = wrapper_class.__qualname__ = "LossScaleOptimizer"
    return wrapper_class


def wrapper_classes_of(library: str) -> list[type]:
    """Return the wrapper class of each optimizer family in a library."""
    return [wrapper_class_in(row.adapter) for row in _FAMILIES if row.library == library]


def wrapper_class_of_config(config: dict[str, Any]) -> type:
    """Return the wrapper class for a serialized optimizer.

    The family is recognized by the optimizer's module, or by config keys that only one family writes. If several
    families could have written the config, it is the family of `tf.keras.optimizers`.
    """
    module, keys = str(config.get("module")), config.get("config", {})
    writers = [row.adapter for row in _FAMILIES if row.wrote(module, keys)]
    return wrapper_class_in((writers or [keras_versions.MODULES[keras_versions.keras_of_tensorflow()]])[0])


# Weak references to all wrappers that are alive, by their ids. An optimizer cannot have two of them, because the two
# would overwrite each other's loss scale in a checkpoint. A shallow copy of a wrapper is allowed. Several threads may
# create wrappers, so each access is one atomic operation of the dict.
_wrappers: dict[int, weakref.ref[Any]] = {}

# Every LossScaleOptimizer class, from this package or another library, has one of these names and is defined in one of
# these packages, or derives from such a class.
_SCALING = ("LossScaleOptimizer", "BaseLossScaleOptimizer", "MixedPrecisionLossScaleOptimizer")
_SCALING_PACKAGES = ("tf_lossscale.wrapper.", "keras.", "tf_keras.", "tensorflow.")


def require_wrapper_class(inner_optimizer: Any) -> Any:
    """Return the wrapper class of an optimizer's family. Raise an error if it has none, or has a wrapper already."""
    if scales_losses(inner_optimizer):
        cls = type(inner_optimizer)
        raise errors.NotWrappable(
            "LossScaleOptimizer cannot wrap another LossScaleOptimizer, but `inner_optimizer` is a "
            f"{cls.__module__}.{cls.__qualname__}. {_instead_of_wrapping(inner_optimizer)}"
        )
    if holds_after_collection(lambda: is_wrapped(inner_optimizer)):
        raise ValueError(
            '"inner_optimizer" is already wrapped by a LossScaleOptimizer. An optimizer can only be wrapped by a '
            "single LossScaleOptimizer. Create a new inner optimizer, or use the existing wrapper. If this is a "
            "notebook cell that was run before, create the inner optimizer in the same cell, or delete the wrapper "
            "(`del optimizer`) and every reference to it first."
        )
    wrapper_class = wrapper_class_of(inner_optimizer)
    if wrapper_class is None and keras_versions.SECOND_KERAS_2 in [
        keras_versions.library_in(base.__module__) for base in type(inner_optimizer).__mro__
    ]:
        raise errors.NotWrappable(
            '"inner_optimizer" must not come from the package tf_keras if tf.keras is Keras 2, as in TensorFlow 2.15, '
            f"but got: {inner_optimizer!r}. Use tf.keras instead of tf_keras, for the model as well: both have "
            "the same API. Or install TensorFlow 2.16 or newer."
        )
    if wrapper_class is None:
        raise errors.NotWrappable(
            f'"inner_optimizer" must be an instance of an optimizer class, but got: {inner_optimizer!r}. '
            f"Pass an optimizer from {', '.join(row.shown for row in _FAMILIES)}, or an instance of a subclass. "
            "For an optimizer class of your own, call tf_lossscale.register_family; or use a DynamicLossScale, whose "
            "method `step` takes a function that applies the gradients."
        )
    return wrapper_class


def _instead_of_wrapping(wrapper: Any) -> str:
    if getattr(wrapper, "_family_class", None) is not None:
        return "Use it as it is."
    # The message suggests a new optimizer rather than the wrapper's inner optimizer, because tf_keras's wrapper adds
    # variables to its inner optimizer, and these variables would stay in it.
    inner = type(wrapper.inner_optimizer).__name__ if hasattr(wrapper, "inner_optimizer") else "Adam"
    return (
        f"Wrap a new optimizer: tf_lossscale.LossScaleOptimizer({inner}(...)). If `compile` wrapped it, call "
        "tf_lossscale.wrap_in_compile() before `compile`."
    )


def scales_losses(optimizer: Any) -> bool:
    """Return whether an optimizer is a LossScaleOptimizer from this package or from another library."""
    return is_scaling(type(optimizer))


def is_scaling(cls: Any) -> bool:
    """Return whether a class is, or derives from, a LossScaleOptimizer from this package or from another library.

    The names of its base classes are compared, so that no library needs to be imported.
    """
    return any(
        base.__name__ in _SCALING and base.__module__.startswith(_SCALING_PACKAGES)
        for base in getattr(cls, "__mro__", ())
    )


@functools.cache
def combined(cls: Any, wrapper_class: Any) -> Any:
    """Return a class that derives from both the user's class and a family's wrapper class."""
    if cls in wrapper_class.__mro__:
        return wrapper_class
    # Sonnet's metaclass gives each class without a `__repr__` one that fails.
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__repr__": cls.__repr__}
    return _common_metaclass(type(cls), type(wrapper_class))(cls.__name__, (cls, wrapper_class), namespace)


def add(wrapper: Any) -> None:
    """Record that an optimizer is wrapped. The record lasts as long as the wrapper is alive."""
    key = id(wrapper)
    _wrappers[key] = weakref.ref(wrapper, lambda reference: _discard(key, reference))


def _discard(key: int, reference: Any) -> None:
    # A new wrapper may already have the id of the one that was deleted.
    if _wrappers.get(key) is reference:
        _wrappers.pop(key, None)


def wrappers() -> list[Any]:
    """Return all wrappers that are alive."""
    found = [reference() for reference in list(_wrappers.values())]
    return [wrapper for wrapper in found if wrapper is not None]


def holds_after_collection(condition: Callable[[], bool]) -> bool:
    """Return whether a condition on living wrappers holds, and still holds after garbage collection.

    A deleted wrapper stays alive until then if it is part of a reference cycle.
    """
    if not condition():
        return False
    gc.collect()
    return condition()


def is_wrapped(inner_optimizer: Any) -> bool:
    """Return whether an optimizer has a wrapper that is still alive."""
    return any(wrapper._optimizer is inner_optimizer for wrapper in wrappers())


def release(inner_optimizer: Any) -> None:
    """Forget an optimizer's wrapper, so that the optimizer can be wrapped again."""
    for wrapper in wrappers():
        if wrapper._optimizer is inner_optimizer:
            _wrappers.pop(id(wrapper), None)


def _common_metaclass(first: Any, second: Any) -> Any:
    if issubclass(first, second) or issubclass(second, first):
        return first if issubclass(first, second) else second
    return type(first.__name__, (first, second), {})
