"""MindSpore's loss scale managers, which update a scale in Python, and its update cells, which do so in a graph."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any

import tensorflow as tf

from tf_lossscale.amp.own_manager import LossScaleManager
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from tf_lossscale.core.rules import Counts, Rules


class FixedLossScaleManager(LossScaleManager):
    """A manager with a fixed loss scale.

    >>> manager = FixedLossScaleManager(1024.0)
    >>> manager.update_loss_scale(overflow=True)
    >>> manager.get_loss_scale()
    1024.0

    Args:
        loss_scale: the scale, a finite number that is at least 1.
        drop_overflow_update: whether a step that overflows is skipped. If False, its gradients are applied.

    Raises:
        TypeError: `loss_scale` is not a number.
        ValueError: `loss_scale` is below 1, infinite or NaN.

    Source: MindSpore, Enabling Mixed Precision, https://www.mindspore.cn/tutorials/en/master/beginner/mixed_precision.html
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True):
        self._loss_scale = number_of_at_least_1("loss_scale", loss_scale)
        self._drop_overflow_update = drop_overflow_update

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return whether a step that overflows is skipped."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: object) -> None:
        """Do nothing, because the scale is fixed.

        Args:
            overflow: whether the step overflowed.
        """

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        """Return an update cell for use in a graph. If `drop_overflow_update` is False, return None."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None

    def as_loss_scale(self) -> LossScale:
        """Return a `LossScale` object for `LossScaleOptimizer`."""
        if not self._is_all_of(FixedLossScaleManager):
            return super().as_loss_scale()
        return FixedLossScale(self._loss_scale, skip_nonfinite=bool(self._drop_overflow_update))


class DynamicLossScaleManager(LossScaleManager):
    """A manager whose loss scale is lowered after an overflow, and raised after several finite steps in a row.

    >>> manager = DynamicLossScaleManager(init_loss_scale=64, scale_factor=2, scale_window=2)
    >>> for overflow in (False, False, True):
    ...     manager.update_loss_scale(overflow)
    >>> manager.get_loss_scale()
    64.0

    Args:
        init_loss_scale: the scale to start with, a finite number that is at least 1.
        scale_factor: the factor that the scale is multiplied or divided by, above 0.
        scale_window: the number of finite steps in a row after which the scale grows, an int above 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Source: MindSpore, Enabling Mixed Precision, https://www.mindspore.cn/tutorials/en/master/beginner/mixed_precision.html
    """

    #: The number of consecutive overflows above which `update_loss_scale` raises an error.
    bad_step_max = 1000

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000):
        self.loss_scale = number_of_at_least_1("init_loss_scale", init_loss_scale)
        given: Any = scale_factor
        if not isinstance(given, numbers.Real) or isinstance(given, bool):
            raise TypeError(f"`scale_factor` must be a number, but got: {scale_factor!r}. The usual value is 2.")
        self.scale_factor = scale_factor
        if not self.scale_factor > 0 or not _is_finite(self.scale_factor):
            raise ValueError(
                f"`scale_factor` must be a finite number above 0, but got: {scale_factor!r}. The usual value is 2."
            )
        self.scale_window = whole_above_zero("scale_window", scale_window)
        if self.scale_factor > max(self.loss_scale, 2):
            warnings.warn(
                f"DynamicLossScaleManager has init_loss_scale={init_loss_scale!r} and scale_factor={scale_factor!r}: "
                "the first overflow lowers the scale to 1. If these are meant to be the factor and the window, pass "
                f"DynamicLossScaleManager(scale_factor={init_loss_scale!r}, scale_window={scale_factor!r}).",
                stacklevel=2,
            )
        self.increase_ratio = self.scale_factor
        self.decrease_ratio = 1 / self.scale_factor
        self.cur_iter = 1
        self.last_overflow_iter = 0
        self.bad_step = 0

    def get_loss_scale(self) -> float:
        """Return the current scale."""
        return self.loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return True: a step that overflows is skipped."""
        return True

    def update_loss_scale(self, overflow: object) -> None:
        """Update the scale after a step. The scale is a Python number, not a tensor.

        Args:
            overflow: whether the step overflowed: a bool, or any object with a truth value.

        Raises:
            RuntimeError: more than 1000 steps in a row overflowed.
        """
        if overflow:
            self.loss_scale = max(self.loss_scale * self.decrease_ratio, 1)
            self.last_overflow_iter = self.cur_iter
            self.bad_step += 1
        else:
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.loss_scale *= self.increase_ratio
            self.bad_step = 0
        if self.bad_step > self.bad_step_max:
            raise RuntimeError(
                f"{self.bad_step} steps in a row overflowed, and the limit is {self.bad_step_max}. The model no longer "
                "trains. Look for the operation whose result is infinite, or lower the learning rate."
            )
        self.cur_iter += 1

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        """Return an update cell for use in a graph. The cell starts with the current scale."""
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)

    def as_loss_scale(self) -> LossScale:
        """Return a `LossScale` object for `LossScaleOptimizer`. The object starts with the current scale."""
        if not self._is_all_of(DynamicLossScaleManager):
            return super().as_loss_scale()
        return _by_rules(self.loss_scale, rules_of(self.scale_factor, self.scale_window))


class FixedLossScaleUpdateCell:
    """An update cell for a fixed scale. Calling it returns the overflow flag and changes nothing.

    >>> cell = FixedLossScaleUpdateCell(128.0)
    >>> bool(cell(tf.Variable(128.0), tf.constant(True)))
    True

    Args:
        loss_scale_value: the scale.
    """

    def __init__(self, loss_scale_value: float):
        self._loss_scale_value = loss_scale_value

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale_value

    def __call__(self, loss_scale: tf.Variable, overflow: tf.Tensor | bool) -> tf.Tensor:
        """Return `overflow`. The scale variable does not change."""
        del loss_scale
        return tf.convert_to_tensor(overflow)

    def as_loss_scale(self) -> LossScale:
        """Return a `LossScale` object with a fixed scale for `LossScaleOptimizer`. A step that overflows is skipped."""
        return FixedLossScale(self._loss_scale_value, skip_nonfinite=True)


class DynamicLossScaleUpdateCell(tf.Module):
    """An update cell for a dynamic scale. Calling it updates a scale variable and the cell's own step counts.

    >>> cell = DynamicLossScaleUpdateCell(64.0, 2, 3)
    >>> scale = tf.Variable(64.0)
    >>> bool(cell(scale, tf.constant(True)))
    True
    >>> scale.numpy().item()
    32.0

    Args:
        loss_scale_value: the scale to start with.
        scale_factor: the factor that the scale is multiplied or divided by, above 0.
        scale_window: the number of finite steps in a row after which the scale grows, an int above 0.

    Raises:
        ValueError: `scale_factor` is not above 0.
    """

    #: The scale is never lowered below this value. A subclass or an instance may set a different one.
    minimum_loss_scale = 1.0

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int):
        super().__init__()
        self.loss_scale_value = loss_scale_value
        self.scale_factor = float(scale_factor)
        if not self.scale_factor > 0:
            raise ValueError(f"`scale_factor` must be above 0, but got: {scale_factor!r}. The usual value is 2.")
        self.scale_window = int(scale_window)
        cur_iter = tf.Variable(1, trainable=False, dtype=tf.int64, name="cur_iter")
        last_overflow_iter = tf.Variable(0, trainable=False, dtype=tf.int64, name="last_overflow_iter")
        self.cur_iter, self.last_overflow_iter = cur_iter, last_overflow_iter

    @property
    def _rules(self) -> Rules:
        return rules_of(float(self.scale_factor), int(self.scale_window), float(self.minimum_loss_scale))

    def get_loss_scale(self) -> float:
        """Return the scale that the update cell started with."""
        return self.loss_scale_value

    def __call__(self, loss_scale: tf.Variable, overflow: tf.Tensor | bool) -> tf.Tensor:
        """Update `loss_scale` after a step.

        Args:
            loss_scale: float32 scalar variable.
            overflow: bool scalar, whether the step overflowed.

        Returns:
            `overflow` as a tensor, which is available after the update.
        """
        overflow = tf.cast(overflow, tf.bool)
        now = tf.convert_to_tensor(self.cur_iter)
        good = now - 1 - self.last_overflow_iter
        after = self._rules.next(tf.logical_not(overflow), Counts(loss_scale, good, 0))
        # The count of finite steps starts again after an overflow and after the scale has grown.
        last_overflow_iter = tf.where(tf.equal(after.good, 0), now, self.last_overflow_iter)
        assigned = [loss_scale.assign(after.scale), self.last_overflow_iter.assign(last_overflow_iter)]
        # In a TF1 graph, `now` may share its memory with `cur_iter`, which is therefore assigned last.
        with tf.control_dependencies(operations(assigned)):
            assigned = [self.cur_iter.assign(now + 1)]
        with tf.control_dependencies(operations(assigned)):
            return tf.identity(overflow)

    def as_loss_scale(self) -> LossScale:
        """Return a `LossScale` object that follows this cell's rule, but has its own variables."""
        return _by_rules(self.loss_scale_value, self._rules)


def whole_above_zero(name: str, value: Any) -> int:
    """Return `value` if it is an int above 0; otherwise raise an error.

    >>> whole_above_zero("scale_window", 3)
    3

    Args:
        name: the argument's name, for the message.
        value: the argument's value.

    Returns:
        `value`.

    Raises:
        TypeError: `value` is not an int.
        ValueError: `value` is below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int above 0, but got: {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be an int above 0, but got: {value!r}.")
    return value


def number_of_at_least_1(name: str, value: Any) -> Any:
    """Return `value` if it is a finite number that is at least 1; otherwise raise an error.

    >>> number_of_at_least_1("loss_scale", 0.5)
    Traceback (most recent call last):
    ...
    ValueError: `loss_scale` must be a finite number that is at least 1, but got: 0.5.

    Args:
        name: the argument's name, for the error.
        value: the argument's value.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is infinite, NaN or below 1.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, but got: {value!r} of type {type(value).__name__}.")
    if not _is_finite(value) or value < 1:
        raise ValueError(f"`{name}` must be a finite number that is at least 1, but got: {value!r}.")
    return value


def rules_of(scale_factor: float, scale_window: int, min_scale: float = 1.0) -> Rules:
    """Return the update rules of MindSpore's dynamic loss scales.

    >>> rules_of(2, 2000).backoff_factor
    0.5

    Args:
        scale_factor: the scale is multiplied by this factor when it grows, and divided by it after an overflow.
        scale_window: the number of finite steps in a row after which the scale grows.
        min_scale: the scale is never lowered below this value.
    """
    backoff_factor = 1 / scale_factor
    return Rules(
        growth_steps=scale_window, growth_factor=scale_factor, backoff_factor=backoff_factor, min_scale=min_scale
    )


def _by_rules(initial_scale: float, rules: Rules) -> LossScale:
    return DynamicLossScale(
        initial_scale,
        rules.growth_steps,
        growth_factor=rules.growth_factor,
        backoff_factor=rules.backoff_factor,
        min_scale=rules.min_scale,
    )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # `value` is an int that is too large for a float.
        return False
