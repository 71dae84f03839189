"""The base class of loss scale managers. It adapts a user-defined rule to `LossScaleOptimizer`."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale.core.loss_scale import LossScale

_METHODS = ("get_loss_scale", "update_loss_scale", "get_update_cell", "get_drop_overflow_update")


class LossScaleManager(abc.ABC):
    """The base class of loss scale managers. To write your own rule, subclass it or one of the package's managers.

    >>> class Quartering(LossScaleManager):
    ...     scale = 64.0
    ...     def get_loss_scale(self):
    ...         return self.scale
    ...     def update_loss_scale(self, overflow):
    ...         self.scale = self.scale / 4 if overflow else self.scale
    >>> from tf_lossscale import LossScaleOptimizer
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=Quartering())
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: weight * float("inf"), [weight])
    >>> weight.numpy().item(), optimizer.loss_scale.numpy().item()
    (1.0, 16.0)

    Checkpoints contain the scale, but no other state of the manager. After a checkpoint was restored, the next step
    sets the manager's attribute `loss_scale`, if it has one, and logs a warning if `get_loss_scale` still returns a
    different scale.

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
        """Return None, or a function that updates the scale in a graph.

        The function takes the scale variable and an overflow flag. Without a function, the graph calls the Python
        method `update_loss_scale`, which XLA cannot compile.
        """
        return None

    def as_loss_scale(self) -> LossScale:
        """Return a `LossScale` object for `LossScaleOptimizer`."""
        return _ManagedScale(self)

    def _is_all_of(self, cls: type) -> bool:
        """Return whether the manager's class is `cls` or a subclass of it that overrides no method in `_METHODS`."""
        return all(getattr(type(self), name) is getattr(cls, name) for name in _METHODS)


class _ManagedScale(LossScale):
    def __init__(self, manager: LossScaleManager):
        super().__init__()
        self._manager = manager
        self.initial_scale = float(manager.get_loss_scale())
        # The scale that the manager returned last. If the variable has a different value, a checkpoint was restored.
        self._moved_to = np.float32(self.initial_scale)
        self._skips = bool(manager.get_drop_overflow_update())
        self._cell = manager.get_update_cell() if _cell_is_newest(type(manager)) else None
        self.prepare()

    @property
    def may_skip(self) -> bool:
        return self._skips

    def prepare(self) -> None:
        super().prepare()
        self._scale()

    def _scale(self) -> tf.Variable:
        return self._weight("current_loss_scale", self.initial_scale, tf.float32)

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._scale())

    def move(self, applied: tf.Tensor) -> list[Any]:
        overflow = tf.logical_not(applied)
        if self._cell is None:
            moved: Any = self._scale().assign(tf.numpy_function(self._move, [self(), overflow], tf.float32))
        else:
            moved = self._cell(self._scale(), overflow)
        return [moved]

    def _move(self, scale: Any, overflow: Any) -> Any:
        if scale != self._moved_to:
            self._give_to_manager(float(scale))
        self._manager.update_loss_scale(bool(overflow))
        self._moved_to = np.float32(self._manager.get_loss_scale())
        return self._moved_to

    def _give_to_manager(self, scale: float) -> None:
        """Give the manager a scale that does not come from it, for example from a checkpoint."""
        manager = self._manager
        if hasattr(manager, "loss_scale"):
            manager.loss_scale = scale
        if np.float32(manager.get_loss_scale()) != scale:
            logging.warning(
                "The loss scale was restored or set to %s, but the %s still returns %s, and its rule continues from "
                "there. Restore the state of the manager too, or store the scale in its attribute `loss_scale`, which "
                "is set for you.",
                scale,
                type(manager).__name__,
                manager.get_loss_scale(),
            )


def _cell_is_newest(cls: type) -> bool:
    """Return False if a class overrides `get_loss_scale` or `update_loss_scale`, but inherits `get_update_cell`."""

    def age(name: str) -> int:
        return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

    return age("get_update_cell") <= min(age("update_loss_scale"), age("get_loss_scale"))
