"""Writes the loss scale to TensorBoard as scalars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.libraries import optional
from tf_lossscale.monitoring.histograms import write_histograms
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from tf_lossscale.types import Scalar


def write_summary(optimizer: LossScaleOptimizer, step: Scalar | None = None, loss: Scalar | None = None) -> None:
    """Write the scalars `loss_scale` and `skipped_steps`, and the loss if it is passed.

    If the optimizer has `diagnose=True`, the scalar `grad_norm` is written as well. If it has `diagnose="exponents"`, a
    histogram of exponents is written for each variable, but only in eager mode and only if the gradients of the last
    step were counted.

    Call the function in custom loops, in eager mode or in a `tf.function`. It writes to the default `tf.summary`
    writer, and respects `tf.summary.record_if`.

    >>> import tempfile
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    >>> with tf.summary.create_file_writer(tempfile.mkdtemp()).as_default():
    ...     write_summary(optimizer, step=1, loss=0.5)

    Args:
        optimizer: the optimizer whose loss scale is written.
        step: an int or an int64 scalar tensor, or None for the step set with `tf.summary.experimental.set_step`.
        loss: the unscaled loss, a floating-point scalar. If it is None, no loss is written.

    Raises:
        TypeError: `optimizer` is not a `tf_lossscale.LossScaleOptimizer`.
        ImportError: TensorBoard is not installed.
    """
    require_ours(optimizer)
    require_tensorboard("write_summary(...)", "remove the call")
    write_scalars(optimizer, step, loss)
    if optimizer._exponents is None or not tf.executing_eagerly():
        return
    counts = optimizer._last_counts()
    if counts is not None and counts.step == optimizer._exponents.steps_taken():
        write_histograms(counts, step)


def write_scalars(optimizer: LossScaleOptimizer, step: Any, loss: Any) -> None:
    """Write the same scalars as `write_summary`, but no histograms.

    >>> import tempfile
    >>> with tf.summary.create_file_writer(tempfile.mkdtemp()).as_default():
    ...     write_scalars(LossScaleOptimizer(tf.keras.optimizers.SGD()), step=1, loss=None)

    Args:
        optimizer: the optimizer whose loss scale is written.
        step: the step, as in `write_summary`.
        loss: the unscaled loss, or None, as in `write_summary`.
    """
    values = {"loss_scale": optimizer.loss_scale, "skipped_steps": optimizer.skipped_steps}
    if optimizer.gradient_norm is not None:
        values["grad_norm"] = optimizer.gradient_norm
    if loss is not None:
        values["loss"] = loss
    for name, value in values.items():
        tf.summary.scalar(name, tf.cast(tf.convert_to_tensor(value), tf.float32), step=step)


def require_ours(optimizer: Any) -> None:
    """Raise an error if an object is not one of this package's `LossScaleOptimizer` objects.

    >>> require_ours(LossScaleOptimizer(tf.keras.optimizers.SGD()))

    Args:
        optimizer: any object.

    Raises:
        TypeError: the object is not a `tf_lossscale.LossScaleOptimizer`.
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            f"The optimizer must be a tf_lossscale.LossScaleOptimizer, but got: {optimizer!r}. Wrap it before compile: "
            "model.compile(tf_lossscale.LossScaleOptimizer(optimizer), ...). Or, under the mixed_float16 policy, call "
            "tf_lossscale.wrap_in_compile() before compile."
        )


# Without this decorator, AutoGraph would warn that it cannot convert the import.
@do_not_convert
def require_tensorboard(caller: str, otherwise: str) -> None:
    """Raise an error if TensorBoard, which `tf.summary.scalar` needs, cannot be imported.

    >>> require_tensorboard("write_summary(...)", "remove the call")

    Args:
        caller: the call that writes scalars, as text for the error message.
        otherwise: what the user can do instead of installing TensorBoard, as text for the error message.

    Raises:
        ImportError: TensorBoard is not installed, or its import fails.
    """
    try:
        optional.load("tensorboard", "")
    except ImportError as error:
        raise ImportError(f"{caller} writes scalars for TensorBoard. {error}. Or {otherwise}.") from error
