"""A training step by hand: one call takes the gradients, scales and applies them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale.amp.managers import FixedLossScaleManager
from tf_lossscale.core import finite
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer


class WithLoss:
    """A network and its loss as one function of the data and the label.

    >>> WithLoss(lambda x: 2 * x, lambda y, label: y - label)(3, 1)
    5

    Args:
        backbone: a Keras model or any function.
        loss_fn: takes (output, label), returns the loss.

    Source: MindSpore, `mindspore.nn.WithLossCell`.
    """

    def __init__(self, backbone: Any, loss_fn: Any):
        self.backbone = backbone
        self.loss_fn = loss_fn

    def __call__(self, data: Any, label: Any) -> Any:
        """Returns the loss of one batch."""
        return self.loss_fn(self.backbone(data), label)

    @property
    def trainable_variables(self) -> list[Any]:
        """The backbone's variables."""
        return self.backbone.trainable_variables


class TrainOneStep:
    """One training step with a fixed `sens`: the loss is multiplied by it, the gradients are divided by it.

    The step runs as a tf.function. For a step of your own derive a class and give it another `construct`:

    >>> class Clipped(TrainOneStep):
    ...     def construct(self, *inputs):
    ...         loss, gradients = self.loss_and_gradients(*inputs)
    ...         gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    ...         self.update(gradients)
    ...         return loss
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> network = WithLoss(model, lambda output, label: tf.reduce_mean((output - label) ** 2))
    >>> step = Clipped(network, tf.keras.optimizers.SGD(0.1), sens=1024.0)
    >>> step(tf.ones((2, 3)), tf.ones((2, 1))).dtype.name
    'float32'

    Args:
        network: a function of the inputs that returns the loss, with `trainable_variables`, see `WithLoss`.
        optimizer: an optimizer of a family that `LossScaleOptimizer` knows, or a `LossScaleOptimizer`.
        sens: the scale, a finite number of at least 1.

    Source: MindSpore, `mindspore.nn.TrainOneStepCell`.
    """

    def __init__(self, network: Any, optimizer: Any, sens: float = 1.0):
        self.network = network
        if not isinstance(optimizer, LossScaleOptimizer):
            optimizer = LossScaleOptimizer(optimizer, loss_scale_manager=self._manager(sens))
        self.optimizer = optimizer
        self._function = tf.function(self.construct)

    def _manager(self, sens: Any) -> Any:
        return FixedLossScaleManager(sens, drop_overflow_update=False)

    @property
    def weights(self) -> list[Any]:
        """The variables that the step trains."""
        return self.network.trainable_variables

    def loss_and_gradients(self, *inputs: Any) -> tuple[Any, list[Any]]:
        """Returns the loss of a batch, and its gradients, unscaled.

        Args:
            *inputs: what the network takes.

        Returns:
            The loss, and a list of gradients, one for each of `weights`.
        """
        with tf.GradientTape() as tape:
            loss = self.network(*inputs)
        grads_and_vars = self.optimizer.compute_gradients(loss, self.weights, tape=tape)
        return loss, [gradient for gradient, _ in grads_and_vars]

    def update(self, gradients: list[Any]) -> None:
        """Applies unscaled gradients, or skips the step if the loss scale says so.

        Args:
            gradients: one for each of `weights`.
        """
        self.optimizer.apply_gradients(zip(gradients, self.weights))

    def construct(self, *inputs: Any) -> Any:
        """Takes one step; override it for a step of your own.

        Args:
            *inputs: what the network takes.

        Returns:
            The loss.
        """
        loss, gradients = self.loss_and_gradients(*inputs)
        self.update(gradients)
        return loss

    def __call__(self, *inputs: Any) -> Any:
        """Takes one step as a tf.function; see `construct`."""
        return self._function(*inputs)


class TrainOneStepWithLossScale(TrainOneStep):
    """One training step with a loss scale that may move; returns (loss, overflow, scale).

    >>> from tf_lossscale.amp import DynamicLossScaleManager
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> network = WithLoss(model, lambda output, label: tf.reduce_mean((output - label) ** 2))
    >>> step = TrainOneStepWithLossScale(network, tf.keras.optimizers.SGD(0.1), DynamicLossScaleManager(64))
    >>> _, overflow, scale = step(tf.ones((2, 3)), tf.ones((2, 1)))
    >>> bool(overflow), float(scale)
    (False, 64.0)

    Args:
        network: as in `TrainOneStep`.
        optimizer: as in `TrainOneStep`.
        scale_sense: a manager of this package, or a number for a fixed scale whose overflowing steps are skipped.

    Source: MindSpore, `mindspore.nn.TrainOneStepWithLossScaleCell`.
    """

    def __init__(self, network: Any, optimizer: Any, scale_sense: Any):
        super().__init__(network, optimizer, scale_sense)

    def _manager(self, sens: Any) -> Any:
        return sens if hasattr(sens, "as_loss_scale") else FixedLossScaleManager(sens)

    def construct(self, *inputs: Any) -> Any:
        """Takes one step; override it for a step of your own.

        Args:
            *inputs: what the network takes.

        Returns:
            The loss, whether the step overflowed (bool scalar), and the scale it was taken with (float32 scalar).
        """
        scale = self.optimizer.loss_scale
        loss, gradients = self.loss_and_gradients(*inputs)
        self.update(gradients)
        return loss, tf.logical_not(finite.all_finite(gradients)), scale
