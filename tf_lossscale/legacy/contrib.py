"""The loss scale managers of `tf.contrib.mixed_precision`, and the optimizer that uses them."""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf

from tf_lossscale.core import dynamic
from tf_lossscale.core import loss_scale as core
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.rules import Rules
from tf_lossscale.families import tf1
from tf_lossscale.legacy.loss_scale import move_after
from tf_lossscale.legacy.private_names import Replaceable
from tf_lossscale.wrapper import registry


class LossScaleManager(abc.ABC):
    """The interface of a loss scale manager. Derive a class from it to write your own manager.

    >>> class Constant(LossScaleManager):
    ...     def get_loss_scale(self):
    ...         return tf.constant(4.0)
    ...     def update_loss_scale(self, finite_grads):
    ...         return tf.no_op()
    >>> Constant().get_loss_scale().numpy().item()
    4.0

    Source: `tf.contrib.mixed_precision.LossScaleManager` of TensorFlow 1.15.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor | bool) -> tf.Operation | None:
        """Update the scale after a step.

        Args:
            finite_grads: a bool scalar, true if all gradients are finite.

        Returns:
            The operation that updates the scale.
        """

    def as_loss_scale(self) -> core.LossScale:
        """Return a loss scale object for `LossScaleOptimizer`. The object calls this manager's methods."""
        return _Managed(self)


class FixedLossScaleManager(LossScaleManager):
    """A manager with a fixed loss scale. Steps with non-finite gradients are still skipped.

    >>> FixedLossScaleManager(128).get_loss_scale().numpy().item()
    128.0

    Args:
        loss_scale: a number that is at least 1.

    Raises:
        ValueError: `loss_scale` is below 1.

    Source: `tf.contrib.mixed_precision.FixedLossScaleManager` of TensorFlow 1.15.
    """

    def __init__(self, loss_scale: float):
        if loss_scale < 1:
            raise ValueError(f"loss scale must be at least 1, but got: {loss_scale!r}.")
        self._loss_scale = float(loss_scale)

    def get_loss_scale(self) -> tf.Tensor:
        """Return the scale."""
        return tf.convert_to_tensor(self._loss_scale, tf.float32)

    def update_loss_scale(self, finite_grads: tf.Tensor | bool) -> tf.Operation | None:
        """Return an operation that does nothing."""
        del finite_grads
        return tf.no_op()


class ExponentialUpdateLossScaleManager(LossScaleManager, dynamic.DynamicLossScale):
    """A manager that raises the loss scale after a number of finite steps, and lowers it after a number of overflows.

    The overflows need not be consecutive. A subclass may read and assign the private attributes of TensorFlow's class:
    `_loss_scale`, `_num_good_steps`, `_num_bad_steps`, `_incr_every_n_steps` and others. It may also assign them
    instead of calling `super().__init__`.

    >>> manager = ExponentialUpdateLossScaleManager(
    ...     64.0, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5
    ... )
    >>> _ = manager.update_loss_scale(tf.constant(False))
    >>> manager.get_loss_scale().numpy().item()
    32.0

    Args:
        init_loss_scale: the scale to start with.
        incr_every_n_steps: the number of consecutive finite steps after which the scale is raised.
        decr_every_n_nan_or_inf: the number of overflows after which the scale is lowered. It is never lowered below 1.
        incr_ratio: the factor by which the scale is multiplied to raise it.
        decr_ratio: the factor by which the scale is multiplied to lower it.

    Source: `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager` of TensorFlow 1.15.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ):
        core.LossScale.__init__(self)
        self._init_loss_scale = _number("init_loss_scale", init_loss_scale)
        self._incr_every_n_steps = incr_every_n_steps
        self._decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
        self._incr_ratio = _number("incr_ratio", incr_ratio)
        self._decr_ratio = _number("decr_ratio", decr_ratio)
        self._create_variables()

    _loss_scale: Any = Replaceable(lambda self: self._variable_named("loss_scale", self.initial_scale, tf.float32))
    _num_good_steps: Any = Replaceable(lambda self: self._variable_named("good_steps", 0, tf.int32))
    _num_bad_steps: Any = Replaceable(lambda self: self._variable_named("bad_steps", 0, tf.int32))

    # As in `tf.contrib`, the initial scale and the rules for changing the scale are computed from the private
    # attributes on every use, without checks. A subclass that has its own variable for the scale may lack
    # `_init_loss_scale`.
    initial_scale: Any = Replaceable(lambda self: float(getattr(self, "_init_loss_scale", "nan")))
    _rules: Any = Replaceable(
        lambda self: Rules(
            growth_steps=self._incr_every_n_steps,
            growth_factor=self._incr_ratio,
            backoff_factor=self._decr_ratio,
            hysteresis=self._decr_every_n_nan_or_inf,
            finite_step_resets=False,
        )
    )

    @property
    def current_loss_scale(self) -> Any:
        """The scale, as a float32 scalar variable."""
        return self._loss_scale

    @property
    def good_steps(self) -> Any:
        """The number of finite steps that count towards raising the scale, as an int32 scalar variable."""
        return self._num_good_steps

    @property
    def bad_steps(self) -> Any:
        """The number of overflows that count towards lowering the scale, as an int32 scalar variable."""
        return self._num_bad_steps

    def _reset_stats(self) -> Any:
        assigned = [counter.assign(0) for counter in (self._num_good_steps, self._num_bad_steps)]
        return None if tf.executing_eagerly() else tf.group(*[each.op for each in assigned])

    def get_loss_scale(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""
        return tf.convert_to_tensor(self._loss_scale)

    @do_not_convert
    def update_loss_scale(self, finite_grads: tf.Tensor | bool) -> tf.Operation | None:
        """Update the scale after a step.

        Args:
            finite_grads: a bool scalar, true if all gradients are finite.

        Returns:
            In a graph, a tensor whose evaluation updates the scale. In eager mode, None.
        """
        return move_after(tf.cast(finite_grads, tf.bool), self)

    def as_loss_scale(self) -> core.LossScale:
        """Return a loss scale object for a `LossScaleOptimizer`.

        If this manager is an instance of a subclass, the result is a separate object that calls the manager's methods.
        Otherwise, the result is the manager itself.
        """
        return self if type(self) is ExponentialUpdateLossScaleManager else super().as_loss_scale()


class LossScaleOptimizer(tf1.LossScaleOptimizer):
    """Wraps a `tf.compat.v1.train.Optimizer` and scales the loss with a manager's loss scale.

    >>> manager = FixedLossScaleManager(8)
    >>> opt = LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
    >>> weight = tf.Variable(1.0)
    >>> _ = opt.apply_gradients([(tf.constant(float("nan")), weight)])
    >>> weight.numpy().item()
    1.0

    Args:
        opt: a `tf.compat.v1.train.Optimizer`.
        loss_scale_manager: a manager from this module, or an object with `get_loss_scale` and `update_loss_scale`.

    Raises:
        TypeError: `opt` is not a `tf.compat.v1.train.Optimizer`, or the manager lacks a method.

    Source: `tf.contrib.mixed_precision.LossScaleOptimizer` of TensorFlow 1.15.
    """

    def __init__(self, opt: Any, loss_scale_manager: Any):
        for method in ("get_loss_scale", "update_loss_scale"):
            if not hasattr(loss_scale_manager, method):
                raise TypeError(
                    f"`loss_scale_manager` must have a {method}() method, but got: {loss_scale_manager!r}. "
                    "Derive it from tf_lossscale.legacy.LossScaleManager."
                )
        is_ours = isinstance(loss_scale_manager, core.LossScale) or hasattr(loss_scale_manager, "as_loss_scale")
        # A TensorFlow 1 program may wrap the same optimizer again in each graph.
        registry.release(opt)
        super().__init__(opt, loss_scale=loss_scale_manager if is_ours else _Managed(loss_scale_manager))
        # Writing to `__dict__` bypasses TensorFlow's attribute tracking.
        self.__dict__["_loss_scale_manager"] = loss_scale_manager

    @property
    def _opt(self) -> Any:
        """The inner optimizer. Subclasses that were written for TensorFlow's class read this private name."""
        return self._optimizer


class _Managed(core.LossScale):
    """A loss scale that calls a manager's methods. Steps with non-finite gradients are always skipped."""

    initial_scale = float("nan")

    def __init__(self, manager: Any):
        super().__init__()
        self._manager = manager

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._manager.get_loss_scale())

    def move(self, applied: tf.Tensor) -> list[Any]:
        update = self._manager.update_loss_scale(applied)
        return [] if update is None else [update]


def _number(name: str, value: Any) -> float:
    """Return an argument as a float. For None and strings, raise the same types of errors as TensorFlow 1 does."""
    if value is None:
        raise ValueError(f"`{name}` must be a number, but got: None.")
    if isinstance(value, str):
        raise TypeError(f"`{name}` must be a number, but got: {value!r}.")
    return float(value)
