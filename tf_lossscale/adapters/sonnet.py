"""Sonnet 2: optimizers with `apply(updates, parameters)`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import sonnet
import tensorflow as tf

from tf_lossscale.core.step import Part
from tf_lossscale.wrapper import contract, optimizer


# Apart from the class below, since Sonnet's metaclass puts a name scope around each method that it finds in a class.
class _Wrapper(optimizer.LossScaleOptimizer):
    _is_adapter = True
    _inner_options = ()
    _delegated = ("step",)

    def _adopt(self, options: dict[str, Any]) -> None:
        super()._adopt(options)
        tf.Module.__init__(self, name="loss_scale_optimizer")
        self.__dict__.update(_trackable=self._optimizer)

    def apply(self, updates: Iterable[Any], parameters: Iterable[Any] | None = None) -> None:
        """Applies updates to the parameters, or skips the step on all replicas if one of them is not finite.

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
        scaled = self._contract.takes_scaled(gradients, contract.SONNET_APPLY, otherwise=True)
        if scaled:
            self._contract.warn_before_apply()
        return scaled

    def _part(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> Part:
        return super()._part(gradients, variables, **{**kwargs, "aggregate": False})

    def _build_inner(self, variables: list[Any]) -> None:
        if hasattr(self._optimizer, "_initialize"):  # Sonnet makes moments on the first step, or when told so
            with tf.init_scope():
                self._optimizer._initialize(variables)

    def _apply_reduced(self, grads_and_vars: list[tuple[Any, Any]], **kwargs: Any) -> Any:
        return self._optimizer.apply([g for g, _ in grads_and_vars], [v for _, v in grads_and_vars], **kwargs)

    def _require_keywords(self, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise TypeError(
                f"apply_gradients() got an unexpected keyword argument '{next(iter(kwargs))}': optimizers of Sonnet "
                "take none."
            )

    def _advance_iterations(self) -> Any:
        return tf.no_op()  # `step` is part of the moments' state: a skipped step leaves all of it as it was

    def _hyperparameter_names(self) -> tuple[str, ...]:
        arguments = inspect.signature(type(self._optimizer).__init__).parameters
        return tuple(name for name in arguments if name in vars(self._optimizer) and name != "learning_rate")

    @property  # type: ignore[misc]
    def iterations(self) -> Any:
        """The inner optimizer's `step`, where it counts its steps."""
        return self._optimizer.step

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(
            "Sonnet optimizers have no config, and so their wrapper has none. Save it with tf.train.Checkpoint."
        )


class LossScaleOptimizer(_Wrapper, tf.__internal__.tracking.DelegatingTrackableMixin, sonnet.Optimizer):
    """The wrapper around a Sonnet 2 optimizer."""

    __repr__ = optimizer.LossScaleOptimizer.__repr__
