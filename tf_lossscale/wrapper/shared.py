"""One loss scale for several optimizers that step together or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tf_lossscale.core import replicas
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.graphs import do_not_convert

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Variable


class SharedLossScale(DynamicLossScale):
    """One loss scale for several optimizers. An overflow in any of them skips the steps of all of them.

    Use it for models with several losses. Pass the object to each optimizer as `loss_scale`, and take the steps of all
    optimizers in one call.

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> shared = tf_lossscale.SharedLossScale(initial_scale=1024)
    >>> a, b = tf.Variable(1.0), tf.Variable(1.0)
    >>> first, second = (
    ...     tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=shared)
    ...     for _ in range(2)
    ... )
    >>> gradients_of_a = first.compute_gradients(lambda: a**2, [a])
    >>> gradients_of_b = second.compute_gradients(lambda: b * float("inf"), [b])
    >>> shared.apply_gradients([(first, gradients_of_a), (second, gradients_of_b)])
    False
    >>> a.numpy().item(), b.numpy().item(), first.loss_scale.numpy().item()
    (1.0, 1.0, 512.0)

    Args:
        initial_scale: the scale to start with.
        dynamic_growth_steps: the number of finite steps in a row after which the scale grows.
        **rules: `growth_factor`, `backoff_factor`, `hysteresis`, `min_scale` and `max_scale`, as in
            `LossScaleOptimizer`.

    Raises:
        TypeError: an argument is not a number, or a keyword is unknown.
        ValueError: an argument is out of range.
    """

    @do_not_convert
    def apply_gradients(
        self,
        optimizers_and_gradients: Iterable[tuple[Any, Iterable[tuple[Gradient, Variable]]]],
        skip_gradients_aggregation: bool = False,
    ) -> Any:
        """Apply the gradients of all optimizers, or skip the step of all if any gradient is not finite.

        Args:
            optimizers_and_gradients: pairs of an optimizer and its `grads_and_vars`, as `apply_gradients` of the
                optimizer takes them.
            skip_gradients_aggregation: True if the gradients are already summed over the replicas.

        Returns:
            Whether the step was applied: in eager mode a bool; in a graph a bool scalar tensor, which a session runs to
            take the step.

        Raises:
            TypeError: an optimizer overrides `apply_gradients`, which this method does not call.
            ValueError: there are no optimizers, or an optimizer has a different loss scale.
        """
        pairs = list(optimizers_and_gradients)
        for optimizer, _ in pairs:
            self._require_member(optimizer)
        if not pairs:
            raise ValueError("`optimizers_and_gradients` must contain (optimizer, grads_and_vars) pairs, but is empty.")
        updates = [optimizer._checked_update(grads, not skip_gradients_aggregation, {}) for optimizer, grads in pairs]
        # The step sums all gradients or none. If some are summed already, the others are summed here.
        aggregate = all(update.aggregate for update in updates)
        gradients = [
            replicas.sum_over_replicas(update.gradients) if update.aggregate and not aggregate else update.gradients
            for update in updates
        ]
        ends = list(itertools.accumulate(map(len, gradients)))

        def of_each(values: list[Any]) -> Iterable[tuple[Any, list[Any]]]:
            return zip(updates, [values[start:end] for start, end in zip([0, *ends], ends)])

        applied = self._step(
            [gradient for of_one in gradients for gradient in of_one],
            lambda values: [update.apply(own) for update, own in of_each(values)],
            lambda: [update.skip() for update in updates],
            aggregate,
        )
        for (optimizer, _), update in zip(pairs, updates):
            optimizer._record(update)
        return applied

    def _require_member(self, optimizer: Any) -> None:
        if getattr(optimizer, "scaler", None) is not self:
            raise ValueError(
                f"Each optimizer must be a LossScaleOptimizer(..., loss_scale=shared) with this loss scale, but got: "
                f"{optimizer!r}."
            )
        if optimizer._overrides_apply_gradients():
            raise TypeError(
                f"{type(optimizer).__name__} overrides apply_gradients(), which shared.apply_gradients() does not "
                "call. Change the gradients before you pass them, or wrap the optimizer in LossScaleOptimizer itself."
            )
