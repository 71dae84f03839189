"""The variables that the rules move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import finite as finite_lib
from tf_lossscale.core.rules import Counts, Rules


class LossScale(tf.Module):
    """What a loss is multiplied by, and how that changes from step to step.

    A subclass gives `__call__` and, if the scale reacts to gradients, `check` and `record`.

    >>> class Constant(LossScale):
    ...     def __call__(self):
    ...         return tf.constant(4.0)
    >>> Constant()().numpy().item()
    4.0
    """

    #: False if every step is applied, whatever its gradients: then nothing is checked and no cond is built.
    may_skip = False

    def __call__(self) -> tf.Tensor:
        """Returns the current scale, a float32 scalar tensor."""
        raise NotImplementedError

    def check(self, gradients: Iterable[Any]) -> tf.Tensor:
        """Returns whether the step with these reduced gradients is to be applied, a bool scalar tensor."""
        return finite_lib.all_finite(gradients)

    def record(self, applied: tf.Tensor) -> list[Any]:
        """Moves the scale after a step.

        Args:
            applied: bool scalar, what `check` returned (in agreement with all replicas).

        Returns:
            The operations that do it, for legacy graphs to run.
        """
        del applied
        return []


class FixedLossScale(LossScale):
    """A scale that never moves. It has no variables and, unless asked to, skips no step.

    >>> FixedLossScale(128)().numpy().item()
    128.0

    Args:
        scale: a finite number above 0.
        skip_overflow: whether a step with a non-finite gradient is skipped.
    """

    def __init__(self, scale: Any, skip_overflow: bool = False):
        super().__init__()
        self.may_skip = skip_overflow
        self.initial_scale = errors.positive_number("initial_scale", scale, "Pass for example 1024.")

    def __call__(self) -> tf.Tensor:
        return tf.constant(self.initial_scale, tf.float32)


class DynamicLossScale(LossScale):
    """A scale that grows after many finite steps and backs off after an overflow, by its `Rules`.

    >>> scale = DynamicLossScale(8.0, Rules(growth_steps=1))
    >>> _ = scale.record(scale.check([tf.constant([1.0])]))
    >>> scale().numpy().item(), scale.good_steps.numpy().item()
    (16.0, 0)

    Args:
        initial_scale: the scale to start with, a finite number above 0.
        rules: how it moves.
    """

    may_skip = True

    def __init__(self, initial_scale: Any = 2.0**15, rules: Rules | None = None):
        super().__init__()
        self.rules = (rules or Rules()).checked()
        self.initial_scale = errors.positive_number("initial_scale", initial_scale, "The usual value is 2**15.")
        if self.rules.max_scale is not None and self.initial_scale > self.rules.max_scale:
            raise ValueError(
                f"`initial_scale` must not be above `max_scale`, but got: {self.initial_scale!r} and "
                f"{self.rules.max_scale!r}."
            )
        # The names of the two variables are those of every TensorFlow version, so that checkpoints fit.
        self.current_loss_scale = _scalar("current_loss_scale", self.initial_scale, tf.float32)
        self.good_steps = _scalar("good_steps", 0, tf.int64)
        self.bad_steps = _scalar("bad_steps", 0, tf.int64) if self.rules.hysteresis > 1 else None
        # Not in checkpoints: an original's checkpoint, which has no such thing, must be able to fill every part.
        self.__dict__["skipped_steps"] = _scalar("skipped_steps", 0, tf.int64)
        self.__dict__["last_step_skipped"] = _scalar("last_step_skipped", False, tf.bool)

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """What a checkpoint holds: the scale, the counter, and with a hysteresis the count of overflows."""
        extra = () if self.bad_steps is None else (self.bad_steps,)
        return (self.current_loss_scale, self.good_steps, *extra)

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.current_loss_scale)

    def record(self, applied: tf.Tensor) -> list[Any]:
        bad = 0 if self.bad_steps is None else self.bad_steps
        after = self.rules.next(applied, Counts(self.current_loss_scale, self.good_steps, bad))
        skipped = tf.logical_not(applied)
        done = [
            self.current_loss_scale.assign(after.scale),
            self.good_steps.assign(after.good),
            self.last_step_skipped.assign(skipped),
            self.skipped_steps.assign(self.skipped_steps + tf.cast(skipped, tf.int64)),
        ]
        if self.bad_steps is not None:
            done.append(self.bad_steps.assign(after.bad))
        return done


def _scalar(name: str, value: Any, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        tf.constant(value, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.AUTO,
        aggregation=tf.VariableAggregation.NONE,
    )
