"""Monitors that print the loss, the loss scale and overflows during training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.amp.managers import FixedLossScaleManager
from tf_lossscale.core.variables import LazyVariable, Variables
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer
from tf_lossscale.wrapper.state import value_of

if TYPE_CHECKING:
    from tf_lossscale.types import Optimizer

#: The width of an 80-column terminal without its last column. A line that is padded to this width overwrites Keras's
#: progress bar.
_BAR = 79


class StepLoss(Variables):
    """The loss of the most recent step. Keras's logs contain only the mean loss of the epoch so far."""

    #: Whether a step stores its loss. It is set when the step is traced.
    is_noted: bool = False
    value: Any = LazyVariable(0.0, tf.float32, aggregation=tf.VariableAggregation.SUM)
    """The loss. The replicas' losses add up to it."""

    def note(self, loss: tf.Tensor) -> None:
        """Store the loss of this replica."""
        self.is_noted = True
        self.value.assign(tf.cast(loss, tf.float32))

    def read(self, logs: Mapping[str, Any]) -> float:
        """Return the loss of the most recent step. If no step stores its loss, return `logs["loss"]`."""
        return float(tf.convert_to_tensor(self.value) if self.is_noted else logs["loss"])


class LossMonitor:
    """A monitor that prints the loss every few steps during `Model.train`.

    >>> LossMonitor().line(epoch=1, step=2, loss=0.5, optimizer=None)
    'epoch: 1 step: 2, loss is 0.5'

    Args:
        per_print_times: the number of steps from one printed line to the next, an int above 0.

    Source: MindSpore, `mindspore.train.LossMonitor`.
    """

    def __init__(self, per_print_times: int = 1):
        if not isinstance(per_print_times, int) or isinstance(per_print_times, bool) or per_print_times < 1:
            raise ValueError(f"`per_print_times` must be an int above 0, but got: {per_print_times!r}.")
        self.per_print_times = per_print_times

    def line(self, epoch: int, step: int, loss: float, optimizer: Optimizer) -> str:
        """Return the line to print.

        Args:
            epoch: the epoch, counted from 1.
            step: the step within the epoch, counted from 1.
            loss: the loss of the step.
            optimizer: the model's optimizer.

        Returns:
            The line, without a newline.
        """
        del optimizer
        return f"epoch: {epoch} step: {step}, loss is {loss:.6g}"

    def as_callback(self, keras: Any, step_loss: StepLoss | None = None) -> Any:
        """Return the monitor as a callback for a Keras library.

        Args:
            keras: the `keras` or `tf_keras` module.
            step_loss: a `StepLoss` that provides the loss. If it is None, the line shows the mean loss of the epoch so
                far, from Keras's logs.

        Returns:
            A `keras.callbacks.Callback`.
        """
        monitor = self

        class Printing(keras.callbacks.Callback):
            """Print the monitor's line every few steps."""

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch + 1

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if (batch + 1) % monitor.per_print_times == 0:
                    loss = float(logs["loss"]) if step_loss is None else step_loss.read(logs)
                    line = monitor.line(self.epoch, batch + 1, loss, self.model.optimizer)
                    bar = batch > 0 and self.params.get("verbose") in (1, "auto")
                    print(_after_a_bar(line) if bar else line)

        return Printing()


def _after_a_bar(line: str) -> str:
    """Return `line` in a form that can be printed after Keras's progress bar, which does not end with a newline."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if sys.stdout.isatty() or hasattr(shell, "kernel"):
        # The carriage return and the padding overwrite the progress bar.
        return f"\r{line:<{_BAR}}"
    return f"\n{line}"


class OverflowMonitor(LossMonitor):
    """A monitor that prints the loss, the loss scale, and whether the step overflowed.

    The loss scale is the one after the step, so after an overflow a dynamic scale is already lowered.

    >>> import tensorflow as tf
    >>> from tf_lossscale import LossScaleOptimizer
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
    >>> OverflowMonitor().line(epoch=1, step=2, loss=0.5, optimizer=optimizer)
    'epoch: 1 step: 2, loss is 0.5, loss scale is 8, overflow: False'

    Args:
        per_print_times: the number of steps from one printed line to the next, an int above 0.
    """

    def line(self, epoch: int, step: int, loss: float, optimizer: Optimizer) -> str:
        """Return the line to print; see `LossMonitor.line`."""
        if not isinstance(optimizer, LossScaleOptimizer):
            return f"{super().line(epoch, step, loss, optimizer)}, no loss scale"
        scale = float(value_of(optimizer.loss_scale))
        shown = f"{scale:.0f}" if scale.is_integer() and scale < 1e9 else f"{scale:g}"
        return f"{super().line(epoch, step, loss, optimizer)}, loss scale is {shown}, overflow: {_overflow(optimizer)}"


def _overflow(optimizer: Any) -> bool | str:
    scale = optimizer.scaler
    if scale.may_skip:
        return bool(value_of(scale.last_step_skipped))
    return bool(value_of(scale.overflowed)) if isinstance(scale, FixedLossScaleManager) else "not checked"
