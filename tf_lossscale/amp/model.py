"""The `Model` class, which trains a network with mixed precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_lossscale import layers
from tf_lossscale.amp import casting, levels
from tf_lossscale.amp.cell_model import backbone_of, cell_model
from tf_lossscale.amp.managers import DynamicLossScaleManager
from tf_lossscale.amp.monitors import LossMonitor, StepLoss
from tf_lossscale.amp.train_step import TrainOneStepCell
from tf_lossscale.core import replicas
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer
from tf_lossscale.wrapper.registry import scales_losses

# Keras resolves each of these names to a binary, categorical or sparse metric, depending on the shapes of the data.
_OF_THE_SHAPES = ("accuracy", "acc", "crossentropy", "ce")

# Levels that use a dynamic loss scale unless `loss_scale_manager` is passed.
_DYNAMIC = ("O2", "auto")

# The default value of `loss_scale_manager`. It is not None, because None means no loss scale.
_OF_THE_LEVEL = "of the level"

# `train` sets this attribute of a network during the training.
_TRAINED = "_tf_lossscale_trained"


class Model:
    """A network, its loss and its optimizer, with methods for training, evaluation and prediction.

    The loss is computed in float32. Several `Model` objects may share a network. `train` and `eval` compile the network
    again if another `Model` has compiled it since.

    >>> import tensorflow as tf
    >>> network = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> model = Model(network, "mse", tf.keras.optimizers.SGD(0.1), amp_level="O2")
    >>> data = tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1))))
    >>> history = model.train(1, data, verbose=0)
    >>> len(history.history["loss"])
    1

    A training cell already contains a loss and an optimizer, so pass it alone:

    >>> from tf_lossscale.amp import TrainOneStepCell, WithLossCell
    >>> network = WithLossCell(network, tf.keras.losses.MeanSquaredError())
    >>> cell = TrainOneStepCell(network, tf.keras.optimizers.SGD(0.1))
    >>> history = Model(cell).train(2, data, verbose=0)
    >>> len(history.history["loss"])
    2

    Args:
        network: a Keras model (Keras 3 or tf_keras), or a `TrainOneStepCell` or `TrainOneStepWithLossScaleCell`.
        loss_fn: a loss as in `compile(loss=...)`, or None for a network that is only used for prediction.
        optimizer: an optimizer object or name, as in `compile(optimizer=...)`. If a loss scale is used, the optimizer
            is wrapped in a `LossScaleOptimizer`.
        metrics: metrics as in `compile(metrics=...)`; a set of metrics; or a dict {name: metric}, whose keys are the
            names of the metrics in the result of `eval`. The logs contain the same names, except that Keras chooses its
            own names for "accuracy" and "crossentropy". "loss" in a set has no effect, because `eval` always returns
            the loss.
        amp_level: "O0", "O1", "O2", "O3" or "auto"; see `auto_mixed_precision`. O0 leaves the layers as they are.
        loss_scale_manager: a manager from this package, or None for no loss scale. By default, levels O2 and auto use a
            `DynamicLossScaleManager`, and the other levels use no loss scale.
        keep_batchnorm_fp32: whether normalization layers compute in float32 at levels O2 and O3. The default is True
            at O2 and False at O3.

    Raises:
        TypeError: the network is neither a Keras model nor a training cell, or the manager is not a loss scale manager.
        ValueError: the level is unknown; an argument would have no effect, such as a manager together with an
            optimizer that is already wrapped; or another `Model` is training the network.

    Source: MindSpore, `mindspore.train.Model`.
    """

    def __init__(
        self,
        network: Any,
        loss_fn: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        amp_level: str = "O0",
        loss_scale_manager: Any = _OF_THE_LEVEL,
        keep_batchnorm_fp32: bool | None = None,
    ):
        manager_given = loss_scale_manager != _OF_THE_LEVEL
        self.network = network
        self.amp_level = amp_level
        self._metric_names: dict[str, str] = {}
        self._compile_arguments: dict[str, Any] = {}
        self._compiled_after = 0
        self._step_loss = StepLoss()
        if isinstance(network, TrainOneStepCell):
            arguments = (loss_fn, optimizer, metrics, keep_batchnorm_fp32)
            if manager_given or amp_level != "O0" or any(argument is not None for argument in arguments):
                raise ValueError(
                    f"`network` is a {type(network).__name__}, which has a loss and an optimizer: pass it alone. Call "
                    "auto_mixed_precision(model) for its level, and pass the loss scale to the cell."
                )
            self.optimizer: Any = network.optimizer
            return
        levels.require_level(network, amp_level)
        if isinstance(optimizer, (str, dict)):
            optimizer = layers.layers_of(network).library.optimizers.get(optimizer)
        if manager_given and isinstance(optimizer, LossScaleOptimizer):
            raise ValueError("`optimizer` is already a LossScaleOptimizer: leave out `loss_scale_manager`.")
        if manager_given and loss_scale_manager is not None and optimizer is None:
            raise ValueError("`loss_scale_manager` needs an optimizer: pass `optimizer` too, or leave both out.")
        of_layers = _level_of_layers(amp_level, keep_batchnorm_fp32)
        if not manager_given:
            loss_scale_manager = DynamicLossScaleManager() if amp_level in _DYNAMIC else None
        if isinstance(metrics, Mapping) and "loss" in metrics:
            raise ValueError("`metrics` must not contain the name 'loss', which eval() uses for the loss. Rename it.")
        is_compiled = optimizer is not None or loss_fn is not None
        if is_compiled:
            self._require_no_training()
        optimizer = _wrapped(optimizer, loss_scale_manager, network.dtype_policy.name)
        if is_compiled:
            self._compile_arguments = {"loss": loss_fn, "metrics": self._as_keras_takes(metrics)}
        # All arguments have been checked. No code above this line may change the network.
        levels.auto_mixed_precision(network, of_layers)
        self.optimizer = optimizer
        self._compile()

    def _compile(self) -> None:
        """Compile the network, unless this `Model` has compiled it last and no level was set since."""
        is_last = getattr(self.network.compute_loss, "__self__", None) is self
        if not self._compile_arguments or (is_last and self._compiled_after == levels.changes()):
            return
        self._require_no_training()
        # Without an optimizer, Keras's `compile` would replace the optimizer that trains the network.
        optimizer = self.optimizer or getattr(self.network, "optimizer", None)
        arguments = dict(self._compile_arguments, **({} if optimizer is None else {"optimizer": optimizer}))
        if getattr(self.network, "compiled", False):
            # For None, Keras 3 keeps the metrics of an earlier call of `compile`.
            arguments["metrics"] = arguments["metrics"] or []
        with self.network.distribute_strategy.scope():
            _ = self._step_loss.value
            self.network.compile(**arguments)
        self.network.compute_loss = self._compute_loss
        self._compiled_after = levels.changes()

    def _compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the network, computed in float32, and store that of a training step for the monitors."""
        network: Any = self.network
        loss = type(network).compute_loss(network, x, y, casting.in_float32(y_pred), *args, **kwargs)
        if kwargs.get("training", True):  # not in an evaluation by a callback
            self._step_loss.note(loss)
        return loss

    def _require_no_training(self) -> None:
        if getattr(self.network, _TRAINED, False):
            raise ValueError(
                "`network` is being trained by another Model, which compiled it with a loss and metrics of its own. "
                "In a callback, call eval() of the Model that trains the network, and pass the metrics to that Model."
            )

    def _as_keras_takes(self, metrics: Any) -> Any:
        """Return the metrics in the form that `compile` accepts, and record the names that `eval` uses for them."""
        if isinstance(metrics, (set, frozenset)):
            return list(metrics - {"loss"})
        if not isinstance(metrics, Mapping) or set(metrics) & set(getattr(self.network, "output_names", None) or ()):
            return metrics
        # Keras resolves names such as "accuracy" from the shapes of the data, and gives the metrics names of its own.
        # `eval` therefore renames the values that Keras returns.
        self._metric_names = {metric: name for name, metric in metrics.items() if metric in _OF_THE_SHAPES}
        keras = layers.layers_of(self.network)
        return [
            metric if metric in _OF_THE_SHAPES else _named_metric(keras, metric, name)
            for name, metric in metrics.items()
        ]

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        verbose: Any = "auto",
        dataset_sink_mode: bool = False,
    ) -> Any:
        """Train the network. Keras shows its progress bar.

        Args:
            epoch: the number of passes over the data, an int above 0.
            train_dataset: data as in `fit(x=...)`, including the labels, for example a batched `tf.data.Dataset`.
            callbacks: a monitor from this package, a Keras callback, or a list of them. With a training cell, the
                callbacks' `model` is a Keras model that trains the cell: its `optimizer` is the cell's optimizer, and
                its `network` the cell's Keras model.
            verbose: as in `fit`.
            dataset_sink_mode: must be False. The argument exists because MindSpore programs pass it.

        Returns:
            Keras's `History`.

        Raises:
            ValueError: there is no optimizer or no loss; an argument is out of range; `epoch` is above 1, but the data
                can be read only once; the data has no batch or repeats forever; or another `Model` is training the
                network.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
            raise ValueError(f"`epoch` must be an int above 0, but got: {epoch!r}.")
        _require_no_sink(dataset_sink_mode)
        if self.optimizer is None:
            raise ValueError("train() needs an optimizer: pass `optimizer` to Model(...).")
        if epoch > 1 and isinstance(train_dataset, Iterator):
            raise ValueError(
                f"`train_dataset` is a {type(train_dataset).__name__}, which can be read only once, but `epoch` is "
                f"{epoch}. Pass a tf.data.Dataset, such as tf.data.Dataset.from_generator(function, ...)."
            )
        if isinstance(train_dataset, tf.data.Dataset) and train_dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("`train_dataset` repeats forever. Leave out .repeat(), or add .take(steps).")
        # Without shuffle=False, Keras 3 warns that it cannot shuffle a Dataset or a generator.
        kwargs: dict[str, Any] = {"shuffle": False} if isinstance(train_dataset, (tf.data.Dataset, Iterator)) else {}
        if isinstance(self.network, TrainOneStepCell):
            trained = cell_model(self.network, self._step_loss)
        else:
            self._compile()
            trained = self.network
        kwargs["callbacks"] = self._callbacks(callbacks, layers.layers_of(trained).library)
        with replicas.overriding(trained, **{_TRAINED: True}):
            history = trained.fit(train_dataset, epochs=epoch, verbose=verbose, **kwargs)
        if not history.history:
            raise ValueError("`train_dataset` has no batch. Pass data with at least one batch.")
        return history

    def eval(
        self, valid_dataset: Any, callbacks: Any = None, verbose: Any = 0, dataset_sink_mode: bool = False
    ) -> dict[str, float]:
        """Evaluate the network.

        Args:
            valid_dataset: data as in `evaluate(x=...)`, including the labels.
            callbacks: a Keras callback, or a list of callbacks.
            verbose: as in `evaluate`.
            dataset_sink_mode: must be False. The argument exists because MindSpore programs pass it.

        Returns:
            A dict that maps "loss" and the names of the metrics to their values.

        Raises:
            ValueError: the network is a training cell; `dataset_sink_mode` is True; or another `Model` is training the
                network.
        """
        _require_no_sink(dataset_sink_mode)
        if isinstance(self.network, TrainOneStepCell):
            raise ValueError(
                "eval() needs a network and its loss, but `network` is a training cell. Call "
                "Model(model, loss_fn, metrics=...).eval(dataset)."
            )
        self._compile()
        listed = self._callbacks(callbacks, layers.layers_of(self.network).library)
        scores = self.network.evaluate(valid_dataset, verbose=verbose, return_dict=True, callbacks=listed)
        return {self._metric_names.get(name, name): value for name, value in scores.items()}

    def predict(self, *predict_data: Any) -> Any:
        """Run the network in inference mode, and return its outputs.

        Args:
            *predict_data: one batch of the network's inputs.

        Returns:
            The network's outputs, cast to float32 except at level O0.
        """
        inputs = predict_data[0] if len(predict_data) == 1 else predict_data
        network = backbone_of(self.network) if isinstance(self.network, TrainOneStepCell) else self.network
        if network is None:
            raise ValueError("The training cell trains a function, not a Keras model. Call the function to predict.")
        outputs = network(inputs, training=False)
        return outputs if self.amp_level == "O0" else casting.in_float32(outputs)

    def _callbacks(self, callbacks: Any, keras: Any) -> list[Any]:
        listed = [] if callbacks is None else callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        return [each.as_callback(keras, self._step_loss) if isinstance(each, LossMonitor) else each for each in listed]


def _wrapped(optimizer: Any, manager: Any, policy: str) -> Any:
    if optimizer is None or isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if manager is not None:
        return LossScaleOptimizer(optimizer, loss_scale=manager)
    if policy == "mixed_float16" and not scales_losses(optimizer):
        # Keras would wrap the optimizer with a dynamic loss scale.
        return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1)
    return optimizer


def _level_of_layers(amp_level: str, keep_batchnorm_fp32: bool | None) -> str:
    """Return the level for `auto_mixed_precision`.

    O2 and O3 differ only in the dtype of the normalization layers, so `keep_batchnorm_fp32` chooses between them.
    """
    if keep_batchnorm_fp32 is not None and amp_level in ("O2", "O3"):
        return "O2" if keep_batchnorm_fp32 else "O3"
    if keep_batchnorm_fp32 or keep_batchnorm_fp32 is None:
        return amp_level
    raise ValueError(
        f"keep_batchnorm_fp32=False has no effect at level {amp_level}, which leaves normalization layers as they are. "
        "Pass amp_level='O3', or call to_float(layer, 'float16') for each of these layers."
    )


def _require_no_sink(dataset_sink_mode: Any) -> None:
    if dataset_sink_mode:
        raise ValueError("`dataset_sink_mode` must be False: TensorFlow has no data sinking. Leave the argument out.")


def _named_metric(keras: Any, metric: Any, name: str) -> Any:
    """Return a metric object with the given name.

    `metric` is a function, the name of a Keras metric, or a Keras metric object. A metric object is renamed.
    """
    metrics = keras.library.metrics
    metric = metrics.get(metric)
    if not isinstance(metric, metrics.Metric):
        return metrics.MeanMetricWrapper(metric, name)
    # tf_keras has no public way to change the name of a metric.
    setattr(metric, "_name" if "_name" in vars(metric) else "name", name)
    return metric
