"""The training loop for training cells. Keras models use Keras's `fit` instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale import layers
from tf_lossscale.amp.train_step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from tf_lossscale.core import replicas


def backbone_of(cell: TrainOneStepCell) -> Any:
    """Return the Keras model or layer that a training cell trains. Return None if the cell trains a plain function.

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
    """Train a cell on a dataset, and call Keras callbacks as Keras's `fit` does.

    >>> from tf_lossscale.amp import WithLossCell
    >>> network = WithLossCell(tf.keras.layers.Dense(1), tf.keras.losses.MeanSquaredError())
    >>> cell = TrainOneStepCell(network, tf.keras.optimizers.SGD(0.1))
    >>> data = tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1))))
    >>> history = fit(cell, 2, data, [], tf.keras, verbose=0)
    >>> len(history.history["loss"])
    2

    Args:
        cell: a training cell. It returns the loss, or a tuple or list whose first element is the loss. If the cell was
            created in the scope of a strategy, each replica calls it with a part of the batch.
        epochs: the number of passes over the data.
        dataset: an iterable of batches, each a tuple of the cell's inputs.
        callbacks: callbacks from the library that is passed as `keras`. Their `model` attribute is the Keras model that
            the cell trains, or a new `Sequential` model if the cell trains a single layer or a function. The
            `optimizer` of this model is the cell's optimizer. The logs of a batch contain the loss of the step, and the
            logs of an epoch contain the mean loss of its steps. Under a strategy, the loss of a step is the mean of the
            replicas' losses, or their sum if Keras 3 has already divided each replica's loss by the number of replicas.
        keras: the `keras` or `tf_keras` module.
        verbose: as in Keras's `fit`.

    Returns:
        Keras's `History`.

    Raises:
        ValueError: a callback or the dataset cannot be used with a training cell.
    """
    _require_fitting_callbacks(callbacks, keras)
    layers_of_keras = layers.layers_in(keras.__name__.split(".")[0])
    step = _step_of(cell, layers_of_keras)
    batches, steps = _batches(dataset, cell.strategy)
    model = _model_of(cell, keras)
    with replicas.overriding(model, optimizer=cell.optimizer):
        every = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=1 if verbose == "auto" else int(verbose),
            epochs=epochs,
            steps=steps,
        )
        # Callbacks set this attribute to True to end the training.
        model.stop_training = False
        every.on_train_begin()
        logs: dict[str, Any] = {}
        for epoch in range(epochs):
            every.on_epoch_begin(epoch)
            losses = []
            for index, batch in enumerate(batches()):
                every.on_train_batch_begin(index)
                losses.append(float(step(*_inputs_of(cell, batch))))
                every.on_train_batch_end(index, {"loss": losses[-1]})
                if model.stop_training:
                    break
            if not losses:
                raise ValueError(
                    f"`train_dataset` has no batch in epoch {epoch + 1} of {epochs}. Pass a tf.data.Dataset with at "
                    "least one batch, or a list of batches, which every epoch reads from the start."
                )
            layers_of_keras.note_steps(model, len(losses))
            logs = {"loss": float(np.mean(losses))}
            every.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        every.on_train_end(logs)
    return model.history


def _require_fitting_callbacks(callbacks: list[Any], keras: Any) -> None:
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise ValueError(
            "`callbacks` must not contain BackupAndRestore if `network` is a training cell, because only Keras's `fit` "
            "can resume from a later epoch. Save the model and the optimizer with tf.train.Checkpoint, or pass a Keras "
            "model as `network`."
        )


def _model_of(cell: TrainOneStepCell, keras: Any) -> Any:
    backbone = backbone_of(cell)
    if isinstance(backbone, keras.Model):
        return backbone
    return keras.Sequential([] if backbone is None else [backbone])


def _step_of(cell: TrainOneStepCell, layers_of_keras: Any) -> Callable[..., Any]:
    """Return a function that takes one training step on all replicas and returns the loss."""

    def in_replica(*inputs: Any) -> Any:
        outputs = cell(*inputs)
        return tf.reduce_mean(outputs[0] if isinstance(outputs, (tuple, list)) else outputs)

    strategy = cell.strategy
    if strategy is None:
        return in_replica

    def on_all(training: Any, *inputs: Any) -> Any:
        # This function does not read `training`, because the network stores whether it is in training mode. The
        # argument makes tf.function trace training and inference separately.
        del training
        with layers_of_keras.noting_divided_losses() as divided:
            losses = strategy.run(in_replica, inputs)
        # `divided` is filled only while the loss function is being traced. If the loss function is itself a
        # tf.function, it is not traced again when `on_all` is traced again. Therefore, `divides_loss` is never set back
        # to False.
        cell.divides_loss |= bool(divided)
        operation = tf.distribute.ReduceOp.SUM if cell.divides_loss else tf.distribute.ReduceOp.MEAN
        return strategy.reduce(operation, losses, axis=None)

    function = tf.function(on_all)
    return lambda *inputs: function(getattr(cell.network, "training", None), *inputs)


def _batches(dataset: Any, strategy: Any) -> tuple[Callable[[], Iterable[Any]], int | None]:
    """Return a function and a number. The function returns the batches of one epoch.

    The number is the number of batches in an epoch, or None if it is unknown.
    """
    if isinstance(dataset, tf.data.Dataset):
        steps = int(dataset.cardinality())
        if steps == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "`train_dataset` repeats forever, so the first epoch would never end. Leave out .repeat(), or "
                "limit the dataset with .take(steps)."
            )
        read = dataset if strategy is None else strategy.experimental_distribute_dataset(dataset)
        return lambda: read, steps if steps >= 0 else None
    if strategy is not None:
        raise ValueError(
            f"The training cell was created in the scope of a {type(strategy).__name__}, so `train_dataset` must be a "
            f"tf.data.Dataset, whose batches are split among the replicas, but got: {type(dataset).__name__}."
        )
    if isinstance(dataset, (tuple, dict)) or tf.is_tensor(dataset) or isinstance(dataset, np.ndarray):
        raise ValueError(
            f"`train_dataset` must yield batches, but got a {type(dataset).__name__}. For arrays, pass "
            "tf.data.Dataset.from_tensor_slices((data, label)).batch(32)."
        )
    # Lists and Keras's `Sequence` and `PyDataset` objects have a length and can be indexed.
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return lambda: _items(dataset), len(dataset)
    return lambda: dataset, None


def _items(sequence: Any) -> Iterator[Any]:
    for index in range(len(sequence)):
        yield sequence[index]
    getattr(sequence, "on_epoch_end", lambda: None)()


def _inputs_of(cell: TrainOneStepCell, batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple of arguments for the cell. Raise an error if the cell takes more or fewer arguments."""
    inputs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    is_own = type(cell).construct in (TrainOneStepCell.construct, TrainOneStepWithLossScaleCell.construct)
    takes: Any = cell.network if is_own else cell.construct
    try:
        inspect.signature(takes).bind(*inputs)
    except TypeError as error:
        names = ", ".join(inspect.signature(takes).parameters)
        got = f"a dict with the keys {sorted(batch)}" if isinstance(batch, dict) else f"{len(inputs)} parts"
        raise ValueError(
            f"Each batch of `train_dataset` must be a tuple of the training cell's inputs, ({names}), but got {got}. "
            "Map the dataset, for example with train_dataset.map(lambda batch: (batch['data'], batch['label'])), or "
            "train a network that takes such batches."
        ) from error
    except ValueError:
        # Some functions written in C have no signature, so their arguments cannot be checked.
        pass
    return inputs
