"""Scales a loss only while its gradients are computed, for libraries that create the gradient tape themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def scaled_inside(
    loss_fn: Callable[..., Any], by_scaling: Callable[[tf.Tensor, Callable[[tf.Tensor], list[Any]]], list[Any]]
) -> Callable[..., Any]:
    """Wrap a loss function, so that its gradients are computed from the scaled loss and then unscaled.

    `by_scaling` takes the upstream gradient, and a function that returns the variables' gradients for an upstream
    gradient. It returns the gradients for the upstream gradient that it got. `loss_fn` returns the loss, or a tuple
    that begins with the loss; other parts of the tuple have no gradients.
    """

    def same_loss(*args: Any, **kwargs: Any) -> Any:
        results = []

        def loss_and_gradients() -> Any:
            # The tape is persistent, because the caller's tape may be persistent and request the gradients several
            # times.
            with tf.GradientTape(persistent=True) as tape:
                result = loss_fn(*args, **kwargs)
                loss = _loss_of(result)
            results.append(result)

            def gradients(upstream: Any, variables: Any = ()) -> Any:
                def gradients_of(scaled: tf.Tensor) -> list[Any]:
                    return tape.gradient(loss, variables, output_gradients=scaled)

                return [], by_scaling(upstream, gradients_of)

            return loss, gradients

        loss, (result,) = tf.custom_gradient(loss_and_gradients)(), results
        return _beginning_with(loss, result) if isinstance(result, tuple) else loss

    return same_loss


def _loss_of(result: Any) -> tf.Tensor:
    """Return the loss from a loss function's result.

    A list is rejected, because it may contain either several losses, or one loss and further results.
    """
    part = result[0] if isinstance(result, tuple) and result else result
    try:
        loss = None if isinstance(part, (list, tuple)) else tf.convert_to_tensor(part)
    except (TypeError, ValueError):
        loss = None
    if loss is None or not loss.dtype.is_floating:
        raise TypeError(
            "`loss_fn` must return the loss (a floating-point tensor) or a tuple that begins with the loss, but "
            f"returned: {result!r}. If there are several losses, add them up. Return further results in a tuple, not "
            "in a list."
        )
    return loss


def _beginning_with(loss: tf.Tensor, result: tuple[Any, ...]) -> tuple[Any, ...]:
    rest = [tf.stop_gradient(part) if tf.is_tensor(part) else part for part in tf.nest.flatten(result[1:])]
    parts = (loss, *tf.nest.pack_sequence_as(result[1:], rest))
    return type(result)._make(parts) if hasattr(result, "_make") else parts
