"""Reads and sets, through the wrapper, the inner optimizer's hyperparameters and the rules of the loss scale."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.rules import KEYWORDS, Rules
from tf_lossscale.core.variables import as_number
from tf_lossscale.diagnosis.exponents import Exponents
from tf_lossscale.diagnosis.overflow import Diagnosis
from tf_lossscale.types import State
from tf_lossscale.wrapper.contract import Contract
from tf_lossscale.wrapper.family import Family
from tf_lossscale.wrapper.stall import Stall

if TYPE_CHECKING:
    from tf_lossscale.types import Scalar

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
    own = getattr(optimizer, "hyperparameter_names", None)
    if own is not None:
        return tuple(own)
    for base in type(optimizer).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return ()


class Parts:
    """Declares the attributes that every wrapper has. Derived classes add the methods."""

    #: The `Family` class for the optimizers that this wrapper class wraps, or None in a base class that all families
    #: share.
    _family_class: type[Family] | None = None

    _optimizer: Any
    _family: Family
    _loss_scale: Any
    _contract: Contract
    _stall: Stall
    _diagnosis: Diagnosis | None
    _exponents: Exponents | None
    # Maps each name in a report to the variable that has it.
    _variable_names: weakref.WeakValueDictionary[str, Any]
    _jit_compile: bool
    _traced: bool


#: Maps each argument of `change_rules` to a field of `Rules`.
_FIELDS = {"dynamic_growth_steps": "growth_steps", **{name: name for name in KEYWORDS}}


def setting(field: str, doc: str) -> Any:
    """Return a read-only property for a field of `Rules`. The property's value is None if the scale is fixed."""
    name = next(name for name, each in _FIELDS.items() if each == field)

    def read(self: Any) -> Any:
        return getattr(self._loss_scale._rules, field) if self.dynamic else None

    def refuse(self: Any, value: Any) -> None:
        raise AttributeError(f"`{name}` cannot be set as an attribute. Call optimizer.change_rules({name}={value!r}).")

    return property(read, refuse, doc=doc)


class Delegating(Parts):
    """Makes the inner optimizer's hyperparameters and the rules of the loss scale readable and settable."""

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return getattr(self._optimizer, self._family.learning_rate_name)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._set_on_inner(self._family.learning_rate_name, value)

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
        if name in State.__annotations__ and self._defines(name):
            raise AttributeError(
                f"`{name}` cannot be set as an attribute. Call "
                f"optimizer.set_state({{**optimizer.state(), {name!r}: {value!r}}})."
            )
        if "_optimizer" in vars(self) and not name.startswith("_") and not self._defines(name):
            self._warn_if_of_inner(name)
        object.__setattr__(self, name, value)

    def _set_on_inner(self, name: str, value: Any) -> None:
        """Set an attribute of the inner optimizer. A variable gets the value, so that traced functions see it."""
        own = getattr(self._optimizer, "__dict__", {}).get(name)
        is_number = isinstance(value, (int, float)) or tf.is_tensor(value)
        if isinstance(own, tf.Variable) and is_number and tf.compat.v1.executing_eagerly_outside_functions():
            own.assign(value)
            return
        self._warn_if_traced(name)
        setattr(self._optimizer, name, value)

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
        if self._traced and not hasattr(getattr(self._optimizer, name, None), "assign"):
            logging.warning(
                "LossScaleOptimizer.%s was set after a tf.function with this optimizer was traced: the traced function "
                "keeps the old value. Make the tf.function again, or set the value before its first call.",
                name,
            )

    # The rules and counters of the loss scale.

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic rather than fixed."""
        return isinstance(self._loss_scale, DynamicLossScale)

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The number of finite steps that count towards the next growth of the scale, as an int64 variable.

        It is None if the scale is fixed.
        """
        return self._loss_scale.good_steps if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The loss scale at the start. A rule of your own that has no `initial_scale` has NaN."""
        return getattr(self._loss_scale, "initial_scale", float("nan"))

    dynamic_growth_steps: int | None = setting(
        "growth_steps",
        "The number of finite steps in a row after which the scale grows, or None if the scale is fixed.",
    )

    growth_factor: float | None = setting(
        "growth_factor", "The factor by which the scale grows, or None if the scale is fixed."
    )

    backoff_factor: float | None = setting(
        "backoff_factor",
        "The factor by which the scale is multiplied after an overflow, or None if the scale is fixed.",
    )

    hysteresis: int | None = setting(
        "hysteresis", "The number of overflows in a row after which the scale is lowered. None if the scale is fixed."
    )

    min_scale: float | None = setting(
        "min_scale", "The value below which the scale is never lowered, or None if the scale is fixed."
    )

    max_scale: float | None = setting(
        "max_scale",
        "The value above which the scale never grows. None means float32's maximum, or that the scale is fixed.",
    )

    def change_rules(self, **rules: Scalar | None) -> None:
        """Change the rules by which the scale grows and shrinks. Call this method between training steps.

        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
        >>> optimizer.change_rules(dynamic_growth_steps=500, min_scale=4.0)
        >>> optimizer.dynamic_growth_steps, optimizer.min_scale
        (500, 4.0)

        A `tf.function` that was traced before the call keeps the old rules, and a warning says so: create the
        function again. If the current scale is outside the new bounds, it is set to the nearest bound at once.

        Args:
            **rules: `dynamic_growth_steps`, `growth_factor`, `backoff_factor`, `hysteresis`, `min_scale` and
                `max_scale`, as in the constructor. Rules that are not passed do not change.

        Raises:
            TypeError: a keyword is not one of these rules, or a value is not a number.
            ValueError: a value is out of range, the scale is fixed or has other rules, or `hysteresis` changes from 1
                to a larger value or back to 1.
            RuntimeError: the method is called while a graph is being built.
        """
        scale: Any = self._loss_scale
        scale._rules = changed = _changed(scale, rules)
        for name, nearest in (("max_scale", min), ("min_scale", max)):
            bound = getattr(changed, name)
            # Only a bound that was changed is enforced. The scale may already violate the other bound, because the
            # constructor accepts an `initial_scale` below `min_scale`.
            if name in rules and bound is not None:
                scale.initial_scale = nearest(scale.initial_scale, bound)
                scale.current_loss_scale.assign(nearest(as_number(scale.current_loss_scale), bound))
        for name in rules:
            self._warn_if_traced(name)

    # Private methods of legacy optimizers that existing user code calls on the wrapper.

    def _decayed_lr(self, var_dtype: Any) -> Any:
        return tf.cast(self._optimizer.learning_rate, var_dtype)

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        value = getattr(self._optimizer, name)
        return value if dtype is None else tf.cast(value, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        self._set_on_inner(name, value)


def _changed(scale: Any, rules: dict[str, Any]) -> Rules:
    """Return the rules of a loss scale after some of them have changed."""
    unknown = [name for name in rules if name not in _FIELDS]
    if unknown or not rules:
        raise TypeError(f"change_rules() takes {', '.join(_FIELDS)}, but got: {unknown[0] if unknown else 'nothing'}.")
    names = ", ".join(f"`{name}`" for name in rules)
    old = vars(scale).get("_rules")
    # A loss scale or manager with an older API has no `Rules` object to change. Its rules are computed from its
    # attributes.
    if type(old) is not Rules:
        raise ValueError(
            f"{names} cannot be changed, because {type(scale).__name__} has no such rule. Make a new "
            "LossScaleOptimizer with the arguments you need; for a user-defined loss scale or manager, set its "
            "attributes instead."
        )
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{names} cannot be changed while a graph is being built. Call change_rules() between steps, outside of "
            "tf.function, or pass the values to the constructor."
        )
    changed = dataclasses.replace(old, **{_FIELDS[name]: value for name, value in rules.items()}).checked()
    if changed.counts_overflows != old.counts_overflows:
        allowed = "at least 2" if old.counts_overflows else "1"
        raise ValueError(
            f"`hysteresis` must stay {allowed} for this optimizer, but got: {changed.hysteresis!r}. A hysteresis above "
            "1 needs a variable that counts overflows. Make a new LossScaleOptimizer with the hysteresis you need."
        )
    return changed


def of_inner(method: Callable[..., Any]) -> Any:
    """Return a method for a wrapper class that calls the inner optimizer's method of the same name."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, method.__name__)(*args, **kwargs)

    return call
