"""MindSpore's loss scale managers, and the update cells that move a scale variable in a graph."""

from __future__ import annotations

import abc
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core import finite, replicas
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
from tf_lossscale.core.rules import Rules, ScaleState
from tf_lossscale.core.variables import LazyVariable, as_number


class LossScaleManager(LossScale, abc.ABC):
    """The base class of loss scale managers, which are loss scales with MindSpore's methods.

    To write a rule in Python, subclass this class or one of the package's managers, and override `get_loss_scale` and
    `update_loss_scale`. A rule that XLA can compile overrides `get_update_cell`, or the methods of `LossScale`.

    >>> class Quartering(LossScaleManager):
    ...     loss_scale = 64.0
    ...     def get_loss_scale(self):
    ...         return self.loss_scale
    ...     def update_loss_scale(self, overflow):
    ...         self.loss_scale = self.loss_scale / 4 if overflow else self.loss_scale
    >>> from tf_lossscale import LossScaleOptimizer
    >>> manager = Quartering()
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=manager)
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: weight * float("inf"), [weight])
    >>> weight.numpy().item(), optimizer.loss_scale.numpy().item(), manager.get_loss_scale()
    (1.0, 16.0, 16.0)

    Checkpoints contain the scale and the variables of the manager, but not its Python attributes. After a checkpoint
    was restored, the next step sets the manager's attribute `loss_scale`, if it has one, and logs a warning if
    `get_loss_scale` still returns a different scale.

    Source: MindSpore, `mindspore.amp.LossScaleManager`.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> Any:
        """Return the current scale, as a number."""

    @abc.abstractmethod
    def update_loss_scale(self, overflow: Any) -> None:
        """Update the scale after a step.

        Args:
            overflow: whether the step overflowed.
        """

    def get_drop_overflow_update(self) -> bool:
        """Return whether an overflowing step is skipped. If False, gradients are not checked and the scale is fixed."""
        return True

    def get_update_cell(self) -> Any:
        """Return a function that updates the scale in a graph, or None.

        The function takes the scale variable and an overflow flag. Without a function, the graph calls the Python
        method `update_loss_scale`, which XLA cannot compile. If there is a function, `get_loss_scale` only has to
        return the scale to start with; calling the manager returns the current scale.
        """
        return None

    def _overrides(self, method: str) -> bool:
        # `move` of this class only chooses between the rules.
        is_fixed = method == "move" and self._own_rule is None and isinstance(self, FixedLossScale)
        return super()._overrides(method) and not is_fixed

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped, according to `get_drop_overflow_update`."""
        return bool(self.get_drop_overflow_update())

    @property
    def _own_rule(self) -> str | None:
        """The method that contains the rule of a user's class. None means the rule of one of this module's classes."""
        for cls in type(self).__mro__:
            if cls in (FixedLossScaleManager, DynamicLossScaleManager, LossScaleManager):
                break
            for name in ("get_update_cell", "update_loss_scale", "get_loss_scale"):
                if name in vars(cls):
                    return name
        return None

    def prepare(self) -> None:
        """Create the variables; see `LossScale.prepare`."""
        taken = vars(self).keys() & {"step", "check", "move"}
        if taken:
            raise TypeError(f"{type(self).__name__} must not have an attribute `{min(taken)}`, which hides a method.")
        super().prepare()
        if self._own_rule is not None:
            self._moving_scale()

    def _moving_scale(self) -> tf.Variable:
        """Return the variable that contains the scale of a user's rule."""
        if "_moved_to" not in vars(self):
            self.initial_scale: float = float(self.get_loss_scale())
            # The scale that the manager returned last. If the variable has a different value, a checkpoint was
            # restored.
            self._moved_to = np.float32(self.initial_scale)
            self._cell = self.get_update_cell() if self._own_rule == "get_update_cell" else None
        return self._variable_named("current_loss_scale", self.initial_scale, tf.float32)

    def __call__(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""
        return super().__call__() if self._own_rule is None else tf.convert_to_tensor(self._moving_scale())

    def move(self, applied: tf.Tensor) -> Any:
        """Change the scale after a step; see `LossScale.move`."""
        if self._own_rule is None:
            return super().move(applied)
        scale, overflow = self._moving_scale(), tf.logical_not(applied)
        if self._cell is not None:
            return [self._cell(scale, overflow)]
        return [scale.assign(tf.numpy_function(self._move_in_python, [self(), overflow], tf.float32))]

    def _move_in_python(self, scale: Any, overflow: Any) -> Any:
        if scale != self._moved_to and hasattr(self, "loss_scale"):
            self.loss_scale: Any = float(scale)
        if scale != self._moved_to and scale != np.float32(self.get_loss_scale()):
            logging.warning(
                "The loss scale was restored or set to %s, but the %s still returns %s, and its rule continues from "
                "there. Restore the state of the manager too, or store the scale in its attribute `loss_scale`, which "
                "is set for you.",
                *(float(scale), type(self).__name__, self.get_loss_scale()),
            )
        self.update_loss_scale(bool(overflow))
        self._moved_to = np.float32(self.get_loss_scale())
        return self._moved_to


class FixedLossScaleManager(LossScaleManager, FixedLossScale):
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
        FixedLossScale.__init__(self, number_of_at_least_1("loss_scale", loss_scale))
        # As in MindSpore, the value may be of any type.
        self.skip_nonfinite = drop_overflow_update

    overflowed: Any = LazyVariable(False, tf.bool, tracked=False)
    """Whether the last step overflowed, as a bool variable. It is set only if `drop_overflow_update` is False."""

    def prepare(self) -> None:
        """Create the variables; see `LossScale.prepare`."""
        super().prepare()
        _ = self.overflowed

    def _step(self, gradients: Any, apply: Callable[[list[Any]], object], *args: Any) -> Any:
        def noting(own: list[Any]) -> object:
            noted = self.overflowed.assign(tf.logical_not(finite.all_finite(own)))
            with tf.control_dependencies(operations(noted)):
                return apply(own)

        if self._is_missing("overflowed"):
            replicas.once(self.prepare)
        return super()._step(gradients, apply if self.may_skip else noting, *args)

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self.initial_scale

    def get_drop_overflow_update(self) -> bool:
        """Return whether a step that overflows is skipped."""
        return self.skip_nonfinite

    def update_loss_scale(self, overflow: object) -> None:
        """Do nothing, because the scale is fixed.

        Args:
            overflow: whether the step overflowed.
        """

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        """Return an update cell for use in a graph. If `drop_overflow_update` is False, return None."""
        return FixedLossScaleUpdateCell(self.get_loss_scale()) if self.get_drop_overflow_update() else None


class DynamicLossScaleManager(LossScaleManager, DynamicLossScale):
    """A manager whose loss scale is lowered after an overflow, and raised after several finite steps in a row.

    >>> manager = DynamicLossScaleManager(init_loss_scale=64, scale_factor=2, scale_window=2)
    >>> for overflow in (False, False, True):
    ...     manager.update_loss_scale(overflow)
    >>> manager.get_loss_scale()
    64.0

    The steps of an optimizer move the same scale:

    >>> from tf_lossscale import LossScaleOptimizer
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=manager)
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: weight * float("inf"), [weight])
    >>> manager.get_loss_scale()
    32.0

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
        LossScale.__init__(self)
        self._exact = number_of_at_least_1("init_loss_scale", init_loss_scale)
        self.initial_scale: float = float(init_loss_scale)
        self._rounded = float(np.float32(self.initial_scale))
        errors.positive_number("scale_factor", scale_factor, "The usual value is 2.")
        # `prepare` checks the rules, because an optimizer needs a factor above 1, but MindSpore accepts a lower one.
        self._rules: Rules = Rules(whole_above_zero("scale_window", scale_window), scale_factor, 1 / scale_factor)
        # A window is an int, and the scale does not grow by a factor of 1.
        if 1 < self.initial_scale < scale_factor > 2 and isinstance(scale_factor, int):
            warnings.warn(
                f"DynamicLossScaleManager has init_loss_scale={init_loss_scale!r} and scale_factor={scale_factor!r}: "
                "the first overflow lowers the scale to 1. If these are meant to be the factor and the window, pass "
                f"DynamicLossScaleManager(scale_factor={init_loss_scale!r}, scale_window={scale_factor!r}).",
                stacklevel=2,
            )
        self._create_variables()
        # MindSpore's counts of the calls of `update_loss_scale`.
        self.cur_iter: int = 1
        self.last_overflow_iter: int = 0
        self.bad_step: int = 0

    scale_window: Any = DynamicLossScale.growth_steps
    scale_factor: Any = DynamicLossScale.multiplier
    increase_ratio: Any = property(lambda self: self._rules.growth_factor, doc="MindSpore's name of `growth_factor`.")
    decrease_ratio: Any = property(lambda self: self._rules.backoff_factor, doc="MindSpore's name of `backoff_factor`.")

    def prepare(self) -> None:
        """Check the rules and create the variables; see `LossScale.prepare`."""
        if self._own_rule is None:
            self._rules.checked()
        super().prepare()

    @property
    def loss_scale(self) -> float:
        """The current scale. In a TF1 graph, which has a scale of its own, this is the scale in eager mode."""
        # MindSpore computes with ints and float64. `_exact` is such a number, and `_rounded` is the scale's float32
        # value at the time when `_exact` was stored. An optimizer's steps change the scale alone.
        with tf.init_scope():
            scale = as_number(self.current_loss_scale) if tf.executing_eagerly() else self._rounded
        return self._exact if scale == self._rounded else scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._exact = value
        with tf.init_scope():
            self._rounded = as_number(self.current_loss_scale.assign(min(value, errors.FLOAT32_MAX)))

    def get_loss_scale(self) -> float:
        """Return the current scale."""
        return self.loss_scale

    def update_loss_scale(self, overflow: object) -> None:
        """Update the scale after a step of a training loop that does not pass the manager to an optimizer.

        Args:
            overflow: whether the step overflowed: a bool, or any object with a truth value.

        Raises:
            RuntimeError: more than 1000 steps in a row overflowed.
        """
        finite, exact = not overflow, self.loss_scale
        if not finite and self.bad_step >= self.bad_step_max:
            raise RuntimeError(
                f"{self.bad_step + 1} steps in a row overflowed, and the limit is {self.bad_step_max}. The model no "
                "longer trains. Look for the operation whose result is infinite, or lower the learning rate."
            )
        DynamicLossScale.move(self, tf.constant(finite))
        if not finite:
            exact = max(exact * self.decrease_ratio, 1)
            self.last_overflow_iter = self.cur_iter
        elif as_number(self.good_steps) == 0:
            exact *= self.increase_ratio
        self._exact, self._rounded = exact, as_number(self.current_loss_scale)
        self.bad_step = 0 if finite else self.bad_step + 1
        self.cur_iter += 1

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        """Return an update cell for use in a graph. The cell starts with the current scale."""
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)


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
    minimum_loss_scale: float = 1.0

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int):
        super().__init__()
        self.loss_scale_value = loss_scale_value
        self.scale_factor: float = float(scale_factor)
        if not self.scale_factor > 0:
            raise ValueError(f"`scale_factor` must be above 0, but got: {scale_factor!r}. The usual value is 2.")
        self.scale_window: int = int(scale_window)
        self.cur_iter: Any = tf.Variable(1, trainable=False, dtype=tf.int64, name="cur_iter")
        self.last_overflow_iter: Any = tf.Variable(0, trainable=False, dtype=tf.int64, name="last_overflow_iter")

    @property
    def _rules(self) -> Rules:
        factor = float(self.scale_factor)
        return Rules(int(self.scale_window), factor, 1 / factor, min_scale=float(self.minimum_loss_scale))

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
        after = self._rules.next(tf.logical_not(overflow), ScaleState(loss_scale, good, 0))
        # The count of finite steps starts again after an overflow and after the scale has grown.
        last_overflow_iter = tf.where(tf.equal(after.good, 0), now, self.last_overflow_iter)
        assigned = [loss_scale.assign(after.scale), self.last_overflow_iter.assign(last_overflow_iter)]
        # In a TF1 graph, `now` may share its memory with `cur_iter`, which is therefore assigned last.
        with tf.control_dependencies(operations(assigned)):
            assigned = [self.cur_iter.assign(now + 1)]
        with tf.control_dependencies(operations(assigned)):
            return tf.identity(overflow)


def whole_above_zero(name: str, value: Any) -> int:
    """Return `value` if it is an int above 0; otherwise raise an error."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int above 0, but got: {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be an int above 0, but got: {value!r}.")
    return value


def number_of_at_least_1(name: str, value: Any) -> Any:
    """Return `value` if it is a finite number that is at least 1; otherwise raise an error."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, but got: {value!r} of type {type(value).__name__}.")
    if errors.positive_number(name, value, "Pass for example 1024.") < 1:
        raise ValueError(f"`{name}` must be a finite number that is at least 1, but got: {value!r}.")
    return value
