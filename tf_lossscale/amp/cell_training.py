"""The loop in which a training cell of the user's own takes the place of Keras's `fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.amp.train_step import TrainOneStepCell
from tf_lossscale.wrapper import layers


def backbone_of(cell: TrainOneStepCell) -> Any:
    """Return the Keras model that a cell trains, or None if there is none.

    >>> from tf_lossscale.amp import WithLossCell
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> network = WithLossCell(model, tf.keras.losses.MeanSquaredError())
    >>> backbone_of(TrainOneStepCell(network, tf.keras.optimizers.SGD())) is model
    True

    Args:
        cell: a training cell.
    """
    candidates = (cell.network, getattr(cell.network, "backbone", None))
    return next((each for each in candidates if layers.is_layer(each)), None)


def fit(cell: TrainOneStepCell, epochs: int, dataset: Any, callbacks: list[Any], keras: Any, verbose: Any) -> Any:
    """Call a cell with every batch of a dataset, and Keras's callbacks around it.

    >>> from tf_lossscale.amp import WithLossCell
    >>> network = WithLossCell(tf.keras.layers.Dense(1), tf.keras.losses.MeanSquaredError())
    >>> cell = TrainOneStepCell(network, tf.keras.optimizers.SGD(0.1))
    >>> data = tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1))))
    >>> history = fit(cell, 2, data, [], tf.keras, verbose=0)
    >>> len(history.history["loss"])
    2

    Args:
        cell: returns the loss, or a tuple or list that begins with it.
        epochs: number of passes over the data.
        dataset: an iterable of batches, each a tuple of what the cell takes.
        callbacks: of `keras`. A batch's logs hold the loss of the step, an epoch's the mean of its steps.
        keras: the module `keras` or `tf_keras`.
        verbose: as in Keras's `fit`.

    Returns:
        Keras's `History`.
    """
    model = backbone_of(cell) or keras.Sequential()
    every = keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=verbose != 0, model=model, verbose=int(verbose != 0), epochs=epochs
    )
    model.stop_training = False  # which callbacks set
    every.on_train_begin()
    logs: dict[str, Any] = {}
    for epoch in range(epochs):
        every.on_epoch_begin(epoch)
        losses = []
        for step, batch in enumerate(dataset):
            every.on_train_batch_begin(step)
            outputs = cell(*batch) if isinstance(batch, (tuple, list)) else cell(batch)
            loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            losses.append(float(tf.reduce_mean(loss)))
            every.on_train_batch_end(step, {"loss": losses[-1]})
        logs = {"loss": float(np.mean(losses))}
        every.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    every.on_train_end(logs)
    return model.history
