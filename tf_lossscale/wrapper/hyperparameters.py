"""The inner optimizer's hyperparameters, read and set on the wrapper, and their names."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core.variables import readable
from tf_lossscale.types import State
from tf_lossscale.wrapper.parts import Parts

# The names that each original (TensorFlow 2.4 to 2.8) passed to `_set_hyper`, so that `wrapper.beta_1` keeps its
# meaning. Optimizers that are younger than that follow their nearest relative.
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
    """Return the names of an optimizer's hyperparameters, besides the learning rate.

    Your own optimizer class can list them in a class attribute `hyperparameter_names`.

    >>> class MyAdam:
    ...     hyperparameter_names = ("temperature",)
    >>> names(MyAdam())
    ('temperature',)

    Args:
        optimizer: an optimizer object of any library.

    Returns:
        The names, in the order of the class; empty if they are not known.
    """
    own = getattr(optimizer, "hyperparameter_names", None)
    if own is not None:
        return tuple(own)
    for base in type(optimizer).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return ()


class Delegating(Parts):
    """Reads, sets and lists the inner optimizer's hyperparameters on the wrapper, but no other attributes."""

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return readable(self._optimizer.learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._optimizer.learning_rate = value

    @property
    def lr(self) -> Any:
        """The inner optimizer's learning rate, by its old name."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that it does not find otherwise.
        if "_optimizer" in vars(self) and not name.startswith("__"):
            if self._is_delegated(name):
                return readable(getattr(self._optimizer, name))
            if name in dir(self._optimizer):  # unlike hasattr, this runs no property of the inner optimizer
                raise AttributeError(
                    f"'LossScaleOptimizer' object has no attribute '{name}'; "
                    f"for that of the inner {type(self._optimizer).__name__} use inner_optimizer.{name}"
                )
        raise AttributeError(f"'LossScaleOptimizer' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        # Checked before the properties, because the library's base class has some of the same names.
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
        known = name in self._family.delegated or name in self._family.hyperparameter_names()
        return known and not self._defines(name)

    def _defines(self, name: str) -> bool:
        """Return whether the wrapper's own classes have an attribute, which a hyperparameter does not replace."""
        return any(name in vars(cls) for cls in type(self).__mro__ if issubclass(cls, Parts))

    def _warn_if_of_inner(self, name: str) -> None:
        """Warn if an attribute about to be set on the wrapper will hide the inner optimizer's, as in the originals."""
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

    # The names that code for the legacy optimizers uses.

    def _decayed_lr(self, var_dtype: Any) -> Any:
        """Return the learning rate of the next step, also under a schedule."""
        return tf.cast(self._optimizer.learning_rate, var_dtype)

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        value = getattr(self._optimizer, name)
        return value if dtype is None else tf.cast(value, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        self._warn_if_traced(name)
        setattr(self._optimizer, name, value)
