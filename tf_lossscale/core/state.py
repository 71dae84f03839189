"""Loss scales: the base class, a fixed scale, and a dynamic scale that changes according to rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core.finite import all_finite
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.rules import Counts, Rules
from tf_lossscale.core.variables import LazyVariable, Variables, add_one, as_number, value_or_zero

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Scalar


class LossScale(Variables):
    """The base class of all loss scales. Derive from it to define how a loss scale changes from step to step.

    A subclass must define `__call__`. It may override `check`, which decides whether to apply a step, and `move`, which
    changes the scale. If `may_skip` is True, each step calls `check`, then `move`; otherwise it calls neither. Write
    both methods with TensorFlow's operations, because a `tf.function` traces them only once. Pass an instance as the
    `loss_scale_manager` argument of `LossScaleOptimizer`.

    >>> import tf_lossscale
    >>> class Scheduled(tf_lossscale.LossScale):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.step = tf.Variable(0.0, trainable=False)
    ...     def __call__(self):
    ...         return 1024.0 / (1.0 + self.step)
    ...     def move(self, applied):
    ...         return [self.step.assign_add(1.0)]
    ...     may_skip = True
    >>> optimizer = tf_lossscale.LossScaleOptimizer(
    ...     tf.keras.optimizers.SGD(), loss_scale_manager=Scheduled()
    ... )
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: weight**2, [weight])
    >>> optimizer.loss_scale.numpy().item()
    512.0
    """

    #: Whether a step may be skipped. If False, every step is applied, whatever the gradients are, and `check` and
    #: `move` are not called.
    may_skip = False
    #: Whether `check` and `move` also receive the norm of all gradients, as the `norm` keyword argument.
    uses_norm = False
    #: Whether XLA may compile `check` and `move`. A subclass does not inherit the value, because the subclass may run
    #: Python code in each step.
    traceable = False
    #: Names of attributes that no step reads. Compiled steps ignore these attributes.
    not_in_a_step: tuple[str, ...] = ("_restored", "_stall_actions")

    def __init__(self) -> None:
        # A tf.Module reserves its name in the graph. This module is not called "loss_scale", because the variable of
        # tf.contrib's loss scale manager has that name.
        super().__init__(name="loss_scaling")

    def as_loss_scale(self) -> LossScale:
        """Return this object, which `LossScaleOptimizer` uses as its loss scale."""
        return self

    @property
    def reads_gradients(self) -> bool:
        """Whether a subclass overrides `check`. Such a method may read the gradients' values."""
        return type(self).check is not LossScale.check

    def prepare(self) -> None:
        """Create the variables that record the outcome of each step. Called before the first step."""
        if self.may_skip:
            _ = self.total_steps, self.skipped_steps, self.skipped_in_a_row, self.last_step_skipped

    def __call__(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(), which returns the current scale as a float32 scalar tensor."
        )

    def bring_into_range(self) -> None:
        """Do nothing, because only a dynamic scale is loaded from checkpoints and can be out of range."""

    def check(self, gradients: Iterable[Gradient], **norm: tf.Tensor) -> tf.Tensor:
        """Return whether to apply a step; by default, whether its gradients are finite.

        Args:
            gradients: tensors, IndexedSlices or None, already unscaled and summed over the replicas.
            **norm: contains `norm`, the norm of all gradients as a float32 scalar tensor, if `uses_norm` is True.

        Returns:
            A bool scalar tensor.
        """
        del norm
        return all_finite(gradients)

    def move(self, applied: tf.Tensor, **norm: tf.Tensor) -> list[Any]:
        """Change the scale after a step. Unless a subclass overrides this method, the scale does not change.

        Args:
            applied: the result of `check`, a bool scalar tensor, equal on all replicas.
            **norm: as in `check`.

        Returns:
            The results of `assign`, which a session has to run in a TF1 graph.
        """
        del applied, norm
        return []

    def record(self, applied: tf.Tensor, **norm: tf.Tensor) -> list[Any]:
        """Change the scale after a step, and count the step.

        Args:
            applied: as in `move`.
            **norm: as in `move`.

        Returns:
            The operations that a session has to run in a TF1 graph.
        """
        return [*self.move(applied, **norm), *self.count(applied)]

    def count(self, applied: tf.Tensor) -> list[Any]:
        """Count a step, and record whether it was skipped.

        Args:
            applied: as in `move`.

        Returns:
            The operations that a session has to run in a TF1 graph.
        """
        if not self.may_skip:
            return []
        assigned = [self.last_step_skipped.assign(tf.logical_not(applied)), add_one(self.total_steps)]
        # An applied step does not change the counts of skipped steps. In a TF1 graph it still assigns their current
        # values to them, and 0 to an uninitialized count, so that all counts can be read after the step.
        if not tf.compat.v1.executing_eagerly_outside_functions():
            assigned += [count.assign(value_or_zero(count)) for count in (self.skipped_steps, self.skipped_in_a_row)]
        return assigned

    def skip(self) -> list[Any]:
        """Count a skipped step. This is called only for skipped steps, before `record`.

        Returns:
            The operations that a session has to run in a TF1 graph.
        """
        return [add_one(self.skipped_steps), self.skipped_in_a_row.assign(self.skipped_before() + 1)]

    def skipped_before(self) -> tf.Tensor:
        """Return how many steps in a row were skipped right before this one, as an int64 scalar tensor."""
        return tf.where(value_or_zero(self.last_step_skipped), value_or_zero(self.skipped_in_a_row), 0)

    @property
    def lowest(self) -> float | None:
        """The lower bound of the scale, as a float. If it is None, long runs of skipped steps are not reported."""
        return None

    def stall_reported(self, action: Any) -> tf.Variable:
        """Return the bool scalar variable that records whether a stall, a long run of skipped steps, was reported.

        Args:
            action: the reaction to a stall. Each reaction has its own variable, which all optimizers with this scale
                share.
        """
        # The list of actions is set in `__dict__`, so that TensorFlow does not track the list.
        actions = self.__dict__.setdefault("_stall_actions", [])
        if action not in actions:
            actions.append(action)
        return self._weight(f"stall_reported_{actions.index(action)}", False, tf.bool, tracked=False)

    def defer(self, optimizer: Any, update: Any) -> bool:
        """If the step has to wait for the steps of other optimizers, store it and return True.

        By default, a step does not have to wait.

        Args:
            optimizer: the optimizer that takes the step.
            update: the step to take, a `step.Update`.
        """
        del optimizer, update
        return False

    # The variables that count steps are not saved. Otherwise the checkpoints of TensorFlow's own LossScaleOptimizer,
    # which lack these variables, could not be restored completely.

    total_steps = LazyVariable(0, tf.int64, tracked=False)
    """The number of steps, including skipped ones, as an int64 scalar variable."""
    skipped_steps = LazyVariable(0, tf.int64, tracked=False)
    """The number of skipped steps, as an int64 scalar variable."""
    skipped_in_a_row = LazyVariable(0, tf.int64, tracked=False)
    """The number of skipped steps in a row, up to the last skipped step, as an int64 scalar variable."""
    last_step_skipped = LazyVariable(False, tf.bool, tracked=False)
    """Whether the last step was skipped, as a bool scalar variable."""


class FixedLossScale(LossScale):
    """A fixed scale. By default, every step is applied and the object has no variables.

    >>> FixedLossScale(128)().numpy().item()
    128.0

    Args:
        scale: a finite number above 0.
        skip_nonfinite: whether a step with a non-finite gradient is skipped.
    """

    traceable = True

    def __init__(self, scale: Any, skip_nonfinite: bool = False):
        super().__init__()
        self.may_skip = skip_nonfinite
        self.initial_scale = errors.positive_number("initial_scale", scale, "Pass for example 1024.")

    def __call__(self) -> tf.Tensor:
        return tf.constant(self.initial_scale, tf.float32)

    @property
    def lowest(self) -> float | None:
        return self.initial_scale if self.may_skip else None


class DynamicLossScale(LossScale):
    """A scale that grows after many finite steps and falls after an overflow, according to its `Rules`.

    >>> scale = DynamicLossScale(8.0, Rules(growth_steps=1))
    >>> _ = scale.record(scale.check([tf.constant([1.0])]))
    >>> scale().numpy().item(), scale.good_steps.numpy().item()
    (16.0, 0)

    Args:
        initial_scale: the scale to start with, a finite number above 0.
        rules: the rules by which the scale changes. None means the default rules.
    """

    may_skip = True
    traceable = True

    def __init__(self, initial_scale: Scalar = 2.0**15, rules: Rules | None = None):
        super().__init__()
        self.rules = (rules or Rules()).checked()
        self.initial_scale = errors.positive_number("initial_scale", initial_scale, "The usual value is 2**15.")
        if self.rules.max_scale is not None and self.initial_scale > self.rules.max_scale:
            raise ValueError(
                f"`initial_scale` must not be above `max_scale`, but got: {self.initial_scale!r} and "
                f"{self.rules.max_scale!r}."
            )
        self._make_weights()

    def _make_weights(self) -> None:
        # Reading these attributes creates their variables.
        _ = self.current_loss_scale, self.good_steps, self.bad_steps
        self.__dict__["_restored"] = False

    # `current_loss_scale` and `good_steps` have the same names as in TensorFlow, so that checkpoints are compatible.

    @property
    def current_loss_scale(self) -> tf.Variable:
        """The current scale, as a float32 scalar variable."""
        return self._weight("current_loss_scale", self.initial_scale, tf.float32)

    good_steps = LazyVariable(0, tf.int64)
    """The number of finite steps that count towards the next growth of the scale, as an int64 scalar variable."""

    @property
    def bad_steps(self) -> tf.Variable | None:
        """The number of overflows counted towards `hysteresis`, an int64 variable, or None if `hysteresis` is 1."""
        return self._weight("bad_steps", 0, tf.int64) if self.rules.counts_overflows else None

    @property
    def lowest(self) -> float | None:
        return self.rules.min_scale

    # Aliases with the names of the attributes in TensorFlow 2.4 to 2.15, which old code may read and assign.
    counter: Any = property(lambda self: self.good_steps, lambda self, value: self.good_steps.assign(value))
    growth_steps: Any = property(
        lambda self: self.rules.growth_steps, lambda self, value: self._change_rules(growth_steps=value)
    )
    multiplier: Any = property(
        lambda self: self.rules.growth_factor,
        lambda self, value: self._multiply_by(value),
    )

    def _multiply_by(self, factor: Any) -> None:
        factor = errors.positive_number("multiplier", factor, "The usual value is 2.")
        self._change_rules(growth_factor=factor, backoff_factor=1 / factor)

    def _change_rules(self, **changes: Any) -> None:
        self.rules = dataclasses.replace(self.rules, **changes).checked()

    def __call__(self) -> tf.Tensor:
        if vars(self).get("_restored"):
            with tf.init_scope():
                self.bring_into_range()
        return tf.convert_to_tensor(self.current_loss_scale)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        # TensorFlow calls this method right before it restores a variable, but calls no method after the variable is
        # restored. The restored scale is therefore checked when it is next read.
        self.__dict__["_restored"] = True
        return super()._lookup_dependency(name, *args)

    def bring_into_range(self) -> None:
        """If the loaded scale is out of range, replace it and log a warning. In a graph or a replica context, do
        nothing.

        >>> scale = DynamicLossScale(8.0)
        >>> _ = scale.current_loss_scale.assign(float("inf"))
        >>> scale.bring_into_range()
        >>> scale().numpy().item()
        8.0
        """
        if not tf.executing_eagerly() or (
            tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        ):
            return
        self.__dict__["_restored"] = False
        loaded = as_number(self.current_loss_scale)
        fitting = self.in_range(loaded)
        if fitting != loaded and math.isfinite(fitting):
            self.current_loss_scale.assign(fitting)

    def in_range(self, loaded: float) -> float:
        """Return a loaded scale if it is in the allowed range. Otherwise log a warning and return a scale in the range.

        >>> DynamicLossScale(8.0).in_range(0.0)
        1.0

        Args:
            loaded: any number.

        Returns:
            The number, clipped to the range from `min_scale` (or `initial_scale`, if that is lower) to `max_scale`. If
            the number is infinite or NaN, the result is `initial_scale`.
        """
        low, high = self.rules.min_scale, self.rules.max_scale or errors.FLOAT32_MAX
        low, high = (float(np.float32(bound)) for bound in (min(low, self.initial_scale), high))
        fitting = min(max(loaded, low), high) if math.isfinite(loaded) else self.initial_scale
        if fitting != loaded:
            logging.warning(
                "The loss scale that was loaded is %g, but must be a finite number from %g to %g. It is set to %g.",
                *(loaded, low, high, fitting),
            )
        return fitting

    def move(self, applied: tf.Tensor, **norm: tf.Tensor) -> list[Any]:
        del norm
        scale, good_steps, bad_steps = self.current_loss_scale, self.good_steps, self.bad_steps
        after = self.rules.next(applied, Counts(scale, good_steps, 0 if bad_steps is None else bad_steps))
        # In a graph an infinite or NaN scale may be restored from a checkpoint unnoticed. If such a scale were not
        # replaced, every step would be skipped, and the scale would never recover.
        moved = tf.where(tf.math.is_finite(after.scale), after.scale, self.initial_scale)
        assigned = [scale.assign(moved), good_steps.assign(tf.cast(after.good, good_steps.dtype))]
        if bad_steps is not None:
            assigned.append(bad_steps.assign(tf.cast(after.bad, bad_steps.dtype)))
        return assigned


def adopted(value: Any) -> LossScale | None:
    """Convert an object to a loss scale. Return None if the object cannot be used as one.

    >>> class Constant:
    ...     def __call__(self):
    ...         return tf.constant(4.0)
    ...     def update(self, grads):
    ...         return None, True
    >>> adopted(Constant())().numpy().item()
    4.0
    >>> adopted(1024) is None
    True

    Args:
        value: a LossScale, or a callable that returns the scale and has an `update(grads)` method. The method changes
            the scale. It returns an operation (None in eager mode), and whether to apply the gradients.
    """
    if isinstance(value, LossScale):
        return value
    return _Adopted(value) if callable(value) and callable(getattr(value, "update", None)) else None


class _Adopted(LossScale):
    may_skip = True
    initial_scale = float("nan")

    def __init__(self, loss_scale: Any):
        super().__init__()
        self.loss_scale = loss_scale

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.loss_scale())

    def check(self, gradients: Iterable[Gradient], **norm: tf.Tensor) -> tf.Tensor:
        del norm
        return moved_by_update(self.loss_scale, gradients)


def moved_by_update(loss_scale: Any, gradients: Iterable[Any]) -> tf.Tensor:
    """Call a loss scale's `update` method, which checks gradients and changes the scale.

    Args:
        loss_scale: an object that `adopted` accepts.
        gradients: tensors, IndexedSlices or None, already unscaled and summed over the replicas.

    Returns:
        A bool scalar tensor, which is true if the gradients should be applied. It is computed after the scale has
        changed.
    """
    update, apply = loss_scale.update(list(gradients))
    with tf.control_dependencies(operations(update)):
        return tf.identity(tf.convert_to_tensor(apply))
