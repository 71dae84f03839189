"""Which class a wrapper gets, and which optimizers have a wrapper already."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from tf_lossscale import errors, registry

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
    adapter = registry.adapter_for(inner_optimizer)
    if adapter is None:
        raise errors.NotWrappable(
            f'"inner_optimizer" must be an instance of an optimizer class, but got: {inner_optimizer!r}. '
            f"Accepted is {registry.ACCEPTED}."
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
