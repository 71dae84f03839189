"""TensorFlow Probability's training loops, with loss scaling.

>>> from tf_lossscale import probability
>>> probability.minimize.__name__
'minimize'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.libraries import optional
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from tf_lossscale.types import Variable

__all__ = ["fit_surrogate_posterior", "minimize"]


def _loss_of(traceable_quantities: Any) -> Any:
    return traceable_quantities.loss


def minimize(
    loss_fn: Callable[..., Any],
    num_steps: int,
    optimizer: LossScaleOptimizer,
    convergence_criterion: Any = None,
    batch_convergence_reduce_fn: Callable[[Any], Any] = tf.reduce_all,
    trainable_variables: Sequence[Variable] | None = None,
    trace_fn: Callable[[Any], Any] = _loss_of,
    return_full_length_trace: bool = True,
    jit_compile: bool = False,
    seed: Any = None,
    name: str = "minimize",
) -> Any:
    """Like `tfp.math.minimize`, but with loss scaling, so that small float16 gradients do not become zero.

    The gradients are scaled only during backpropagation, and the loss itself is never scaled. `trace_fn`,
    `convergence_criterion` and the trace therefore receive the unscaled loss and gradients. A step with a gradient that
    is not finite is skipped, but the trace still contains an entry for this step.

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> x = tf.Variable(0.0)
    >>> optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25))
    >>> loss = lambda: (x - 4.0) ** 2
    >>> losses = tf_lossscale.probability.minimize(loss, num_steps=3, optimizer=optimizer)
    >>> losses.numpy().tolist(), x.numpy().item()
    ([16.0, 4.0, 1.0], 3.5)

    Args:
        loss_fn: a function that returns the loss, a floating-point tensor of any shape. It may take a `seed` argument.
            The loss may be float16: the loss scale cannot make it overflow, because only its gradients are scaled.
        num_steps: the number of steps; with a convergence criterion, the maximum number.
        optimizer: a `tf_lossscale.LossScaleOptimizer` around any optimizer.
        convergence_criterion: an instance of a class in `tfp.optimizer.convergence_criteria`. It gets unscaled values.
        batch_convergence_reduce_fn: a function that decides whether to stop. It takes a bool tensor with one element
            for each element of the loss, and returns a bool scalar.
        trainable_variables: the variables to train, or None for every variable that the loss uses.
        trace_fn: a function that takes a `tfp.math.MinimizeTraceableQuantities` with unscaled values. Each step adds
            the function's result to the trace.
        return_full_length_trace: whether the trace has `num_steps` entries even if the criterion stops the loop early.
        jit_compile: whether XLA compiles the loop.
        seed: any seed that `tfp.random.sanitize_seed` accepts. Each step derives a new seed and passes it to `loss_fn`.
        name: a name for the operations.

    Returns:
        The results of `trace_fn` from all steps, stacked; by default the losses, in the dtype of the loss.

    Raises:
        TypeError: `optimizer` is not a LossScaleOptimizer, or the loss does not have a floating-point dtype.
        ImportError: TensorFlow Probability is not installed.

    Source: https://www.tensorflow.org/probability/api_docs/python/tfp/math/minimize
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            f"`optimizer` must be a tf_lossscale.LossScaleOptimizer, but got: {optimizer!r}. "
            "Wrap it once: optimizer = tf_lossscale.LossScaleOptimizer(optimizer)."
        )
    return _probability().math.minimize(
        optimizer.scale_inside(loss_fn),
        num_steps,
        optimizer,
        convergence_criterion=convergence_criterion,
        batch_convergence_reduce_fn=batch_convergence_reduce_fn,
        trainable_variables=trainable_variables,
        trace_fn=trace_fn,
        return_full_length_trace=return_full_length_trace,
        jit_compile=jit_compile,
        seed=seed,
        name=name,
    )


def fit_surrogate_posterior(
    target_log_prob_fn: Callable[..., Any],
    surrogate_posterior: Any,
    optimizer: LossScaleOptimizer,
    num_steps: int,
    convergence_criterion: Any = None,
    trace_fn: Callable[[Any], Any] = _loss_of,
    discrepancy_fn: Callable[[Any], Any] | None = None,
    sample_size: int = 1,
    importance_sample_size: int = 1,
    trainable_variables: Sequence[Variable] | None = None,
    jit_compile: bool | None = None,
    seed: Any = None,
    name: str = "fit_surrogate_posterior",
) -> Any:
    """Like `tfp.vi.fit_surrogate_posterior`, but with loss scaling, so that small float16 gradients do not become zero.

    >>> import tensorflow as tf
    >>> import tensorflow_probability as tfp
    >>> import tf_lossscale
    >>> posterior = tfp.distributions.Normal(tf.Variable(0.0), 1.0)
    >>> losses = tf_lossscale.probability.fit_surrogate_posterior(
    ...     tfp.distributions.Normal(1.0, 1.0).log_prob,
    ...     posterior,
    ...     tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(0.1)),
    ...     num_steps=50,
    ...     seed=1,
    ... )
    >>> len(losses), bool(abs(posterior.mean() - 1.0) < 0.1)
    (50, True)

    Args:
        target_log_prob_fn: a function that takes samples from the posterior and returns their log densities under the
            target distribution, as a tensor of shape `[sample_size]`.
        surrogate_posterior: a TensorFlow Probability distribution with trainable variables.
        optimizer: a `tf_lossscale.LossScaleOptimizer` around any optimizer.
        num_steps: the number of steps; with a convergence criterion, the maximum number.
        convergence_criterion: an instance of a class in `tfp.optimizer.convergence_criteria`. It gets unscaled values.
        trace_fn: a function that takes a `tfp.math.MinimizeTraceableQuantities` with unscaled values. Each step adds
            the function's result to the trace.
        discrepancy_fn: an f-divergence, or None for `tfp.vi.kl_reverse`.
        sample_size: the number of samples drawn from the posterior in each step.
        importance_sample_size: the number of terms of an importance-weighted divergence.
        trainable_variables: the variables to train, or None for every variable that the loss uses.
        jit_compile: whether XLA compiles the loop.
        seed: any seed that `tfp.random.sanitize_seed` accepts.
        name: a name for the operations.

    Returns:
        The results of `trace_fn` from all steps, stacked; by default the losses.

    Raises:
        TypeError: `optimizer` is not a LossScaleOptimizer, or the loss does not have a floating-point dtype.
        ImportError: TensorFlow Probability is not installed.

    Source: https://www.tensorflow.org/probability/api_docs/python/tfp/vi/fit_surrogate_posterior
    """
    vi = _probability().vi

    def loss_fn(seed: Any = None) -> Any:
        return vi.monte_carlo_variational_loss(
            target_log_prob_fn,
            surrogate_posterior,
            sample_size=sample_size,
            importance_sample_size=importance_sample_size,
            discrepancy_fn=vi.kl_reverse if discrepancy_fn is None else discrepancy_fn,
            gradient_estimator=vi.GradientEstimators.REPARAMETERIZATION,
            seed=seed,
        )

    return minimize(
        loss_fn,
        num_steps,
        optimizer,
        convergence_criterion=convergence_criterion,
        trainable_variables=trainable_variables,
        trace_fn=trace_fn,
        jit_compile=bool(jit_compile),
        seed=seed,
        name=name,
    )


def _probability() -> Any:
    return optional.load("tensorflow_probability", "probability")
