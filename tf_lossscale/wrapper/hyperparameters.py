"""Access to the inner optimizer's hyperparameters through the wrapper."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.types import State
from tf_lossscale.wrapper.parts import Parts

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

    >>> class MyAdam:
    ...     hyperparameter_names = ("temperature",)
    >>> names(MyAdam())
    ('temperature',)

    Args:
        optimizer: an optimizer from any library.

    Returns:
        A tuple of names. It is empty if the optimizer class is not known and has no `hyperparameter_names`.
    """
    own = getattr(optimizer, "hyperparameter_names", None)
    if own is not None:
        return tuple(own)
    for base in type(optimizer).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return ()


class Delegating(Parts):
    """Makes the inner optimizer's hyperparameters readable and settable on the wrapper."""

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self._optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._optimizer.learning_rate = value

    @property
    def lr(self) -> Any:
        """The inner optimizer's learning rate. `lr` is the old name of `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def __getattr__(self, name: str) -> Any:
        # Python calls `__getattr__` only if the wrapper itself has no attribute of this name.
        if "_optimizer" in vars(self) and not name.startswith("__"):
            if self._is_delegated(name):
                return getattr(self._optimizer, name)
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
            self._warn_if_traced(name)
            setattr(self._optimizer, name, value)
            return
        if name in State.__annotations__ and self._defines(name):
            raise AttributeError(
                f"`{name}` cannot be set as an attribute. Call "
                f"optimizer.set_state({{**optimizer.state(), {name!r}: {value!r}}})."
            )
        if "_optimizer" in vars(self) and not name.startswith("_") and not self._defines(name):
            self._warn_if_of_inner(name)
        object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._family.delegated, *self._family.hyperparameter_names()})

    def _is_delegated(self, name: str) -> bool:
        is_listed = name in self._family.delegated or name in self._family.hyperparameter_names()
        return is_listed and not self._defines(name)

    def _defines(self, name: str) -> bool:
        # An attribute that this package's wrapper classes define hides a hyperparameter of the same name.
        return any(name in vars(cls) for cls in type(self).__mro__ if issubclass(cls, Parts))

    def _warn_if_of_inner(self, name: str) -> None:
        """Warn if the inner optimizer has an attribute of this name, because only the wrapper's attribute is set."""
        if name in vars(self._optimizer) and name not in vars(self):
            logging.warning(
                "LossScaleOptimizer.%s is set on the wrapper alone, and the inner %s keeps its value. To change the "
                "inner optimizer, set optimizer.inner_optimizer.%s.",
                *(name, type(self._optimizer).__name__, name),
            )

    def _warn_if_traced(self, name: str) -> None:
        if self._traced and not isinstance(getattr(self._optimizer, name, None), tf.Variable):
            logging.warning(
                "LossScaleOptimizer.%s was set after a tf.function with this optimizer was traced: the traced function "
                "keeps the old value. Make the tf.function again, or set the value before its first call.",
                name,
            )

    # Private methods of legacy optimizers that existing user code calls on the wrapper.

    def _decayed_lr(self, var_dtype: Any) -> Any:
        return tf.cast(self._optimizer.learning_rate, var_dtype)

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        value = getattr(self._optimizer, name)
        return value if dtype is None else tf.cast(value, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        self._warn_if_traced(name)
        setattr(self._optimizer, name, value)
