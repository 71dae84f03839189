"""Reads and sets the inner optimizer's hyperparameters through the wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core.rules import KEYWORDS
from tf_lossscale.types import State
from tf_lossscale.wrapper.family import Family

# Maps optimizer classes to the hyperparameters that can be read and set on the wrapper, as in TensorFlow 2.4 to 2.8. A
# newer optimizer gets the hyperparameters of the most similar older one.
_NAMES = {
    "Adadelta": ("rho",),
    "Adam": ("beta_1", "beta_2"),
    "Adafactor": ("beta_2_decay",),
    "AdamW": ("beta_1", "beta_2"),
    "Adamax": ("beta_1", "beta_2"),
    "Ftrl": ("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength"),
    "Lamb": ("beta_1", "beta_2"),
    "Lion": ("beta_1", "beta_2"),
    "Nadam": ("beta_1", "beta_2"),
    "RMSprop": ("rho", "momentum"),
    "SGD": ("momentum",),
}


def names(optimizer: object) -> tuple[str, ...]:
    """Return the names of an optimizer's hyperparameters other than the learning rate.

    A user-defined optimizer class can list its hyperparameters in a `hyperparameter_names` class attribute.
    """
    listed = getattr(optimizer, "hyperparameter_names", None)
    if listed is not None:
        return tuple(listed)
    for base in type(optimizer).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return ()


class Forwarding:
    """The inner optimizer of a wrapper, with its hyperparameters readable and settable on the wrapper."""

    #: The `Family` class for the optimizers that this wrapper class wraps, or None in a base class that all families
    #: share.
    _family_class: type[Family] | None = None

    _optimizer: Any
    _family: Family
    #: Whether a step was traced. Later changes of Python values do not reach the traced function.
    _traced: bool

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return getattr(self._optimizer, self._family.learning_rate_name)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._set_on_inner("learning_rate", value)

    @property
    def lr(self) -> Any:
        """The inner optimizer's learning rate. `lr` is the old name of `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def iterations(self) -> tf.Variable:
        """The inner optimizer's step count."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        if isinstance(value, tf.Variable):
            self._optimizer.iterations = value
        else:
            self._optimizer.iterations.assign(value)

    def __getattr__(self, name: str) -> Any:
        # Python calls `__getattr__` only if the wrapper itself has no attribute of this name.
        if "_optimizer" in vars(self) and not name.startswith("__"):
            if self._is_delegated(name):
                return getattr(self._optimizer, name)
            if name in KEYWORDS or name == "change_rules":
                raise AttributeError(
                    f"'LossScaleOptimizer' object has no attribute '{name}', which belongs to the loss scale: write "
                    f"optimizer.scaler.{name}"
                )
            # Unlike `hasattr`, `dir` does not evaluate the inner optimizer's properties.
            if name in dir(self._optimizer):
                raise AttributeError(
                    f"'LossScaleOptimizer' object has no attribute '{name}'; "
                    f"to use the attribute of the inner {type(self._optimizer).__name__}, write inner_optimizer.{name}"
                )
        raise AttributeError(f"'LossScaleOptimizer' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        # Hyperparameters take precedence over properties, because the optimizer library's classes, from which the
        # wrapper derives, define properties with the names of some hyperparameters.
        if "_optimizer" in vars(self) and self._is_delegated(name):
            self._set_on_inner(name, value)
            return
        if name in KEYWORDS or name == "dynamic_growth_steps":
            raise AttributeError(
                f"`{name}` cannot be set as an attribute. Call optimizer.scaler.change_rules({name}={value!r})."
            )
        if name in State.__annotations__ and self._defines(name):
            raise AttributeError(
                f"`{name}` cannot be set as an attribute. Call "
                f"optimizer.set_state({{**optimizer.state(), {name!r}: {value!r}}})."
            )
        if "_optimizer" in vars(self) and not name.startswith("_") and not self._defines(name):
            self._warn_if_of_inner(name, value)
        object.__setattr__(self, name, value)

    def _set_on_inner(self, name: str, value: Any) -> None:
        """Set an attribute of the inner optimizer. A variable gets the value, so that traced functions see it."""
        attribute = self._family.learning_rate_name if name == "learning_rate" else name
        own = getattr(self._optimizer, "__dict__", {}).get(attribute)
        is_number = isinstance(value, (int, float)) or tf.is_tensor(value)
        if isinstance(own, tf.Variable) and is_number and tf.compat.v1.executing_eagerly_outside_functions():
            own.assign(value)
            return
        before = getattr(self._optimizer, attribute, None)
        setattr(self._optimizer, attribute, value)
        # A traced function reads the new value of the same variable, but no other variable, object or number.
        if self._traced and not _is_same(before, getattr(self._optimizer, attribute, None)):
            logging.warning(
                "LossScaleOptimizer.%s was set after a tf.function with this optimizer was traced: the traced function "
                "keeps the old value. Make the tf.function again (in Keras, compile again), or set the value before "
                "its first call.",
                name,
            )

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._family.delegated, *self._family.hyperparameter_names()})

    def _is_delegated(self, name: str) -> bool:
        is_listed = name in self._family.delegated or name in self._family.hyperparameter_names()
        return is_listed and not self._defines(name)

    def _defines(self, name: str) -> bool:
        # An attribute that this package's wrapper classes define hides a hyperparameter of the same name.
        return any(name in vars(cls) for cls in type(self).__mro__ if issubclass(cls, Forwarding))

    def _warn_if_of_inner(self, name: str, value: Any) -> None:
        """Warn if the inner optimizer has an attribute of this name, because only the wrapper's attribute is set."""
        inner = vars(self._optimizer)
        if name in inner and name not in vars(self) and not _is_same(inner[name], value):
            logging.warning(
                "LossScaleOptimizer.%s is set on the wrapper alone, and the inner %s keeps its value. To change the "
                "inner optimizer, set optimizer.inner_optimizer.%s.",
                *(name, type(self._optimizer).__name__, name),
            )

    # Private methods of legacy optimizers that existing user code calls on the wrapper.

    def _decayed_lr(self, var_dtype: Any) -> Any:
        return tf.cast(self._optimizer.learning_rate, var_dtype)

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        value = getattr(self._optimizer, name)
        return value if dtype is None else tf.cast(value, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        self._set_on_inner(name, value)


def _is_same(before: Any, after: Any) -> bool:
    are_numbers = isinstance(before, (int, float)) and isinstance(after, (int, float))
    return before is after or (are_numbers and before == after)


def of_inner(method: Callable[..., Any]) -> Any:
    """Return a method for a wrapper class that calls the inner optimizer's method of the same name."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, method.__name__)(*args, **kwargs)

    return call
