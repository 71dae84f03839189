"""The loss scale classes of `tf.train.experimental` and `tf.mixed_precision.experimental`.

TensorFlow's versions differ:

| behavior | TensorFlow 1.15 | 2.0 to 2.3 | compat.v1 of 2.21 | this package |
|---|---|---|---|---|
| IndexedSlices rows with the same index: what is checked | their sum | their sum | each row | their sum |
| IndexedSlices without a dense shape | ValueError | ValueError | accepted | accepted |
| lowering the scale in eager mode | divides by the multiplier | the same | the same | the same |
| lowering the scale in a graph | multiplies by the reciprocal in float32 | the same | the same | the same |
| `increment_period` | converted with `int`, even if it is a string | the same | the same | the same |
| `increment_period` of 0 or less | the scale grows on every step | the same | the same | the same |
| `tf.contrib`: a finite step resets the count of overflows | no | - | - | no |
| `tf.contrib`: a gradient that is None, or an iterator as `grads_and_vars` | errors | - | - | accepted |
| `FixedLossScale`: non-finite gradients | applied | applied | applied | applied |
"""

from __future__ import annotations

import abc
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import tensorflow as tf

from tf_lossscale.core import dynamic, finite, replicas
from tf_lossscale.core import loss_scale as core
from tf_lossscale.core.graphs import do_not_convert, finished, operations
from tf_lossscale.core.rules import Rules
from tf_lossscale.core.variables import as_number
from tf_lossscale.legacy.private_names import Replaceable
from tf_lossscale.legacy.tensor_like import TensorLike
from tf_lossscale.wrapper.checks import decision_of
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Optimizer, Same


class LossScale(TensorLike, core.LossScale, abc.ABC):
    """Base class of the old loss scales. Derive a class from it to write your own loss scale.

    The `update` method checks the gradients and changes the scale.

    >>> class Halving(LossScale):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self._scale = self._add_weight("scale", 64.0)
    ...     def __call__(self):
    ...         return self._scale
    ...     def update(self, grads):
    ...         return self._scale.assign(self._scale / 2), True
    ...     def get_config(self):
    ...         return {}
    >>> halving = Halving()
    >>> _ = halving.update([])
    >>> halving().numpy().item()
    32.0

    Source: `tf.train.experimental.LossScale`,
    https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/mixed_precision/experimental/LossScale
    """

    @abc.abstractmethod
    def __call__(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""

    @abc.abstractmethod
    def update(self, grads: Iterable[Gradient]) -> tuple[tf.Operation | None, tf.Tensor | bool]:
        """Update the scale after a step.

        Args:
            grads: a nested structure that contains the unscaled gradients from every replica.

        Returns:
            The operation that updates the scale (None in eager mode), and whether to apply the gradients.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return a dict of the arguments of the constructor."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LossScale:
        """Create a loss scale from a return value of `get_config`."""
        return cls(**config)

    def _add_weight(self, name: str, initial_value: Any, dtype: Any = None) -> tf.Variable:
        return self._variable_named(name, initial_value, None if dtype is None else tf.as_dtype(dtype))

    #: The initial scale. For a user-defined loss scale it is unknown, so it is NaN.
    initial_scale: float = float("nan")

    # A step calls `check`, then `move`. The old `update` method does both.

    def check(self, gradients: list[Gradient]) -> tf.Tensor:
        return decision_of(self.update(gradients))

    def move(self, applied: tf.Tensor) -> Any:
        """Return an operation that does nothing, because `check` has changed the scale."""
        del applied
        return tf.no_op()


class FixedLossScale(LossScale, core.FixedLossScale):
    """A fixed loss scale.

    >>> scale = FixedLossScale(128)
    >>> scale().numpy().item()
    128.0
    >>> scale
    FixedLossScale(128.0)

    Args:
        loss_scale_value: a Python number that is at least 1.

    Raises:
        ValueError: `loss_scale_value` is not a Python int or float, or is below 1.

    Source: `tf.train.experimental.FixedLossScale`.
    """

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: only by the `update` of a subclass."""
        return type(self).update is not FixedLossScale.update

    def __init__(self, loss_scale_value: float):
        LossScale.__init__(self)
        if not isinstance(loss_scale_value, (int, float)):
            raise ValueError(f"loss_scale_value must be a Python int or float, but got: {loss_scale_value!r}.")
        if loss_scale_value < 1:
            raise ValueError(f"loss_scale_value must be at least 1, but got: {loss_scale_value!r}.")
        self._loss_scale_value = float(loss_scale_value)

    initial_scale: Any = Replaceable(lambda self: self._loss_scale_value)

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._loss_scale_value, tf.float32)

    def update(self, grads: Iterable[Gradient]) -> tuple[tf.Operation | None, tf.Tensor | bool]:
        """Return an operation that does nothing, and True, because the gradients are always applied."""
        del grads
        return tf.no_op(), True

    def get_config(self) -> dict[str, Any]:
        """Return a dict of the arguments of the constructor."""
        return {"loss_scale_value": self.initial_scale}

    def __repr__(self) -> str:
        return f"FixedLossScale({self.initial_scale})"


class DynamicLossScale(LossScale, dynamic.DynamicLossScale):
    """A loss scale that is multiplied by a factor after a number of finite steps, and divided by it after an overflow.

    >>> scale = DynamicLossScale(initial_loss_scale=64, increment_period=1)
    >>> _, apply = scale.update([tf.constant([1.0])])
    >>> bool(apply), scale().numpy().item()
    (True, 128.0)

    Args:
        initial_loss_scale: the scale to start with.
        increment_period: the number of consecutive finite steps after which the scale grows; truncated to an int.
        multiplier: the factor by which the scale is multiplied or divided.

    Source: `tf.train.experimental.DynamicLossScale`. Unlike `tf_lossscale.LossScaleOptimizer`, this
    class accepts unusual arguments, as TensorFlow's class does, so that old code keeps running.
    """

    def __init__(self, initial_loss_scale: float = 2**15, increment_period: int = 2000, multiplier: float = 2.0):
        LossScale.__init__(self)
        self._initial_loss_scale = float(initial_loss_scale)
        self._increment_period = int(increment_period)
        self._multiplier = float(multiplier)
        self._create_variables()

    # These private attributes have the same names as in TensorFlow's class. A subclass may read them, or assign them
    # instead of calling the constructor.

    _current_loss_scale: Any = Replaceable(
        lambda self: self._variable_named("current_loss_scale", self._initial_loss_scale, tf.float32)
    )
    _num_good_steps: Any = Replaceable(lambda self: self._variable_named("good_steps", 0, tf.int64))

    @property
    def initial_loss_scale(self) -> float:
        """The initial scale."""
        return self._initial_loss_scale

    @property
    def increment_period(self) -> int:
        """The number of consecutive finite steps after which the scale grows."""
        return self._increment_period

    @property
    def multiplier(self) -> float:
        """The factor by which the scale is multiplied or divided."""
        return self._multiplier

    initial_scale: Any = Replaceable(lambda self: self._initial_loss_scale)

    # The arguments are not checked, because old code may pass unusual values.
    _rules: Any = Replaceable(
        lambda self: _DividingRules(
            growth_steps=self._increment_period,
            growth_factor=self._multiplier,
            backoff_factor=1 / self._multiplier if self._multiplier else float("inf"),
        )
    )

    @property
    def current_loss_scale(self) -> tf.Variable:
        """The scale, as a float32 scalar variable."""
        return self._current_loss_scale

    @property
    def good_steps(self) -> tf.Variable:
        """The number of finite steps that count towards the next growth of the scale, as an int64 scalar variable."""
        return self._num_good_steps

    def __call__(self) -> tf.Tensor:
        return dynamic.DynamicLossScale.__call__(self)

    @do_not_convert
    def update(self, grads: Iterable[Gradient]) -> tuple[tf.Operation | None, tf.Tensor | bool]:
        """Update the scale after a step.

        Args:
            grads: a nested structure of unscaled gradients; per-replica values in a cross-replica context.

        Returns:
            A pair. The first value is a tensor whose evaluation updates the scale, or None in eager mode. The second is
            a bool scalar tensor, which says whether to apply the gradients.
        """
        if replicas.several_replicas() and not tf.distribute.in_cross_replica_context():
            context = tf.distribute.get_replica_context()
            return context.merge_call(lambda _, per_replica: self.update(per_replica), args=(grads,))
        local_results = tf.distribute.get_strategy().experimental_local_results
        gradients = [
            local if isinstance(local, tf.IndexedSlices) else tf.convert_to_tensor(local)
            for gradient in tf.nest.flatten(grads)
            if gradient is not None
            for local in local_results(gradient)
        ]
        if any(gradient.dtype.is_complex for gradient in gradients):
            raise TypeError(
                "update() does not take complex gradients, as in TensorFlow 1 and 2. tf_lossscale.LossScaleOptimizer "
                "trains complex variables."
            )
        apply = finite.all_finite(gradients)
        return move_after(apply, self), apply

    def get_config(self) -> dict[str, Any]:
        """Return a dict of the arguments of the constructor."""
        return {
            "initial_loss_scale": self.initial_loss_scale,
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
        }

    def __repr__(self) -> str:
        now = ""
        if tf.executing_eagerly():
            now = f"current_loss_scale={self().numpy()!s}, num_good_steps={as_number(self.good_steps)}, "
        return (
            f"DynamicLossScale({now}initial_loss_scale={self.initial_loss_scale}, "
            f"increment_period={self.increment_period}, multiplier={self.multiplier})"
        )


class _DividingRules(Rules):
    """Rules that divide the scale by `growth_factor` after an overflow in eager mode.

    In a graph, an overflow multiplies the scale by the reciprocal, because TensorFlow's graph optimizer replaces the
    division in the same way. In the last bit, the scale may therefore differ between graphs and eager mode.
    """

    def _lowered(self, scale: tf.Tensor) -> tf.Tensor:
        multiplier = tf.constant(self.growth_factor, tf.float32)
        lower = scale / multiplier if tf.executing_eagerly() else scale * (1.0 / multiplier)
        return tf.maximum(lower, self.min_scale)


def move_after(finite: tf.Tensor, scale: dynamic.DynamicLossScale) -> tf.Tensor | None:
    """Change a scale by its rules, as the old `update` methods do."""
    # In a TF1 graph, other steps of the same session run may change the scale, so it is read after the check.
    with tf.control_dependencies(operations(finite)):
        moved = dynamic.DynamicLossScale.move(scale, finite)
    return None if tf.executing_eagerly() else finished(moved)


def get(identifier: LossScale | str | float | dict[str, Any] | None) -> LossScale | None:
    """Convert a value of the `loss_scale` argument to a LossScale.

    >>> get("dynamic").increment_period
    2000

    Args:
        identifier: "dynamic", a number, a LossScale, a manager from `tf_lossscale.amp` or
            `tf_lossscale.legacy.contrib`, a config dict with the keys "class_name" and "config", or None.

    Returns:
        A LossScale, or None if `identifier` is None.

    Raises:
        ValueError: `identifier` has an unsupported value.

    Source: `get` in `tensorflow/python/training/experimental/loss_scale.py` of TensorFlow 2.3.
    """
    if identifier is None:
        return None
    if hasattr(identifier, "as_loss_scale"):
        return identifier.as_loss_scale()
    if isinstance(identifier, core.LossScale):
        return identifier
    if isinstance(identifier, numbers.Real):
        return FixedLossScale(float(identifier))
    if isinstance(identifier, str) and identifier == "dynamic":
        return DynamicLossScale()
    if isinstance(identifier, dict) and set(identifier) == {"class_name", "config"}:
        classes = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}
        if identifier["class_name"] in classes:
            return classes[identifier["class_name"]](**identifier["config"])
    raise ValueError(
        f"Could not interpret loss scale identifier: {identifier!r}. Pass 'dynamic', a number, a LossScale, or None."
    )


def get_for_wrapper(loss_scale: Any) -> LossScale:
    """Convert a wrapper's `loss_scale` argument to a LossScale. None is not allowed."""
    scale = get(loss_scale)
    if scale is None:
        raise ValueError("`loss_scale` cannot be None. Pass 'dynamic' or a number, or use the optimizer unwrapped.")
    return scale


@overload
def from_loss_scale(optimizer: Same, loss_scale: None) -> Same: ...


@overload
def from_loss_scale(
    optimizer: Optimizer, loss_scale: LossScale | str | float | dict[str, Any] = "dynamic"
) -> LossScaleOptimizer: ...


def from_loss_scale(optimizer: Any, loss_scale: LossScale | str | float | dict[str, Any] | None = "dynamic") -> Any:
    """Wrap an optimizer, unless `loss_scale` is None. Use this function if `loss_scale` is an option of your program.

    >>> import tensorflow as tf
    >>> wrapped = from_loss_scale(tf.keras.optimizers.SGD(), 128)
    >>> wrapped.dynamic, wrapped.loss_scale.numpy().item()
    (False, 128.0)
    >>> inner = tf.keras.optimizers.SGD()
    >>> from_loss_scale(inner, None) is inner
    True

    Args:
        optimizer: an optimizer that `LossScaleOptimizer` supports.
        loss_scale: "dynamic", a number, a LossScale, a config, or None for no loss scaling.

    Returns:
        A `LossScaleOptimizer`. If `loss_scale` is None, `optimizer` itself.

    Raises:
        ValueError: `loss_scale` has an unsupported value.
    """
    scale = get(loss_scale)
    if scale is None:
        return optimizer
    return LossScaleOptimizer(optimizer, loss_scale=scale)
