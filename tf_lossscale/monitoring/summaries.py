"""The loss scale as TensorBoard scalars."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale.monitoring.histograms import write_histograms
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer


def write_summary(optimizer: LossScaleOptimizer, step: Any = None, loss: Any = None) -> None:
    """Write the scalars `loss_scale` and `skipped_steps`, and the loss if given.

    An optimizer that was made with `diagnose=True` adds `grad_norm`. One that was made with `diagnose="exponents"`
    adds, in eager mode and if the last step was counted, a histogram of exponents for each variable.

    For custom loops. It writes to the default `tf.summary` writer, in eager mode or in a `tf.function`, and respects
    `tf.summary.record_if`.

    >>> import tempfile
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    >>> with tf.summary.create_file_writer(tempfile.mkdtemp()).as_default():
    ...     write_summary(optimizer, step=1, loss=0.5)

    Args:
        optimizer: the optimizer whose loss scale is written.
        step: an int or an int64 scalar tensor; None for that of `tf.summary.experimental.set_step`.
        loss: a floating scalar, not the scaled one.

    Raises:
        TypeError: `optimizer` is not a `tf_lossscale.LossScaleOptimizer`.
    """
    require_ours(optimizer)
    write_scalars(optimizer, step, loss)
    if optimizer._exponents is None or not tf.executing_eagerly():
        return
    counts = optimizer._last_counts()
    if counts is not None and counts.step == optimizer._exponents.steps_taken():
        write_histograms(counts, step)


def write_scalars(optimizer: LossScaleOptimizer, step: Any, loss: Any) -> None:
    """Write what `write_summary` writes, without the histograms.

    >>> import tempfile
    >>> with tf.summary.create_file_writer(tempfile.mkdtemp()).as_default():
    ...     write_scalars(LossScaleOptimizer(tf.keras.optimizers.SGD()), step=1, loss=None)

    Args:
        optimizer: as in `write_summary`.
        step: as in `write_summary`.
        loss: as in `write_summary`.
    """
    values = {"loss_scale": optimizer.loss_scale, "skipped_steps": optimizer.skipped_steps}
    if optimizer.gradient_norm is not None:
        values["grad_norm"] = optimizer.gradient_norm
    if loss is not None:
        values["loss"] = loss
    for name, value in values.items():
        tf.summary.scalar(name, tf.cast(tf.convert_to_tensor(value), tf.float32), step=step)


def require_ours(optimizer: Any) -> None:
    """Raise if an optimizer's loss scale cannot be read.

    >>> require_ours(LossScaleOptimizer(tf.keras.optimizers.SGD()))

    Args:
        optimizer: any object.

    Raises:
        TypeError: it is not a `tf_lossscale.LossScaleOptimizer`.
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            f"The optimizer must be a tf_lossscale.LossScaleOptimizer, but got: {optimizer!r}. Wrap it before compile: "
            "model.compile(tf_lossscale.LossScaleOptimizer(optimizer), ...). Or, under the policy mixed_float16, call "
            "tf_lossscale.wrap_in_compile() before compile."
        )
