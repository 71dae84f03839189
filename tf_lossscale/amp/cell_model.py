"""The Keras model with which Keras's `fit` trains a training cell."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import tensorflow as tf

from tf_lossscale import layers
from tf_lossscale.amp.train_step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from tf_lossscale.core import replicas


def backbone_of(cell: TrainOneStepCell) -> Any:
    """Return the Keras model or layer that a training cell trains. Return None if the cell trains a plain function."""
    candidates = (cell.network, getattr(cell.network, "backbone", None))
    return next((candidate for candidate in candidates if layers.is_layer(candidate)), None)


def cell_model(cell: TrainOneStepCell, step_loss: Any) -> Any:
    """Return a compiled Keras model whose training step is a training cell.

    The model's attribute `network` is the Keras model or layer that the cell trains. Saving the new model saves this
    Keras model, and `load_model` returns it without an optimizer. The logs contain the loss that the cell returns.
    Under a strategy, this is the sum of the replicas' losses, because the step adds the gradients of the replicas.
    """
    backbone = backbone_of(cell)
    keras: Any = tf.keras if backbone is None else layers.layers_of(backbone).library

    def of_the_network(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with replicas.overriding(self.network, optimizer=self.optimizer):
                return getattr(self.network, name)(*args, **kwargs)

        return method

    class CellModel(keras.Model):
        """Trains the cell, and saves its network."""

        def __init__(self) -> None:
            super().__init__(dtype="float32")
            self.network = backbone
            # Keras refuses to back up a model that is not built, but builds the network if necessary.
            self.built = True
            self.mean_loss = keras.metrics.Mean(name="loss")
            self.compile(jit_compile=False)
            self.optimizer = cell.optimizer
            _ = step_loss.value

        def call(self, *args: Any, **kwargs: Any) -> Any:
            return self.network(*args, **kwargs)

        def train_step(self, data: Any) -> dict[str, Any]:
            outputs = cell(*_inputs_of(cell, data))
            loss = tf.reduce_mean(outputs[0] if isinstance(outputs, (tuple, list)) else outputs)
            step_loss.note(loss)
            # The metric computes the mean over the replicas.
            self.mean_loss.update_state(loss * tf.distribute.get_strategy().num_replicas_in_sync)
            return {"loss": self.mean_loss.result()}

        if isinstance(backbone, keras.Model):
            save, save_weights, load_weights = map(of_the_network, ("save", "save_weights", "load_weights"))

    with contextlib.nullcontext() if cell.strategy is None else cell.strategy.scope():
        return CellModel()


def _inputs_of(cell: TrainOneStepCell, batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple of arguments for the cell. Raise an error if the cell takes more or fewer arguments."""
    inputs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    is_own = type(cell).construct in (TrainOneStepCell.construct, TrainOneStepWithLossScaleCell.construct)
    signature = inspect.signature(cell.network if is_own else cell.construct)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        got = f"a dict with the keys {sorted(batch)}" if isinstance(batch, dict) else f"{len(inputs)} parts"
        raise ValueError(
            f"Each batch of `train_dataset` must be a tuple of the cell's inputs, ({', '.join(signature.parameters)}), "
            f"but got {got}. Map the dataset, for example with lambda batch: (batch['data'], batch['label']). For "
            "arrays, pass tf.data.Dataset.from_tensor_slices((data, label)).batch(32)."
        ) from error
    return inputs
