"""The `LossScaleMonitor` callback, which shows the loss scale during `fit` in Keras 3 and tf_keras."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core.variables import value_or_zero
from tf_lossscale.monitoring.histograms import write_histograms
from tf_lossscale.monitoring.summaries import require_ours, require_tensorboard, write_scalars
from tf_lossscale.precision import records
from tf_lossscale.wrapper.readings import value_of
from tf_lossscale.wrapper.stall import WHAT_TO_TRY

if TYPE_CHECKING:
    from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

#: The fraction of skipped steps is computed over at least this many steps.
WINDOW = 50


class LossScaleMonitor(tf.keras.callbacks.Callback):
    """A callback that adds `loss_scale` and `skipped_steps` to the logs of `fit`.

    If the optimizer has `diagnose=True`, the callback also adds `grad_norm`, the norm of the gradients. If it has
    `diagnose="exponents"`, the callback writes the gradients' exponent counts to `log_dir`, for the `tf-lossscale plot`
    command. The logs appear in the progress bar, in `History`, and in callbacks that come later in the list, like
    `CSVLogger` and `TensorBoard`. The callback warns when too many steps are skipped. If training has stalled, reading
    the loss scale also triggers the optimizer's `on_stall`.

    >>> import tf_lossscale
    >>> model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    >>> optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
    >>> model.compile(optimizer, "mse")
    >>> x = tf.ones([4, 1])
    >>> history = model.fit(x, x, verbose=0, callbacks=[tf_lossscale.LossScaleMonitor()])
    >>> history.history["loss_scale"], history.history["skipped_steps"]
    ([8.0], [0])

    Args:
        update_freq: "epoch" to read the values at the end of each epoch, or a number n to read them after every n
            batches as well. Each reading waits until the steps in progress have finished. With `steps_per_execution`,
            the values are read after the execution that contains the n-th batch.
        log_dir: a folder to which the callback writes the same TensorBoard scalars as `write_summary`, at each reading.
            By default nothing is written. With `diagnose="exponents"`, the callback also writes the most recent
            exponent counts: as histograms for TensorBoard, and as a line of `exponents.jsonl`.
        max_skipped: the fraction of skipped steps above which the callback warns. At a reading, the callback checks the
            fraction if at least 50 steps have been taken since the previous check.
        optimizer: the optimizer whose loss scale is shown, or None for the model's optimizer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        ImportError: `log_dir` is passed, but TensorBoard is not installed.
    """

    def __init__(
        self,
        update_freq: int | str = "epoch",
        log_dir: str | os.PathLike[str] | None = None,
        max_skipped: float = 0.2,
        optimizer: LossScaleOptimizer | None = None,
    ):
        super().__init__()
        if update_freq != "epoch":
            remedy = 'Pass "epoch", or the number of batches from one reading to the next.'
            self.update_freq = errors.whole_number("update_freq", update_freq, remedy)
            # Keras waits for each batch if a callback has an `on_train_batch_end` method, so this callback has the
            # method only if `update_freq` is a number.
            self.on_train_batch_end = self._after_batch
        self.max_skipped = errors.positive_number("max_skipped", max_skipped, "Pass a fraction, for example 0.2.")
        if optimizer is not None:
            require_ours(optimizer)
        if log_dir is not None:
            require_tensorboard("LossScaleMonitor(log_dir=...)", "leave out `log_dir`")
        self._optimizer = optimizer
        self._log_dir = "" if log_dir is None else str(log_dir)
        self._writer = None if log_dir is None else tf.summary.create_file_writer(str(log_dir))
        # Identifies the exponent counts that were written last: the `Exponents` object that counted them, and their
        # step number.
        self._counted: tuple[Any, int] = (None, 0)
        self._read: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        # The total number of steps, and the number of skipped steps, at the previous check of `max_skipped`.
        self._since = (0, 0)
        self._warned = False

    @property
    def _watched(self) -> Any:
        return self.model.optimizer if self._optimizer is None else self._optimizer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        del logs
        require_ours(self._watched)
        if self._writer is not None and not tf.executing_eagerly():
            raise RuntimeError(
                "LossScaleMonitor(log_dir=...) cannot write in graph mode. Leave `log_dir` out, and put Keras's "
                "TensorBoard callback after the monitor: it writes all logs, including the loss scale."
            )
        self._read, self._tensors = {}, {}
        self._since = self._counts()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        del epoch, logs
        # The number of batches processed so far in this epoch.
        self._batches = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        del epoch
        self._update_logs(logs if logs is not None else {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        del logs
        if self._writer is not None:
            self._writer.flush()

    def _after_batch(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs if logs is not None else {}
        # With `steps_per_execution`, Keras calls this method only after the last batch of each execution.
        if (batch + 1) // self.update_freq > self._batches // self.update_freq:
            self._update_logs(logs)
        self._batches = batch + 1
        # Between two readings, the progress bar shows the values of the last reading.
        logs.update(self._read)

    def _update_logs(self, logs: dict[str, Any]) -> None:
        optimizer = self._watched
        loss = logs.get("loss")
        self._read = {"loss_scale": self._value("loss_scale"), "skipped_steps": self._counts()[1]}
        if optimizer.gradient_norm is not None:
            self._read["grad_norm"] = self._value("gradient_norm")
        logs.update(self._read)
        if self._writer is not None:
            with self._writer.as_default():
                write_scalars(optimizer, self._counts()[0], loss)
                self._write_counts(optimizer)
        self._warn()

    def _write_counts(self, optimizer: Any) -> None:
        counts = optimizer._last_counts()
        if counts is None or (optimizer._exponents, counts.step) == self._counted:
            return
        self._counted = (optimizer._exponents, counts.step)
        # After an optimizer is loaded from a file, the step numbers of its exponent counts start from 1 again, whereas
        # its `total_steps` continues from the loaded value. The difference is the number of steps that were taken
        # before the optimizer was saved.
        earlier = max(self._counts()[0] - optimizer._exponents.steps_taken(), 0)
        counts = dataclasses.replace(counts, step=counts.step + earlier)
        write_histograms(counts)
        records.append(self._log_dir, counts)

    def _counts(self) -> tuple[int, int]:
        scale = self._watched._loss_scale
        if not scale.may_skip:
            return self._value("iterations"), 0
        return self._value("total_steps", scale), self._value("skipped_steps", scale)

    def _value(self, name: str, holder: Any = None) -> Any:
        """Return an attribute of `holder` as a Python number. If `holder` is None, the optimizer is used."""
        holder = self._watched if holder is None else holder
        if tf.executing_eagerly():
            return value_of(getattr(holder, name))
        # In a graph, all readings evaluate the same tensor, so the graph does not grow.
        if name not in self._tensors:
            value = getattr(holder, name)
            self._tensors[name] = value_or_zero(value) if isinstance(value, tf.Variable) else value
        return value_of(self._tensors[name])

    def _warn(self) -> None:
        (steps, skipped), (steps_before, skipped_before) = self._counts(), self._since
        if steps - steps_before < WINDOW:
            return
        self._since = steps, skipped
        fraction = (skipped - skipped_before) / (steps - steps_before)
        if fraction > self.max_skipped and not self._warned:
            logging.warning(
                "%.0f%% of the last %d steps were skipped, more than %g%%; the loss scale is %g. %s",
                *(100 * fraction, steps - steps_before, 100 * self.max_skipped, self._read["loss_scale"], WHAT_TO_TRY),
            )
        self._warned = fraction > self.max_skipped

    # tf_keras calls these three methods on every callback, even on one that is not derived from
    # `tf_keras.callbacks.Callback`.

    def _implements_train_batch_hooks(self) -> bool:
        return "on_train_batch_end" in vars(self)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
