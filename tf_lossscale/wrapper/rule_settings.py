"""Reads and changes the rules of a dynamic loss scale, such as its growth factor, through the wrapper."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.rules import KEYWORDS, Rules
from tf_lossscale.core.variables import as_number

#: Maps each argument of `change_rules` to a field of `Rules`.
_FIELDS = {"dynamic_growth_steps": "growth_steps", **{name: name for name in KEYWORDS}}


def setting(field: str, doc: str) -> Any:
    """Return a read-only property for a field of `Rules`. The property's value is None if the scale is fixed.

    >>> setting("growth_factor", "The factor by which the scale grows.").__doc__
    'The factor by which the scale grows.'

    Args:
        field: the name of a field of `Rules`.
        doc: the property's docstring.
    """
    name = next(name for name, each in _FIELDS.items() if each == field)

    def read(self: Any) -> Any:
        return getattr(self._loss_scale.rules, field) if self.dynamic else None

    def refuse(self: Any, value: Any) -> None:
        raise AttributeError(f"`{name}` cannot be set as an attribute. Call optimizer.change_rules({name}={value!r}).")

    return property(read, refuse, doc=doc)


def change(scale: LossScale, **changes: Any) -> None:
    """Change the rules of a loss scale. If an argument is invalid, raise an error and change nothing.

    Args:
        scale: a dynamic loss scale.
        **changes: the arguments of `LossScaleOptimizer.change_rules`.
    """
    unknown = [name for name in changes if name not in _FIELDS]
    if unknown or not changes:
        raise TypeError(f"change_rules() takes {', '.join(_FIELDS)}, but got: {unknown[0] if unknown else 'nothing'}.")
    names = ", ".join(f"`{name}`" for name in changes)
    rules = vars(scale).get("rules")
    # A loss scale or manager with an older API has no `Rules` object to change. Its rules are computed from its
    # attributes.
    if type(rules) is not Rules:
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
    changed = dataclasses.replace(rules, **{_FIELDS[name]: value for name, value in changes.items()}).checked()
    if changed.counts_overflows != rules.counts_overflows:
        allowed = "at least 2" if rules.counts_overflows else "1"
        raise ValueError(
            f"`hysteresis` must stay {allowed} for this optimizer, but got: {changed.hysteresis!r}. A hysteresis above "
            "1 needs a variable that counts overflows. Make a new LossScaleOptimizer with the hysteresis you need."
        )
    scale.rules = changed
    for name, nearest in (("max_scale", min), ("min_scale", max)):
        bound = getattr(changed, name)
        # Only a bound that was changed is enforced. The scale may already violate the other bound, because the
        # constructor accepts an `initial_scale` below `min_scale`.
        if name in changes and bound is not None:
            scale.initial_scale = nearest(scale.initial_scale, bound)
            scale.current_loss_scale.assign(nearest(as_number(scale()), bound))
