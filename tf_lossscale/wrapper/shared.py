"""One loss scale for several optimizers that step together or not at all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale.core import compiled_steps
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.rules import Rules, with_rules
from tf_lossscale.core.state import DynamicLossScale
from tf_lossscale.core.step import Update, take_step


class SharedLossScale(DynamicLossScale):
    """One loss scale for several optimizers. An overflow in any of them skips the steps of all of them.

    Use it for GANs and for models with several losses. Pass the object to each optimizer as
    `loss_scale_manager`, and take the optimizers' steps inside a `with shared.together():` block.

    >>> import tf_lossscale
    >>> shared = tf_lossscale.SharedLossScale(initial_scale=1024)
    >>> a, b = tf.Variable(1.0), tf.Variable(1.0)
    >>> first, second = (
    ...     tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale_manager=shared)
    ...     for _ in range(2)
    ... )
    >>> with shared.together():
    ...     _ = first.minimize(lambda: a**2, [a])
    ...     _ = second.minimize(lambda: b * float("inf"), [b])
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

    traceable = True

    @with_rules
    def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000, **rules: Any):
        super().__init__(initial_scale, Rules(dynamic_growth_steps, **rules))

    @contextlib.contextmanager
    def together(self) -> Iterator[TogetherStep]:
        """Join the steps taken in a `with` block. At the end of the block, all steps are applied or all are skipped.

        The method works in eager mode, in a `tf.function` and in each replica of a strategy. If the block raises an
        error, no step is applied.

        Yields:
            The joint step. In a TF1 graph, run its `operation` attribute in a session. The attribute is set at the
            end of the block.

        Raises:
            RuntimeError: the block is nested in another `together` block of the same scale.
            ValueError: only some of the optimizers got gradients that are already summed over the replicas.
        """
        if self._open_step is not None:
            raise RuntimeError("together() cannot be nested. Take all steps in one block.")
        together = _open.steps[id(self)] = TogetherStep()
        try:
            yield together
        finally:
            del _open.steps[id(self)]
        if together.members:
            self._step_together(together)

    @do_not_convert
    def _step_together(self, together: TogetherStep) -> None:
        result = take_step(self, _JointUpdate([update for _, update in together.members]))
        if result is False:
            for optimizer, _ in together.members:
                optimizer._report_stall()
        together.operation = None if tf.executing_eagerly() else result

    @property
    def _open_step(self) -> TogetherStep | None:
        return _open.steps.get(id(self))

    def defer(self, optimizer: Any, update: Update) -> bool:
        """Store an optimizer's update, which will be applied or skipped at the end of the `together` block.

        Args:
            optimizer: the optimizer that takes the step.
            update: the optimizer's update.

        Returns:
            True, because this loss scale defers every update.

        Raises:
            RuntimeError: the call is not inside `together`.
            ValueError: the gradients of only some updates in the block are already summed over the replicas.
        """
        if self._open_step is None:
            raise RuntimeError(
                f"This {type(optimizer).__name__} shares its loss scale, so it can only step inside `with "
                "shared.together():`. Put all calls that apply gradients into one such block, "
                "inside strategy.run and inside the tf.function."
            )
        if any(other.aggregate != update.aggregate for _, other in self._open_step.members):
            raise ValueError(
                "Optimizers that step together must all get gradients that are already summed over the replicas, or "
                "all get gradients that are not. Pass skip_gradients_aggregation=True to all of them, or to none."
            )
        self._open_step.members.append((optimizer, update))
        return True


class TogetherStep:
    """The joint step of several optimizers, which `SharedLossScale.together` yields.

    >>> TogetherStep().operation is None
    True
    """

    def __init__(self) -> None:
        self.members: list[tuple[Any, Update]] = []
        #: In a TF1 graph, the operation that a session runs to take the step. It is set at the end of the
        #: `together` block.
        self.operation: Any = None


class _JointUpdate(Update):
    """The updates of several optimizers, which are all applied or all skipped."""

    def __init__(self, updates: list[Update]):
        self._updates = updates
        self._ends: list[int] = []
        self.aggregate = updates[0].aggregate
        self.observes = any(update.observes for update in updates)
        self.to_compile = compiled_steps.joined([update.to_compile for update in updates])

    def count_exponents(self) -> list[tf.Operation]:
        return [counted for update in self._updates for counted in update.count_exponents()]

    def unscaled_gradients(self) -> list[Any]:
        each = [update.unscaled_gradients() for update in self._updates]
        self._ends = list(itertools.accumulate(map(len, each)))
        return [gradient for own in each for gradient in own]

    def _with_own(self, gradients: list[Any]) -> list[tuple[Update, list[Any]]]:
        """Return (update, gradients) pairs: each optimizer's update with the gradients of this optimizer."""
        return [(u, gradients[a:b]) for u, a, b in zip(self._updates, [0, *self._ends], self._ends)]

    def may_differ(self) -> bool:
        return any(update.may_differ() for update in self._updates)

    def reduce(self, gradients: list[Any]) -> list[Any]:
        return [reduced for update, own in self._with_own(gradients) for reduced in update.reduce(own)]

    def apply(self, gradients: list[Any]) -> Any:
        return [update.apply(own) for update, own in self._with_own(gradients)]

    def skip(self) -> Any:
        return [update.skip() for update in self._updates]

    def observe(self, applied: tf.Tensor, gradients: list[Any], checked: list[Any]) -> Any:
        each = zip(self._with_own(gradients), self._with_own(checked))
        return [
            update.observe(applied, own, own_checked) for (update, own), (_, own_checked) in each if update.observes
        ]


class _Open(threading.local):
    """The joint steps that are open in the current thread. Each replica runs in its own thread."""

    def __init__(self) -> None:
        # Maps the `id` of each SharedLossScale to its open joint step.
        self.steps: dict[int, TogetherStep] = {}


_open = _Open()
