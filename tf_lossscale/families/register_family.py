"""Registration of user-defined optimizer families."""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

from tf_lossscale.wrapper import registry
from tf_lossscale.wrapper.family import Family, require_methods
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

FamilyClass = TypeVar("FamilyClass", bound=type[Family])


def register_family(family: FamilyClass) -> FamilyClass:
    """Make `LossScaleOptimizer` support optimizers from another library, or optimizers that you wrote yourself.

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> class Descent(tf.Module):
    ...     def __init__(self, rate):
    ...         super().__init__()
    ...         self.rate = rate
    >>> @tf_lossscale.register_family
    ... class DescentFamily(tf_lossscale.Family):
    ...     optimizer_class = Descent
    ...     def build(self, variables):
    ...         pass
    ...     def apply(self, gradients, variables):
    ...         for gradient, variable in zip(gradients, variables):
    ...             variable.assign_sub(self.inner.rate * gradient)
    ...     def count_skipped_step(self):
    ...         return None
    >>> optimizer = tf_lossscale.LossScaleOptimizer(Descent(0.25))
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: weight**2, [weight])
    >>> weight.numpy().item()
    0.5

    Args:
        family: a class derived from `Family`. Its `optimizer_class` attribute must be the base class of the optimizers
            to support. A later registration for the same `optimizer_class` replaces an earlier one.

    Returns:
        `family` itself, so that this function can be used as a decorator.

    Raises:
        TypeError: `family` is not derived from `Family`, has no `optimizer_class`, or does not define `build` and
            `apply`.
    """
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise TypeError(f"`family` must be a class derived from tf_lossscale.Family, but got: {family!r}.")
    if not isinstance(family.optimizer_class, type):
        raise TypeError(
            f"{family.__name__}.optimizer_class must be the base class of the optimizers, but is: "
            f"{family.optimizer_class!r}."
        )
    require_methods(family, family.__abstractmethods__, f"optimizers of class {family.optimizer_class.__name__}")
    registry.REGISTERED[family.optimizer_class] = wrapper_class(family)
    return family


def _refuse(wrapper: Any) -> Any:
    raise TypeError(
        f"A LossScaleOptimizer around a {type(wrapper.inner_optimizer).__name__} cannot be pickled. Save it with "
        "tf.train.Checkpoint."
    )


def wrapper_class(family: Any) -> type:
    """Return the class of the wrappers for a family's optimizers."""
    bases: list[type] = [LossScaleOptimizer, *family.wrapper_bases]
    trackable = tf.__internal__.tracking.Trackable
    if issubclass(family.optimizer_class, trackable):
        # With this mixin, checkpoints and SavedModels store the inner optimizer's attributes as the wrapper's own.
        bases.insert(1, tf.__internal__.tracking.DelegatingTrackableMixin)
        if not any(issubclass(base, trackable) for base in bases):
            bases.append(trackable)
    names = {"_family_class": family, "__module__": family.__module__, "__doc__": family.__doc__, "__reduce__": _refuse}
    return type("LossScaleOptimizer", tuple(bases), names)
