"""The dynamic loss scale, which changes by `rules.Rules` after each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core.graphs import either
from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.rules import KEYWORDS, Rules, ScaleState, with_rules
from tf_lossscale.core.skipping import print_unless
from tf_lossscale.core.variables import LazyVariable, as_number

if TYPE_CHECKING:
    from tf_lossscale.types import Scalar


_UNUSABLE = (
    "The loss scale is {}, but must be a finite number above 0. It is set to the initial scale, {}. To reset an "
    "optimizer, assign to the variables of `optimizer.inner_optimizer` only."
)
#: Maps each argument of `change_rules` to a field of `Rules`.
_FIELDS = {"dynamic_growth_steps": "growth_steps", **{name: name for name in KEYWORDS}}


def _rule(name: str, doc: str) -> Any:
    """Return a read-only property for a rule."""

    def refuse(self: Any, value: Any) -> None:
        raise AttributeError(f"`{name}` cannot be set as an attribute. Call change_rules({name}={value!r}).")

    return property(lambda self: getattr(self._rules, _FIELDS[name]), refuse, doc=doc)


class DynamicLossScale(LossScale):
    """A scale that grows after many finite steps in a row and falls after overflows, according to `rules.Rules`.

    >>> scale = DynamicLossScale(8.0, dynamic_growth_steps=1)
    >>> scale.step([tf.constant([1.0])], lambda gradients: None)
    True
    >>> scale().numpy().item(), scale.good_steps.numpy().item()
    (16.0, 0)

    Args:
        initial_scale: the scale to start with, a finite number above 0.
        dynamic_growth_steps: the number of finite steps in a row after which the scale grows.
        **rules: `growth_factor`, `backoff_factor`, `hysteresis`, `min_scale` and `max_scale`, as in
            `LossScaleOptimizer`.

    Raises:
        TypeError: an argument is not a number, or a keyword is unknown.
        ValueError: an argument is out of range.
    """

    @with_rules
    def __init__(self, initial_scale: Scalar = 2.0**15, dynamic_growth_steps: Scalar = 2000, **rules: Any):
        super().__init__()
        unknown = [name for name in rules if name not in KEYWORDS]
        if unknown:
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument '{unknown[0]}'. It takes `initial_scale`, "
                f"`dynamic_growth_steps`, {', '.join(f'`{name}`' for name in KEYWORDS)}."
            )
        growth_steps: Any = dynamic_growth_steps
        self._set_rules(initial_scale, Rules(growth_steps, **rules))

    def _set_rules(self, initial_scale: Any, rules: Rules) -> None:
        self._rules: Rules = rules.checked()
        self.initial_scale: float = errors.positive_number("initial_scale", initial_scale, "The usual value is 2**15.")
        if self._rules.max_scale is not None and self.initial_scale > self._rules.max_scale:
            raise ValueError(
                f"`initial_scale` must not be above `max_scale`, but got: {self.initial_scale!r} and "
                f"{self._rules.max_scale!r}."
            )
        self._create_variables()

    def _create_variables(self) -> None:
        # Reading these attributes creates their variables.
        _ = self.current_loss_scale, self.good_steps, self.bad_steps

    # `current_loss_scale` and `good_steps` have the same names as in TensorFlow, so that checkpoints are compatible.

    current_loss_scale: Any = LazyVariable(lambda self: self.initial_scale, tf.float32)
    """The current scale, as a float32 scalar variable."""
    good_steps: Any = LazyVariable(0, tf.int64)
    """The number of finite steps that count towards the next growth of the scale, as an int64 scalar variable."""

    @property
    def bad_steps(self) -> tf.Variable | None:
        """The number of overflows counted towards `hysteresis`, an int64 variable, or None if `hysteresis` is 1."""
        return self._variable_named("bad_steps", 0, tf.int64) if self._rules.counts_overflows else None

    # Aliases with the names of the attributes in TensorFlow 2.4 to 2.15, which old code may read and assign.
    counter: Any = property(
        lambda self: self.good_steps,
        lambda self, value: self.good_steps.assign(value),
        doc="TensorFlow's older name of `good_steps`. The optimizer calls the value `dynamic_counter`.",
    )
    growth_steps: Any = property(
        lambda self: self._rules.growth_steps,
        lambda self, value: self._replace_rules(growth_steps=value),
        doc="TensorFlow's older name of `dynamic_growth_steps`.",
    )
    multiplier: Any = property(
        lambda self: self._rules.growth_factor,
        lambda self, value: self._multiply_by(value),
        doc="TensorFlow's older name of `growth_factor`. Setting it also sets `backoff_factor` to its reciprocal.",
    )

    def _multiply_by(self, factor: Any) -> None:
        factor = errors.positive_number("multiplier", factor, "The usual value is 2.")
        self._replace_rules(growth_factor=factor, backoff_factor=1 / factor)

    def _replace_rules(self, **changes: Any) -> None:
        self._rules = dataclasses.replace(self._rules, **changes).checked()

    # The rules.

    dynamic_growth_steps: int = _rule("dynamic_growth_steps", "The number of finite steps in a row before growth.")
    growth_factor: float = _rule("growth_factor", "The factor by which the scale grows.")
    backoff_factor: float = _rule("backoff_factor", "The factor by which the scale is multiplied after an overflow.")
    hysteresis: int = _rule("hysteresis", "The number of overflows in a row after which the scale is lowered.")
    min_scale: float = _rule("min_scale", "The value below which the scale is never lowered.")
    max_scale: float | None = _rule(
        "max_scale", "The value above which the scale never grows, or None for float32's maximum."
    )

    def change_rules(self, **rules: Scalar | None) -> None:
        """Change the rules by which the scale grows and shrinks. Call this method between training steps.

        >>> scale = DynamicLossScale(8.0)
        >>> scale.change_rules(dynamic_growth_steps=500, min_scale=16.0)
        >>> scale.dynamic_growth_steps, scale().numpy().item()
        (500, 16.0)

        A `tf.function` that was traced before the call keeps the old rules, and a warning says so: create the
        function again. If the current scale is outside the new bounds, it is set to the nearest bound at once.

        Args:
            **rules: `dynamic_growth_steps`, `growth_factor`, `backoff_factor`, `hysteresis`, `min_scale` and
                `max_scale`, as in the constructor. Rules that are not passed do not change.

        Raises:
            TypeError: a keyword is not one of these rules, or a value is not a number.
            ValueError: a value is out of range, the class has other rules, or `hysteresis` changes from 1 to a larger
                value or back to 1.
            RuntimeError: the method is called while a graph is being built.
        """
        old, changed = self._rules, self._changed(rules)
        self._rules = changed
        for name, nearest in (("max_scale", min), ("min_scale", max)):
            bound = getattr(changed, name)
            # Only a bound that was changed is enforced. The scale may already violate the other bound, because the
            # constructor accepts an `initial_scale` below `min_scale`.
            if name in rules and bound is not None:
                self.initial_scale = nearest(self.initial_scale, bound)
                self.current_loss_scale.assign(nearest(as_number(self.current_loss_scale), bound))
        different = [name for name in rules if getattr(changed, _FIELDS[name]) != getattr(old, _FIELDS[name])]
        if different and self._factors.is_traced:
            logging.warning(
                "change_rules() was called after a tf.function with this loss scale was traced: the traced function "
                "keeps the old %s. Make the tf.function again (in Keras, compile again), or change the rules before "
                "its first call.",
                " and ".join(different),
            )

    def _changed(self, rules: dict[str, Any]) -> Rules:
        """Return the rules after some of them have changed."""
        unknown = [name for name in rules if name not in _FIELDS]
        if unknown or not rules:
            got = unknown[0] if unknown else "nothing"
            raise TypeError(f"change_rules() takes {', '.join(_FIELDS)}, but got: {got}.")
        names = ", ".join(f"`{name}`" for name in rules)
        old = self._rules
        # The rules of a loss scale with an older API are computed from its attributes.
        if type(old) is not Rules or "_rules" not in vars(self):
            raise ValueError(
                f"{names} cannot be changed, because {type(self).__name__} has no such rule. Set its attributes "
                "instead, or make a new loss scale."
            )
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{names} cannot be changed while a graph is being built. Call change_rules() between steps, outside "
                "of tf.function, or pass the values to the constructor."
            )
        changed = dataclasses.replace(old, **{_FIELDS[name]: value for name, value in rules.items()}).checked()
        if changed.counts_overflows != old.counts_overflows:
            allowed = "at least 2" if old.counts_overflows else "1"
            raise ValueError(
                f"`hysteresis` must stay {allowed} for this loss scale, but got: {changed.hysteresis!r}. A hysteresis "
                "above 1 needs a variable that counts overflows. Make a new loss scale with the hysteresis you need."
            )
        return changed

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, with the rules as they are now. A subclass adds its own arguments.

        >>> DynamicLossScale(8.0, max_scale=64.0).get_config()
        {'initial_scale': 8.0, 'dynamic_growth_steps': 2000, 'max_scale': 64.0}

        Returns:
            A dict of plain values. A rule is included only if its value is not the default.
        """
        rules = {name: getattr(self._rules, name) for name in KEYWORDS}
        return {
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self._rules.growth_steps,
            **{name: value for name, value in rules.items() if value != KEYWORDS[name]},
        }

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.current_loss_scale)

    def move(self, applied: tf.Tensor) -> list[Any]:
        scale, good_steps, bad_steps = self.current_loss_scale, self.good_steps, self.bad_steps
        before = tf.convert_to_tensor(scale)
        after = self._rules.next(applied, ScaleState(before, good_steps, 0 if bad_steps is None else bad_steps))
        # A program may have reset the scale with the optimizer's other variables, or restored it from a bad file.
        is_usable = tf.logical_and(tf.math.is_finite(after.scale), self._is_usable(before))
        if tf.executing_eagerly() and not is_usable:
            logging.warning("%s", _UNUSABLE.format(as_number(before), self.initial_scale))
        moved = either(is_usable, lambda: after.scale, lambda: tf.constant(self.initial_scale, tf.float32))
        assigned = [scale.assign(moved), good_steps.assign(tf.cast(after.good, good_steps.dtype))]
        if bad_steps is not None:
            assigned.append(bad_steps.assign(tf.cast(after.bad, bad_steps.dtype)))
        return assigned

    def _is_usable(self, scale: tf.Tensor) -> Any:
        # Loss scales of older APIs accept other initial scales and factors. Kernels treat subnormal numbers as zero.
        factors = self._rules.growth_factor, self._rules.backoff_factor
        stays_positive = self.initial_scale >= errors.FLOAT32_TINY and min(factors) > 0
        return tf.logical_and(tf.math.is_finite(scale), scale > 0) if stays_positive else True

    def _warn_in_skipped_step(self) -> Any:
        if tf.executing_eagerly():
            return None  # `move` warns
        scale = self._current()
        return print_unless(self._is_usable(scale), _UNUSABLE.format("{}", self.initial_scale), scale)

    def _counters(self) -> dict[str, Any]:
        return {"dynamic_counter": self.good_steps, "bad_steps": self.bad_steps}

    def _saved_scale(self) -> Any:
        # A subclass may return a multiple of the variable from `__call__`, but `set_state` assigns the variable.
        return self.current_loss_scale

    def _set_scale(self, scale: float, read: Callable[[Any], Any], assign: Callable[[Any, Any], Any]) -> None:
        assign(self.current_loss_scale, self._clipped(scale))

    def _clipped(self, loaded: float) -> float:
        """Return a loaded scale, clipped to the range of the rules.

        A scale that is not a finite number above 0 becomes `initial_scale`.
        """
        low, high = self._rules.min_scale, self._rules.max_scale or errors.FLOAT32_MAX
        low, high = (float(np.float32(bound)) for bound in (min(low, self.initial_scale), high))
        fitting = min(max(loaded, low), high) if math.isfinite(loaded) and loaded > 0 else self.initial_scale
        if fitting != loaded:
            logging.warning(
                "The loss scale that was loaded is %g, but must be a finite number from %g to %g. It is set to %g.",
                *(loaded, low, high, fitting),
            )
        return fitting
