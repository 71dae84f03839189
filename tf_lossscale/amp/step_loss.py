"""The loss of a Keras model's most recent step, computed in float32 and stored for monitors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_lossscale.amp import casting


class StepLoss:
    """The loss of a model's most recent step, computed in float32.

    Creating a `StepLoss` replaces the model's `compute_loss` with a function that also stores the loss, because Keras's
    logs contain only the mean loss of the epoch so far. The function casts the outputs to float32; tf_keras alone would
    compute the loss in the dtype of the outputs.

    >>> model = tf.keras.Sequential([tf.keras.layers.Flatten()])
    >>> model.compile("sgd", "mse")
    >>> loss = StepLoss(model)
    >>> x, y = tf.constant([[1.0], [3.0]]), tf.zeros((2, 1))
    >>> _ = model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    >>> loss.read({"loss": 5.0})
    9.0

    Args:
        model: a compiled Keras model.
    """

    def __init__(self, model: Any):
        compute_loss = getattr(model.compute_loss, "_tf_lossscale_original", model.compute_loss)
        with model.distribute_strategy.scope():
            # The replicas' losses add up to the loss of the batch.
            self._value = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self._model = model
        self._is_used = False

        @functools.wraps(compute_loss)
        def kept(x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._is_used = True
            loss = compute_loss(x, y, casting.in_float32(y_pred), *args, **kwargs)
            self._value.assign(tf.cast(loss, tf.float32))
            return loss

        kept._tf_lossscale_original = compute_loss  # type: ignore[attr-defined]
        self._kept = model.compute_loss = kept

    def is_stored(self) -> bool:
        """Return whether the model still stores the loss here. A newer `StepLoss` of the model replaces this one."""
        return self._model.compute_loss is self._kept

    def read(self, logs: Mapping[str, Any]) -> float:
        """Return the loss of the most recent step. If `train_step` does not call `compute_loss`, return `logs["loss"]`.

        Args:
            logs: the logs that Keras passes to callbacks.
        """
        return float(tf.convert_to_tensor(self._value) if self._is_used else logs["loss"])
