"""Sonnet 2: optimizers with `apply(updates, parameters)`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import sonnet
import tensorflow as tf

from tf_lossscale.core.variables import readable
from tf_lossscale.wrapper import optimizer

# Method -> whether the gradients of the next `apply` are scaled.
_APPLY = {"scale_loss": True, "get_unscaled_gradients": False}


# Apart from the class below, since Sonnet's metaclass puts a name scope around each method that it finds in a class.
class _Wrapper(optimizer.LossScaleOptimizer):
    _is_adapter = True
    _inner_options = ()
    _delegated = ("step",)
    _sums_over_replicas = False

    def _adopt(self, options: dict[str, Any]) -> None:
        super()._adopt(options)
        tf.Module.__init__(self, name="loss_scale_optimizer")

    def apply(self, updates: Iterable[Any], parameters: Iterable[Any] | None = None) -> None:
        """Apply updates to the parameters, or skip the step on all replicas if one of them is not finite.

        The updates are gradients of the scaled loss, except after `get_unscaled_gradients`: then they are taken as they
        are. As with every Sonnet optimizer, the caller has reduced them over the replicas.

        Args:
            updates: gradients; None is allowed.
            parameters: the variables, one for each.

        Raises:
            ValueError: the lengths differ, or all updates are None.
            RuntimeError: it is not known whether the updates are scaled.
        """
        super().apply(updates, parameters)

    def _apply_takes_scaled(self, gradients: list[Any]) -> bool:
        scaled = self._contract.takes_scaled(gradients, _APPLY, otherwise=True)
        if scaled:
            self._contract.warn_before_apply()
        return scaled

    def _build_inner(self, variables: list[Any]) -> None:
        if hasattr(self._optimizer, "_initialize"):  # else Sonnet creates the moments on the first step
            with tf.init_scope():
                self._optimizer._initialize(variables)

    def _apply_reduced(self, grads_and_vars: list[tuple[Any, Any]], **kwargs: Any) -> Any:
        return self._optimizer.apply([g for g, _ in grads_and_vars], [v for _, v in grads_and_vars], **kwargs)

    def _advance_iterations(self) -> Any:
        return tf.no_op()  # `step` is part of the moments' state: a skipped step leaves all of it as it was

    def _hyperparameter_names(self) -> tuple[str, ...]:
        arguments = inspect.signature(type(self._optimizer).__init__).parameters
        return tuple(name for name in arguments if name in vars(self._optimizer) and name != "learning_rate")

    @property  # type: ignore[misc]
    def iterations(self) -> Any:
        """The inner optimizer's `step`, where it counts its steps."""
        return readable(self._optimizer.step)


class LossScaleOptimizer(_Wrapper, tf.__internal__.tracking.DelegatingTrackableMixin, sonnet.Optimizer):
    """The wrapper around a Sonnet 2 optimizer."""

    __repr__ = optimizer.LossScaleOptimizer.__repr__
