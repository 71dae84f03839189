"""MindSpore's training cells: objects that take one training step when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_lossscale.amp import levels
from tf_lossscale.amp.managers import FixedLossScaleManager, LossScaleManager
from tf_lossscale.core import finite, graphs, replicas
from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.libraries.models import tensors_of
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Optimizer, Variable


class TrainOneStepCell:
    """One training step with a fixed scale: the loss is multiplied by `sens`, and the gradients are divided by it.

    The step runs as a tf.function, except in `strategy.run` and inside another tf.function. The cell therefore trains
    the weights that are trainable when it is called first. After you freeze or unfreeze a layer, create a new cell with
    the same optimizer. `Model(cell).train` trains the cell with Keras's `fit`.

    To write your own step, derive from this class and override `construct`:

    >>> from tf_lossscale.amp import WithLossCell
    >>> class Clipped(TrainOneStepCell):
    ...     def construct(self, *inputs):
    ...         loss, gradients = self.loss_and_gradients(*inputs)
    ...         gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    ...         self.update(gradients)
    ...         return loss
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> network = WithLossCell(model, tf.keras.losses.MeanSquaredError())
    >>> step = Clipped(network, tf.keras.optimizers.SGD(0.1), sens=1024.0)
    >>> step(tf.ones((2, 3)), tf.ones((2, 1))).dtype.name
    'float32'

    Args:
        network: a callable that returns the loss for the inputs and has a `trainable_variables` attribute, such as a
            `WithLossCell`.
        optimizer: an optimizer that `LossScaleOptimizer` can wrap, or a `LossScaleOptimizer`.
        sens: the scale, a finite number that is at least 1. The default is 1.

    Raises:
        TypeError: `sens` is not a number.
        ValueError: `sens` is out of range, or is given together with a `LossScaleOptimizer`, which has a scale.

    Source: MindSpore, `mindspore.nn.TrainOneStepCell`.
    """

    _scale_argument = "sens"

    def __init__(self, network: Any, optimizer: Optimizer, sens: float | None = None):
        self.network = network
        if not isinstance(optimizer, LossScaleOptimizer):
            optimizer = LossScaleOptimizer(optimizer, loss_scale=self._manager(sens))
        elif sens is not None:
            raise ValueError(
                f"`{self._scale_argument}` was given as {sens!r}, but `optimizer` is a LossScaleOptimizer, which has a "
                "loss scale. Leave it out, or pass the inner optimizer."
            )
        self.optimizer = optimizer
        #: The strategy in whose scope the cell was created, if any.
        self.strategy: Any = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        self._function = tf.function(self._construct)

    def _manager(self, sens: Any) -> Any:
        return FixedLossScaleManager(1.0 if sens is None else _number(sens), drop_overflow_update=False)

    @property
    def weights(self) -> list[Variable]:
        """The variables that the step trains."""
        return self.network.trainable_variables

    @property
    def sens(self) -> tf.Tensor:
        """The current loss scale, as a float32 scalar tensor."""
        return self.optimizer.loss_scale

    def set_train(self, mode: bool = True) -> TrainOneStepCell:
        """Choose whether the network is called in training mode; see `WithLossCell.set_train`.

        Args:
            mode: True for training, False for inference.

        Returns:
            The cell itself.

        Raises:
            AttributeError: the network has no `set_train`.
        """
        self.network.set_train(mode)
        return self

    def loss_and_gradients(self, *inputs: Any) -> tuple[tf.Tensor, list[Gradient]]:
        """Return the loss of a batch and its unscaled gradients.

        Args:
            *inputs: the network's inputs.

        Returns:
            The loss, and a list of gradients, one for each of `weights`.
        """
        with tf.GradientTape() as tape:
            loss = self.network(*inputs)
        grads_and_vars = self.optimizer.compute_gradients(loss, self.weights, tape=tape)
        return loss, [gradient for gradient, _ in grads_and_vars]

    def grad(self, network: Callable[..., Any], weights: list[Variable]) -> Callable[..., list[Gradient]]:
        """Return a function of the inputs and `sens` that returns scaled gradients, as in MindSpore's cells.

        >>> from tf_lossscale.amp import WithLossCell
        >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
        >>> network = WithLossCell(model, tf.keras.losses.MeanSquaredError())
        >>> step = TrainOneStepCell(network, tf.keras.optimizers.SGD(0.1), sens=8.0)
        >>> loss = network(tf.ones((1, 1)), tf.zeros((1, 1)))
        >>> gradients = step.grad(step.network, step.weights)(tf.ones((1, 1)), tf.zeros((1, 1)), step.sens)
        >>> [gradient.numpy().item() for gradient in gradients]
        [16.0, 16.0]

        Divide the gradients by `sens` before you pass them to `update`, which takes unscaled gradients.

        Args:
            network: a function of the inputs that returns the loss.
            weights: the variables to differentiate with respect to.

        Returns:
            A function. Its last argument is `sens`, a number or a tensor that can be broadcast to the shape of the
            loss.
        """

        def gradients(*inputs_and_sens: Any) -> list[Any]:
            *inputs, sens = inputs_and_sens
            with tf.GradientTape() as tape:
                loss = network(*inputs)
            self.optimizer._contract.unscaled_inside()
            return tape.gradient(loss, tensors_of(weights), tf.ones_like(loss) * tf.cast(sens, loss.dtype))

        return gradients

    def update(self, gradients: list[Gradient]) -> Any:
        """Apply unscaled gradients. Whether a step that overflows is skipped depends on the optimizer's loss scale.

        Args:
            gradients: one gradient for each of `weights`.
        """
        self.optimizer.apply_gradients(zip(gradients, self.weights))

    def construct(self, *inputs: Any) -> Any:
        """Take one step. Override this method to write your own step.

        Args:
            *inputs: the network's inputs.

        Returns:
            The loss.
        """
        loss, gradients = self.loss_and_gradients(*inputs)
        self.update(gradients)
        return loss

    def _construct(self, key: Any, *inputs: Any) -> Any:
        # A different key, which the step does not read, makes tf.function trace the step again.
        del key
        return self.construct(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        """Take one step; see `construct`.

        Raises:
            ValueError: the cell was created in the scope of a strategy with several replicas, but is called outside
                `strategy.run`; or `strategy.run` calls it in a TF1 graph, outside a tf.function.
        """
        if tf.distribute.has_strategy():
            replicas.require_replica_context(type(self).__name__)
            if not graphs.runs_in_order():
                # A session would run only the operations that the returned loss depends on, and never the update.
                raise ValueError("In a TF1 graph, a training cell needs strategy.run() to be inside a tf.function.")
        elif self.strategy is not None and self.strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"This {type(self).__name__} was created in the scope of a {type(self.strategy).__name__} with "
                f"{self.strategy.num_replicas_in_sync} replicas. Call strategy.run(cell, args=(data, label))."
            )
        # In a TF1 graph, every fetched result of a tf.function runs the whole step, including the update.
        runs_alone = tf.executing_eagerly() or not graphs.runs_in_order()
        if runs_alone and not tf.distribute.has_strategy():
            return self._function((getattr(self.network, "training", None), levels.changes()), *inputs)
        return self.construct(*inputs)


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """One training step. By default, it is skipped if it overflows. Calling the cell returns (loss, overflow, scale).

    >>> from tf_lossscale.amp import DynamicLossScaleManager, WithLossCell
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> network = WithLossCell(model, tf.keras.losses.MeanSquaredError())
    >>> manager = DynamicLossScaleManager(64)
    >>> step = TrainOneStepWithLossScaleCell(network, tf.keras.optimizers.SGD(0.1), manager)
    >>> _, overflow, scale = step(tf.ones((2, 3)), tf.ones((2, 1)))
    >>> bool(overflow), float(scale)
    (False, 64.0)

    Args:
        network: as in `TrainOneStepCell`.
        optimizer: as in `TrainOneStepCell`.
        scale_sense: a loss scale manager, an update cell, or the value of a fixed scale. The value can be a number or a
            tensor with one element. Leave the argument out if `optimizer` is a `LossScaleOptimizer`.

    Raises:
        TypeError: `scale_sense` is missing or has an unsupported type.
        ValueError: `scale_sense` is out of range, or is given together with a `LossScaleOptimizer`.

    Source: MindSpore, `mindspore.nn.TrainOneStepWithLossScaleCell`.
    """

    _scale_argument = "scale_sense"

    def __init__(self, network: Any, optimizer: Optimizer, scale_sense: Any = None):
        super().__init__(network, optimizer, scale_sense)

    def _manager(self, sens: Any) -> Any:
        if sens is None:
            raise TypeError("`scale_sense` is missing: pass a loss scale manager, an update cell or a number.")
        if isinstance(sens, LossScale):
            return sens
        is_cell = callable(getattr(sens, "get_loss_scale", None))
        return _CellManager(sens) if is_cell else FixedLossScaleManager(_number(sens))

    @property
    def scale_sense(self) -> tf.Tensor:
        """The current loss scale; an alias of `sens`."""
        return self.sens

    def update(self, gradients: list[Gradient]) -> Any:
        """Apply unscaled gradients. Whether a step that overflows is skipped depends on the optimizer's loss scale.

        Args:
            gradients: one gradient for each of `weights`.

        Returns:
            Whether the step overflowed on any replica, as a bool scalar tensor.
        """
        super().update(gradients)
        scale = self.optimizer.scaler
        if scale.may_skip:
            return tf.convert_to_tensor(self.optimizer.last_step_skipped)
        overflow = tf.cast(tf.logical_not(finite.all_finite(gradients)), tf.float32)
        return replicas.sum_over_replicas([overflow])[0] > 0

    def construct(self, *inputs: Any) -> Any:
        """Take one step. Override this method to write your own step.

        Args:
            *inputs: the network's inputs.

        Returns:
            The loss of this replica, whether the step overflowed on any replica (bool scalar), and the scale that the
            loss was multiplied by (float32 scalar).
        """
        scale = self.sens
        loss, gradients = self.loss_and_gradients(*inputs)
        return loss, self.update(gradients), scale


TrainOneStep = TrainOneStepCell
"""Short name of `TrainOneStepCell`."""
TrainOneStepWithLossScale = TrainOneStepWithLossScaleCell
"""Short name of `TrainOneStepWithLossScaleCell`."""


class _CellManager(LossScaleManager):
    """A manager whose rule is an update cell."""

    _own_rule = "get_update_cell"

    def __init__(self, cell: Any):
        super().__init__()
        self._given_cell = cell

    def get_loss_scale(self) -> Any:
        return self._given_cell.get_loss_scale()

    def update_loss_scale(self, overflow: Any) -> None:
        self.move(tf.logical_not(overflow))

    def get_update_cell(self) -> Any:
        return self._given_cell


def _number(sens: Any) -> Any:
    """Return a tensor or array of one element as a number, and any other value unchanged."""
    return np.asarray(sens).item() if hasattr(sens, "shape") and np.size(sens) == 1 else sens
