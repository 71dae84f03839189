"""The rules that change a loss scale after each step, as pure functions of (scale, good steps, bad steps)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core.graphs import either

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ScaleState(NamedTuple):
    """The state of a loss scale: the scale and its two counters."""

    #: The loss scale, as a float32 scalar.
    scale: Any
    #: The number of finite steps that count towards growth, as an int64 scalar.
    good: Any
    #: The number of non-finite steps counted so far towards `hysteresis`, as an int64 scalar.
    bad: Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules by which a dynamic loss scale changes.

    Each step runs the following algorithm. A test executes these lines::

        if every_gradient_is_finite:
            good += 1
            bad = 0 if finite_step_resets else bad
            if good >= growth_steps:
                good = bad = 0
                if max_scale is not None:
                    scale = min(scale * growth_factor, max_scale)
                elif isfinite(scale * growth_factor):
                    scale = scale * growth_factor
        else:
            skip_the_step()
            good = 0
            bad += 1
            if bad >= hysteresis:
                bad = 0
                scale = max(scale * backoff_factor, min_scale)

    >>> from tf_lossscale.core.rules import ScaleState
    >>> rules = Rules(growth_steps=2)
    >>> after = rules.next(True, ScaleState(8.0, 1, 0))
    >>> float(after.scale), int(after.good)
    (16.0, 0)
    >>> float(rules.next(False, ScaleState(8.0, 1, 0)).scale)
    4.0

    Args:
        growth_steps: the number of finite steps in a row after which the scale grows.
        growth_factor: the factor by which the scale is multiplied when it grows. The factor must be above 1.
        backoff_factor: the factor by which the scale is multiplied when it is lowered. The factor must be above 0
            and below 1.
        hysteresis: the number of overflows in a row after which the scale is lowered.
        min_scale: the scale is never lowered below this value.
        max_scale: the scale never grows above this value. None means float32's maximum.
        finite_step_resets: whether a finite step resets the count of overflows. In TensorFlow 1's tf.contrib, a finite
            step does not reset the count.

    Source: the state machine of `tf.keras.mixed_precision.LossScaleOptimizer`
    (https://www.tensorflow.org/versions/r2.8/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer),
    and Micikevicius et al., Mixed Precision Training (2018), https://arxiv.org/abs/1710.03740.
    """

    growth_steps: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float | None = None
    finite_step_resets: bool = True

    def checked(self) -> Rules:
        """Return the rules with their values converted to Python numbers. Raise an error if a value is invalid.

        >>> Rules(growth_steps=3.0).checked().growth_steps
        3

        Returns:
            A new object of the same class.

        Raises:
            TypeError: a value is not a number.
            ValueError: a value is outside its range.
        """
        growth = errors.positive_number("growth_factor", self.growth_factor, "The usual value is 2.0.")
        backoff = errors.positive_number("backoff_factor", self.backoff_factor, "The usual value is 0.5.")
        if np.float32(growth) <= 1:
            raise ValueError(
                f"`growth_factor` must be above 1 in float32, but got: {self.growth_factor!r}. The usual value is 2.0."
            )
        if np.float32(backoff) >= 1:
            raise ValueError(
                f"`backoff_factor` must be below 1 in float32, but got: {self.backoff_factor!r}. "
                "The usual value is 0.5."
            )
        low = errors.normal_number("min_scale", self.min_scale, "The usual value is 1.0.")
        high = None
        if self.max_scale is not None:
            high = errors.positive_number("max_scale", self.max_scale, "Pass None for float32's maximum.")
            if low > high:
                raise ValueError(f"`min_scale` must not be above `max_scale`, but got: {low!r} and {high!r}.")
        return dataclasses.replace(
            self,
            growth_steps=errors.whole_number("dynamic_growth_steps", self.growth_steps, "The usual value is 2000."),
            growth_factor=growth,
            backoff_factor=backoff,
            hysteresis=errors.whole_number("hysteresis", self.hysteresis, "The usual value is 1."),
            min_scale=low,
            max_scale=high,
        )

    def next(self, finite: Any, before: ScaleState) -> ScaleState:
        """Return the state after a step, as tensors.

        In a graph, the same few scalar operations run after finite and non-finite steps.
        """
        scale, zero = tf.convert_to_tensor(before.scale, tf.float32), tf.constant(0, tf.int64)
        good, bad = tf.cast(before.good, tf.int64), tf.cast(before.bad, tf.int64)

        def after_finite() -> ScaleState:
            counted = ScaleState(scale, good + 1, zero if self.finite_step_resets else bad)
            grown = lambda: ScaleState(self._grown(scale), zero, zero)  # noqa: E731
            return either(counted.good >= self.growth_steps, grown, lambda: counted)

        def after_overflow() -> ScaleState:
            counted = ScaleState(scale, zero, bad + 1)
            lowered = lambda: ScaleState(self._lowered(scale), zero, zero)  # noqa: E731
            return either(counted.bad >= self.hysteresis, lowered, lambda: counted)

        return either(finite, after_finite, after_overflow)

    @property
    def counts_overflows(self) -> bool:
        """Whether the rules count overflows over several steps, which requires a variable."""
        return self.hysteresis > 1

    def _grown(self, scale: tf.Tensor) -> tf.Tensor:
        bigger = scale * self.growth_factor
        if self.max_scale is not None:
            return tf.minimum(bigger, self.max_scale)
        return tf.where(tf.math.is_finite(bigger), bigger, scale)

    # Subclasses that implement the rules of TensorFlow's old loss scales override `_lowered`.
    def _lowered(self, scale: tf.Tensor) -> tf.Tensor:
        return tf.maximum(scale * self.backoff_factor, self.min_scale)


#: The rules that LossScaleOptimizer accepts as keyword arguments, with their defaults. `growth_steps` is omitted,
#: because LossScaleOptimizer calls it `dynamic_growth_steps`, as TensorFlow does. `finite_step_resets` is omitted,
#: because only TensorFlow 1's loss scales use it.
KEYWORDS = {
    field.name: field.default
    for field in dataclasses.fields(Rules)
    if field.name not in ("growth_steps", "finite_step_resets")
}


def with_rules(function: _Function) -> _Function:
    """Decorate a function that passes its `**rules` to `Rules`, so that its signature shows the keywords."""
    *own, rules = inspect.signature(function).parameters.values()
    types = {field.name: field.type for field in dataclasses.fields(Rules)}
    named = [rules.replace(name=n, kind=rules.KEYWORD_ONLY, default=KEYWORDS[n], annotation=types[n]) for n in KEYWORDS]
    function.__signature__ = inspect.Signature([*own, *named])  # type: ignore[attr-defined]
    return function
