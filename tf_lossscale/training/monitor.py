"""The `LossScaleMonitor` callback, which shows the loss scale during `fit` in Keras 3 and tf_keras."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale import errors
from tf_lossscale.core import replicas
from tf_lossscale.core.finite import all_finite
from tf_lossscale.core.skipping import WHAT_TO_TRY
from tf_lossscale.core.variables import value_or_zero
from tf_lossscale.libraries import optional
from tf_lossscale.libraries.models import name_of, tensors_of, unique
from tf_lossscale.training.keep_state import state_of
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer
from tf_lossscale.wrapper.state import value_of

#: The fraction of skipped steps is computed over at least this many steps.
WINDOW = 50


class LossScaleMonitor(tf.keras.callbacks.Callback):
    """A callback that adds `loss_scale` and `skipped_steps` to the logs of `fit`.

    The logs appear in the progress bar, in `History`, and in callbacks that come later in the list, like `CSVLogger`
    and `TensorBoard`. The callback warns when too many steps are skipped, and can stop the training in a stall.

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
        log_dir: a folder to which the callback writes these values and the loss for TensorBoard, at each reading. By
            default nothing is written.
        max_skipped: the fraction of skipped steps above which the callback warns. At a reading, the callback checks the
            fraction if at least 50 steps have been taken since the previous check.
        optimizer: the optimizer whose loss scale is shown, or None for the model's optimizer.
        stop_after: the number of skipped steps in a row after which `fit` ends with a FloatingPointError, or None to go
            on. It works in every mode, also if XLA compiles the model. The callback reads the count in every
            `stop_after`-th batch, and more often in a stall.

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
        stop_after: int | None = None,
    ):
        super().__init__()
        self.update_freq: int | None = None
        if update_freq != "epoch":
            remedy = 'Pass "epoch", or the number of batches from one reading to the next.'
            self.update_freq = errors.whole_number("update_freq", update_freq, remedy)
        self.stop_after: int | None = None
        if stop_after is not None:
            remedy = "Pass a number of skipped steps, for example 100, or None to go on."
            self.stop_after = errors.whole_number("stop_after", stop_after, remedy)
        if self.update_freq or self.stop_after:
            # Keras waits for each batch if a callback has an `on_train_batch_end` method, so this callback has the
            # method only if it needs it.
            self.on_train_batch_end: Any = self._after_batch
        self.max_skipped: float = errors.positive_number(
            "max_skipped", max_skipped, "Pass a fraction, for example 0.2."
        )
        if self.max_skipped > 1:
            raise ValueError(f"`max_skipped` must be at most 1, but got: {max_skipped!r}. Pass a fraction such as 0.2.")
        if optimizer is not None:
            _require_ours(optimizer)
        if log_dir is not None:
            optional.load("tensorboard", "")
        self._optimizer = optimizer
        self._writer = None if log_dir is None else tf.summary.create_file_writer(str(log_dir))

    @property
    def _watched(self) -> Any:
        return self.model.optimizer if self._optimizer is None else self._optimizer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        del logs
        _require_ours(self._watched)
        if self._writer is not None and not tf.executing_eagerly():
            raise RuntimeError(
                "LossScaleMonitor(log_dir=...) cannot write in graph mode. Leave `log_dir` out, and put Keras's "
                "TensorBoard callback after the monitor: it writes all logs, including the loss scale."
            )
        self._tensors: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        self._warned, self._nonfinite = False, self._nonfinite_state()
        # The number of steps, and of skipped steps, at the previous check of `max_skipped`.
        self._checked = self._steps(), self._value("skipped_steps")
        # The number of batches until the count of skipped steps in a row may reach `stop_after`.
        self._until_stop = self._missing_for_stop()

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
        if self.update_freq and (batch + 1) // self.update_freq > self._batches // self.update_freq:
            self._update_logs(logs)
        if self.stop_after:
            self._until_stop -= batch + 1 - self._batches
            if self._until_stop <= 0:
                self._until_stop = self._missing_for_stop()
        self._batches = batch + 1
        # Between two readings, the progress bar shows the values of the last reading.
        logs.update(self._read)

    def _missing_for_stop(self) -> int:
        """Return how many more steps in a row must be skipped to end the training. If none, raise an error."""
        if not self.stop_after:
            return 0
        in_a_row = self._value("skipped_in_a_row")
        if in_a_row >= self.stop_after:
            raise FloatingPointError(
                f"The last {in_a_row} steps were all skipped. The loss scale is {self._value('loss_scale'):g} now. "
                f"{WHAT_TO_TRY}"
            )
        return self.stop_after - in_a_row

    def _update_logs(self, logs: dict[str, Any]) -> None:
        self._read = {name: self._value(name) for name in ("loss_scale", "skipped_steps")}
        logs.update(self._read)
        if self._writer is not None:
            with self._writer.as_default(self._steps()):
                for name, value in {**self._read, **{name: logs[name] for name in ("loss",) if name in logs}}.items():
                    tf.summary.scalar(name, value)
        self._warn()
        self._warn_of_state()

    def _warn(self) -> None:
        steps, skipped = self._steps(), self._read["skipped_steps"]
        if steps < self._checked[0]:
            self._checked = 0, 0  # set_state() has reset the counts
        new = steps - self._checked[0]
        if new < WINDOW:
            return
        fraction = (skipped - self._checked[1]) / new
        self._checked = steps, skipped
        if fraction > self.max_skipped and not self._warned:
            logging.warning(
                "%.0f%% of the last %d steps were skipped, more than %g%%; the loss scale is %g. %s",
                *(100 * fraction, new, 100 * self.max_skipped, self._read["loss_scale"], WHAT_TO_TRY),
            )
        self._warned = fraction > self.max_skipped

    def _warn_of_state(self) -> None:
        """Warn once if skipped steps have left infinity or NaN in variables that the optimizer does not train."""
        if not self._read["skipped_steps"]:
            return
        before, self._nonfinite = self._nonfinite, self._nonfinite_state()
        names = [name for name in self._nonfinite if name not in before]
        if names:
            logging.warning(
                "Skipped steps have made %s infinite or NaN, and with them every prediction of the model. The "
                "optimizer does not train these variables; the forward pass writes them. To restore them whenever a "
                "step is skipped: model.train_step = tf_lossscale.keep_state(model)(model.train_step), then "
                "model.make_train_function(force=True).",
                ", ".join(names),
            )

    def _nonfinite_state(self) -> list[str]:
        """Return the names of untrained variables that are not finite. In graph mode, return no names."""
        state = state_of(self.model) if tf.executing_eagerly() else []
        return [
            name
            for name, variable in zip(unique(map(name_of, state)), tensors_of(state))
            if variable.dtype.is_floating
            and not all_finite([copy.read_value() for copy in replicas.local_copies_of(variable)])
        ]

    def _steps(self) -> int:
        scale = self._watched.scaler
        return int(self._value("total_steps", scale) if scale.may_skip else self._value("iterations"))

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

    # tf_keras calls these three methods on every callback, even on one that is not derived from
    # `tf_keras.callbacks.Callback`.

    def _implements_train_batch_hooks(self) -> bool:
        return "on_train_batch_end" in vars(self)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _require_ours(optimizer: Any) -> None:
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            f"The optimizer must be a tf_lossscale.LossScaleOptimizer, but got: {optimizer!r}. Wrap it before compile: "
            "model.compile(tf_lossscale.LossScaleOptimizer(optimizer), ...). Or, under the mixed_float16 policy, call "
            "tf_lossscale.wrap_in_compile() before compile."
        )
