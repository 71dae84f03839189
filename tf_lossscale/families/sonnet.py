"""Adapter for Sonnet 2's optimizers, which have an `apply(updates, parameters)` method."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import sonnet
import tensorflow as tf

from tf_lossscale.wrapper import family, optimizer, registry

# Type checkers do not know Sonnet's class.
if TYPE_CHECKING:

    class _Base: ...
else:

    class _Base(tf.__internal__.tracking.DelegatingTrackableMixin, sonnet.Optimizer): ...


class SonnetFamily(family.Family):
    """The adapter for Sonnet 2's optimizers."""

    _writes_variables_directly = False
    delegated: tuple[str, ...] = ("step",)
    sums_over_replicas = False
    _apply_takes_unscaled = True

    def build(self, variables: list[Any]) -> None:
        # An optimizer without `_initialize` creates its moments in the first step.
        if hasattr(self.inner, "_initialize"):
            with tf.init_scope():
                self.inner._initialize(variables)

    def apply(self, gradients: list[Any], variables: list[Any]) -> Any:  # type: ignore[override]
        return self.inner.apply(gradients, variables)

    def count_skipped_step(self) -> Any:
        # A skipped step leaves the optimizer's whole state unchanged, including the step count.
        return tf.no_op()

    def hyperparameter_names(self) -> tuple[str, ...]:
        arguments = inspect.signature(type(self.inner).__init__).parameters
        return tuple(name for name in arguments if name in vars(self.inner) and name != "learning_rate")


# The wrapper's methods are defined in a separate class, because Sonnet's metaclass puts a name scope around each method
# that is defined in a subclass of `sonnet.Optimizer`.
class _Wrapper(optimizer.LossScaleOptimizer):
    _family_class = SonnetFamily
    _family: SonnetFamily

    def _init_base(self) -> None:
        tf.Module.__init__(self, name="loss_scale_optimizer")

    def apply(self, updates: Iterable[Any], parameters: Iterable[Any] | None = None) -> None:
        """Apply updates to the parameters, or skip the step on all replicas if any update is not finite.

        The updates are gradients of the scaled loss, and this method divides them by the loss scale. Updates that
        `get_unscaled_gradients` returned are not divided again. As with every Sonnet optimizer, the caller must first
        reduce the updates over the replicas.

        Args:
            updates: the gradients; each may be None.
            parameters: the variables, one for each update.

        Raises:
            ValueError: the lengths differ, or all updates are None.
            RuntimeError: it is unclear whether the updates are scaled.
        """
        super().apply(updates, parameters)

    @property  # type: ignore[misc]
    def iterations(self) -> Any:
        """The inner optimizer's step count, which Sonnet calls `step`."""
        return self._optimizer.step


@registry.named
class SonnetWrapper(_Wrapper, _Base):
    """The wrapper around a Sonnet 2 optimizer."""

    __repr__: Any = optimizer.LossScaleOptimizer.__repr__


LossScaleOptimizer = SonnetWrapper
