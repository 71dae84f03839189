"""The mixed-precision graph rewrite, and the optimizer class that it uses.

The names come from `tf.compat.v1.mixed_precision` and `tf.train.experimental`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale.families import tf1
from tf_lossscale.legacy import experimental, policy
from tf_lossscale.legacy import loss_scale as loss_scale_lib
from tf_lossscale.wrapper import registry

if TYPE_CHECKING:
    from tf_lossscale.types import Same


class MixedPrecisionLossScaleOptimizer(tf1.LossScaleOptimizer):
    """Wraps a `tf.compat.v1.train.Optimizer` with a loss scale.

    >>> opt = MixedPrecisionLossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), 8)
    >>> weight = tf.Variable(1.0)
    >>> _ = opt.minimize(lambda: 1.0 * weight, var_list=[weight])
    >>> weight.numpy().item()
    0.5

    Args:
        opt: a `tf.compat.v1.train.Optimizer`.
        loss_scale: "dynamic", a number, a LossScale or a config.

    Raises:
        ValueError: `opt` is not a `tf.compat.v1.train.Optimizer`, or `loss_scale` has an unsupported value.

    Source: `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`.
    """

    def __init__(self, opt: Any, loss_scale: Any):
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            raise ValueError(
                f'"opt" must be an instance of tf.compat.v1.train.Optimizer, but got: {opt!r}. '
                "Wrap a Keras optimizer with tf_lossscale.LossScaleOptimizer."
            )
        scale = loss_scale_lib.get_for_wrapper(loss_scale)
        # A TensorFlow 1 program may wrap the same optimizer again in each graph.
        registry.release(opt)
        super().__init__(opt, loss_scale=scale)


def enable_mixed_precision_graph_rewrite(opt: Same, loss_scale: Any = "dynamic") -> Same:
    """Let TensorFlow rewrite float32 graphs to float16 where that is safe, and wrap the optimizer with a loss scale.

    TensorFlow rewrites graphs only on GPUs. On CPUs the graph stays in float32.

    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> wrapped = enable_mixed_precision_graph_rewrite(sgd)
    >>> type(wrapped).__name__
    'MixedPrecisionLossScaleOptimizer'
    >>> disable_mixed_precision_graph_rewrite()

    Args:
        opt: a `tf.compat.v1.train.Optimizer`, or a Keras 3 or tf_keras optimizer.
        loss_scale: "dynamic", a number, a LossScale or a config.

    Returns:
        A `MixedPrecisionLossScaleOptimizer` if `opt` is a `tf.compat.v1.train.Optimizer`; otherwise an
        `experimental.LossScaleOptimizer`.

    Raises:
        ValueError: `opt` is not an optimizer, or is already wrapped; `loss_scale` has an unsupported value; or Keras's
            global dtype policy is mixed.

    Source: `tf.train.experimental.enable_mixed_precision_graph_rewrite`.
    """
    if registry.scales_losses(opt):
        raise ValueError(
            f'"opt" must not already be an instance of a LossScaleOptimizer, but got: {opt!r}. '
            "Pass the optimizer that it wraps."
        )
    policy.require_no_mixed_policy()
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        wrapped: Any = MixedPrecisionLossScaleOptimizer(opt, loss_scale)
    elif registry.wrapper_class_of(opt) is not None:
        wrapped = experimental.LossScaleOptimizer(opt, loss_scale)
    else:
        raise ValueError(
            f'"opt" must be an instance of a tf.train.Optimizer or a tf.keras.optimizers.Optimizer, but got: {opt!r}.'
        )
    _rewrite_graphs(True)
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Disable the graph rewrite. Optimizers that are already wrapped stay wrapped.

    >>> disable_mixed_precision_graph_rewrite()
    >>> tf.config.optimizer.get_experimental_options()["auto_mixed_precision"]
    False

    Source: `tf.train.experimental.disable_mixed_precision_graph_rewrite`.
    """
    _rewrite_graphs(False)


def _rewrite_graphs(enabled: bool) -> None:
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": enabled})
    # A Session with its own ConfigProto ignores the `auto_mixed_precision` option and reads a private TensorFlow flag.
    # Set the flag directly, because the only public function that sets it also wraps an optimizer.
    from tensorflow.python.training.experimental import mixed_precision_global_state as sessions

    if enabled and sessions.non_mixed_precision_session_created():
        logging.warning(
            "A Session was created before enable_mixed_precision_graph_rewrite was called, so its graph is not "
            "rewritten. Call enable_mixed_precision_graph_rewrite before creating any Session."
        )
    sessions.set_mixed_precision_graph_rewrite_enabled(enabled)
