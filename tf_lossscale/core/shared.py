"""One loss scale for several optimizers that step together or not at all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.graphs import do_not_convert

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient


class SharedLossScale(DynamicLossScale):
    """One loss scale for several optimizers. An overflow in any of them skips the steps of all of them.

    Use it for GANs and for models with several losses. Pass the object to each optimizer as
    `loss_scale`, and take the optimizers' steps inside a `with shared.together():` block.

    >>> import tf_lossscale
    >>> shared = tf_lossscale.SharedLossScale(initial_scale=1024)
    >>> a, b = tf.Variable(1.0), tf.Variable(1.0)
    >>> first, second = (
    ...     tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=shared)
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

    @contextlib.contextmanager
    def together(self) -> Iterator[TogetherStep]:
        """Join the steps taken in a `with` block. At the end of the block, all steps are applied or all are skipped.

        The method works in eager mode, in a `tf.function` and in each replica of a strategy. If the block raises an
        error, no step is applied. No variable changes before the end of the block. If one optimizer takes several
        steps, give each step a block of its own.

        Yields:
            The joint step. In a TF1 graph, run its `operation` attribute in a session. The attribute is set at the
            end of the block.

        Raises:
            RuntimeError: the block is nested in another `together` block of the same scale.
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
        members = together.members
        aggregate = all(member.aggregate for member in members)
        gradients = [
            replicas.sum_over_replicas(member.gradients) if member.aggregate and not aggregate else member.gradients
            for member in members
        ]
        ends = list(itertools.accumulate(map(len, gradients)))

        def own(values: list[Any]) -> list[list[Any]]:
            return [values[start:end] for start, end in zip([0, *ends], ends)]

        result = super().step(
            [gradient for each in gradients for gradient in each],
            lambda values: [member.apply(each) for member, each in zip(members, own(values))],
            lambda: [member.skip() for member in members if member.skip],
            aggregate,
            observe=lambda applied, values, checked: [
                member.observe(applied, each, each_checked)
                for member, each, each_checked in zip(members, own(values), own(checked))
                if member.observe
            ],
            jit_compile=all(member.jit_compile for member in members),
        )
        together.operation = None if tf.executing_eagerly() else result

    @property
    def _open_step(self) -> TogetherStep | None:
        return _open.steps.get(id(self))

    def step(
        self,
        gradients: Iterable[Gradient],
        apply: Callable[[list[Any]], object],
        skip: Callable[[], object] | None = None,
        aggregate: bool = True,
        *,
        observe: Callable[[tf.Tensor, list[Any], list[Any]], object] | None = None,
        jit_compile: bool = False,
    ) -> None:
        """Store a step, which is taken at the end of the `together` block.

        Args:
            gradients: as in `LossScale.step`, like all other arguments.
            apply: as in `LossScale.step`.
            skip: as in `LossScale.step`.
            aggregate: as in `LossScale.step`.
            observe: as in `LossScale.step`.
            jit_compile: as in `LossScale.step`. The joint step is compiled if it is True for all steps.

        Raises:
            RuntimeError: the call is not inside `together`.
        """
        if self._open_step is None:
            raise RuntimeError(
                f"This {type(self).__name__} is shared by several optimizers, so they can only step inside `with "
                "shared.together():`. Put all calls that apply gradients into one such block, "
                "inside strategy.run and inside the tf.function."
            )
        self._open_step.members.append(_Member(list(gradients), apply, skip, aggregate, observe, jit_compile))


class _Member(NamedTuple):
    """The arguments of `step` for one of the steps that are taken together."""

    gradients: list[Any]
    apply: Callable[[list[Any]], object]
    skip: Callable[[], object] | None
    aggregate: bool
    observe: Callable[[tf.Tensor, list[Any], list[Any]], object] | None
    jit_compile: bool


class TogetherStep:
    """The joint step of several optimizers, which `SharedLossScale.together` yields.

    >>> TogetherStep().operation is None
    True
    """

    def __init__(self) -> None:
        self.members: list[_Member] = []
        #: In a TF1 graph, the operation that a session runs to take the step. It is set at the end of the
        #: `together` block.
        self.operation: Any = None


class _Open(threading.local):
    """The joint steps that are open in the current thread. Each replica runs in its own thread."""

    def __init__(self) -> None:
        # Maps the `id` of each SharedLossScale to its open joint step.
        self.steps: dict[int, TogetherStep] = {}


_open = _Open()
