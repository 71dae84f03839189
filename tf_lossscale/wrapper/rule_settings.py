"""The rule of a dynamic loss scale, read and set on the wrapper."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_lossscale.core.rules import Rules
from tf_lossscale.core.state import LossScale
from tf_lossscale.core.variables import plain


def setting(field: str, doc: str) -> Any:
    """Return a property of the wrapper for a field of the loss scale's `Rules`; None if the scale is fixed.

    >>> setting("growth_factor", "The factor by which the scale grows.").__doc__
    'The factor by which the scale grows.'

    Args:
        field: of `Rules`.
        doc: the property's docstring.
    """
    name = "dynamic_growth_steps" if field == "growth_steps" else field

    def read(self: Any) -> Any:
        return getattr(self._loss_scale.rules, field) if self.dynamic else None

    def write(self: Any, value: Any) -> None:
        _change(self._loss_scale, name, field, value)
        self._warn_if_traced(name)

    return property(read, write, doc=doc)


def _change(scale: LossScale, name: str, field: str, value: Any) -> None:
    """Change a loss scale's rules, or raise and change nothing."""
    rules = vars(scale).get("rules")
    if type(rules) is not Rules:  # those of old loss scales and managers are computed from their own attributes
        raise AttributeError(
            f"`{name}` cannot be set, because {type(scale).__name__} has no such rule. Make a new LossScaleOptimizer "
            "with the arguments you need; for a loss scale or manager of your own, set its attributes."
        )
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{name}` cannot be set while a graph is built. Set it between steps, outside of tf.function, or pass it "
            "to the constructor."
        )
    changed = dataclasses.replace(rules, **{field: value}).checked()
    if changed.counts_overflows != rules.counts_overflows:
        allowed = "at least 2" if rules.counts_overflows else "1"
        raise ValueError(
            f"`hysteresis` must stay {allowed} for this optimizer, but got: {value!r}. A hysteresis above 1 needs a "
            "variable that counts overflows. Make a new LossScaleOptimizer with the hysteresis you need."
        )
    scale.rules = changed
    if changed.max_scale is not None:
        scale.initial_scale = min(scale.initial_scale, changed.max_scale)
        if plain(scale()) > changed.max_scale:
            scale.current_loss_scale.assign(changed.max_scale)
    if field == "min_scale":  # a constructor's `initial_scale` may be lower
        scale.initial_scale = max(scale.initial_scale, changed.min_scale)
        if plain(scale()) < changed.min_scale:
            scale.current_loss_scale.assign(changed.min_scale)
