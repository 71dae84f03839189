"""Model: a network, its loss and its optimizer, trained with mixed precision by one call."""

from __future__ import annotations

from typing import Any

from tf_lossscale.amp import levels
from tf_lossscale.amp.managers import DynamicLossScaleManager
from tf_lossscale.amp.monitors import LossMonitor
from tf_lossscale.wrapper import families
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

# Levels that come with a dynamic loss scale unless a manager is given.
_DYNAMIC = ("O2", "auto")


class Model:
    """A network with its loss and optimizer, over Keras's `compile` and `fit`.

    >>> import tensorflow as tf
    >>> network = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> model = Model(network, "mse", tf.keras.optimizers.SGD(0.1), amp_level="O2")
    >>> data = tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1))))
    >>> history = model.train(1, data, verbose=0)
    >>> len(history.history["loss"])
    1

    Args:
        network: a Keras model (Keras 3 or tf_keras).
        loss_fn: what `compile(loss=...)` takes; None for a network that is only used to predict.
        optimizer: what `compile(optimizer=...)` takes, as an object; it is wrapped if there is a loss scale.
        metrics: what `compile(metrics=...)` takes.
        amp_level: "O0", "O1", "O2", "O3" or "auto", see `auto_mixed_precision`.
        loss_scale_manager: a manager of this package. If None, levels O2 and auto get a
            `DynamicLossScaleManager`, the others none.

    Raises:
        TypeError: the network is no Keras model, or the manager is none of ours.
        ValueError: the level is unknown, or the optimizer is wrapped already and a manager was given.

    Source: MindSpore, `mindspore.train.Model`.
    """

    def __init__(
        self,
        network: Any,
        loss_fn: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        amp_level: str = "O0",
        loss_scale_manager: Any = None,
    ):
        levels.require_level(network, amp_level)
        if isinstance(optimizer, LossScaleOptimizer) and loss_scale_manager is not None:
            raise ValueError(
                "`optimizer` is a LossScaleOptimizer already: leave out `loss_scale_manager`, or pass the inner "
                "optimizer."
            )
        if loss_scale_manager is None and amp_level in _DYNAMIC:
            loss_scale_manager = DynamicLossScaleManager()
        wrap = optimizer is not None and loss_scale_manager is not None
        if wrap and not isinstance(optimizer, LossScaleOptimizer):
            optimizer = LossScaleOptimizer(optimizer, loss_scale_manager=loss_scale_manager)
        # Past this line the network changes: a call with bad arguments has not happened.
        self.network = levels.auto_mixed_precision(network, amp_level)
        self.amp_level = amp_level
        self.optimizer = optimizer
        if optimizer is not None or loss_fn is not None:
            compiled = {} if optimizer is None else {"optimizer": optimizer}
            network.compile(loss=loss_fn, metrics=metrics, **compiled)

    def train(self, epoch: int, train_dataset: Any, callbacks: Any = None, verbose: Any = "auto") -> Any:
        """Trains the network; Keras shows its progress bar.

        Args:
            epoch: whole number of passes over the data.
            train_dataset: what `fit(x=...)` takes, with the labels in it, for example a batched `tf.data.Dataset`.
            callbacks: monitors of this package or Keras callbacks; one, or a list.
            verbose: as in `fit`.

        Returns:
            Keras's `History`.

        Raises:
            ValueError: there is no optimizer or no loss, or `epoch` is not a whole number above 0.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
            raise ValueError(f"`epoch` must be an int above 0, but got: {epoch!r}.")
        if self.optimizer is None:
            raise ValueError("train() needs an optimizer: pass `optimizer` to Model(...).")
        keras = families.library_of(self.network)
        return self.network.fit(
            train_dataset, epochs=epoch, verbose=verbose, callbacks=[_as_callback(c, keras) for c in _list(callbacks)]
        )

    def eval(self, valid_dataset: Any, callbacks: Any = None, verbose: Any = 0) -> dict[str, float]:
        """Evaluates the network.

        Args:
            valid_dataset: what `evaluate(x=...)` takes, with the labels in it.
            callbacks: Keras callbacks; one, or a list.
            verbose: as in `evaluate`.

        Returns:
            The loss and the metrics by name.
        """
        keras = families.library_of(self.network)
        return self.network.evaluate(
            valid_dataset,
            verbose=verbose,
            return_dict=True,
            callbacks=[_as_callback(c, keras) for c in _list(callbacks)],
        )

    def predict(self, *predict_data: Any) -> Any:
        """Returns the network's outputs.

        Args:
            *predict_data: the network's inputs, one batch.

        Returns:
            A tensor, or what the network returns.
        """
        inputs = predict_data[0] if len(predict_data) == 1 else predict_data
        return self.network(inputs, training=False)


def _list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _as_callback(callback: Any, keras: Any) -> Any:
    return callback.as_callback(keras) if isinstance(callback, LossMonitor) else callback
