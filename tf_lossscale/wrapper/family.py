"""Family: every question that an adapter answers about its optimizers, with the default answer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, scaling
from tf_lossscale.wrapper import options
from tf_lossscale.wrapper.grads_and_vars import tensors_of


class Family:
    """The differences between optimizer libraries. An adapter overrides what is declared here, and no other hook.

    The methods with `inner` or `optimizer` as their first argument are static: `migrate` calls them for optimizers
    that are not wrapped.

    >>> Family()._takes_empty_steps
    False
    """

    # The state of every wrapper.
    _optimizer: Any
    _loss_scale: Any
    _contract: Any
    _stall: Any
    _diagnosis: Any
    _clusters: Any
    _traced: bool

    def _require_answers(self, inner: Any) -> None:
        """Raise if the adapter lacks an answer that a step needs, also one that only a skipped step needs."""
        unanswered = [hook for hook in _NEEDED if getattr(type(self), hook) is getattr(Family, hook)]
        if hasattr(type(inner), "iterations") or "iterations" in getattr(inner, "__dict__", ()):
            unanswered = [hook for hook in unanswered if hook != "_advance_iterations"]
        for hook in unanswered:
            raise _missing(self, *_NEEDED[hook])

    # Building. --------------------------------------------------------------------------------------------------

    #: Whether instances have this very class: True in an adapter.
    _is_adapter = False
    #: Whether a variable without a gradient gets no slots: old checkpoints have none for it.
    _slots_need_gradients = False

    def _build_inner(self, variables: list[Any]) -> None:
        """Create the inner optimizer's variables, so that a first step that is skipped leaves it complete."""
        raise _missing(self, *_NEEDED["_build_inner"])

    def _known_variables(self) -> list[Any] | None:
        """Return the variables that the inner optimizer was built for; None if it does not keep them."""
        return None

    def _parts_changed(self) -> None:
        """Drop what the library caches of the inner optimizer's parts: the loss scale has become one of them."""

    # Reducing. --------------------------------------------------------------------------------------------------

    #: Whether a step sums the gradients over the replicas; False if the library leaves that to the caller.
    _sums_over_replicas = True
    #: Whether `apply_gradients` without any pair is a finite step; if not, it is an error.
    _takes_empty_steps = False
    #: Whether the optimizers return the operations of an update, which a legacy graph needs.
    _returns_operations = False

    def _factor(self) -> tf.Tensor:
        """Return the factor of the loss, a float32 scalar."""
        return self._loss_scale()

    def _gradients(
        self, loss: tf.Tensor, variables: list[Any], grad_loss: Any, tape: tf.GradientTape
    ) -> list[tuple[Any, Any]]:
        """Return the (gradient, variable) pairs of a scaled loss."""
        return list(zip(tape.gradient(loss, tensors_of(variables), grad_loss), variables))

    def _apply_takes_scaled(self, gradients: list[Any]) -> bool:
        """Return whether the gradients given to `apply` are scaled; called once for each call of `apply`."""
        self._contract.require_not_unscaled(gradients)
        self._contract.warn_before_apply()
        self._contract.update_follows()
        return True

    def _unscale(self, gradients: list[Any], variables: list[Any], factor: tf.Tensor) -> list[Any]:
        """Divide the gradients given to `apply` by the factor of the loss."""
        del variables
        return self._quotients(gradients, factor)

    def _quotients(self, gradients: Iterable[Any], factor: tf.Tensor) -> list[Any]:
        """Divide gradients by the factor of the loss."""
        return scaling.unscale(gradients, factor)

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Sum the gradients over the replicas, in a replica context."""
        del variables
        return replicas.sum_over_replicas(gradients)

    # Applying. --------------------------------------------------------------------------------------------------

    def _apply_reduced(self, grads_and_vars: list[tuple[Any, Any]], **kwargs: Any) -> Any:
        """Apply reduced gradients with the inner optimizer, without reducing them again."""
        raise _missing(self, *_NEEDED["_apply_reduced"])

    def _obstacle(self) -> str | None:
        """Return why the inner optimizer's update cannot be compiled; None if nothing is known against it."""
        if getattr(self._optimizer, "has_step_hooks", False):
            return "the optimizer's step hooks are Python functions"
        scale = type(self._loss_scale)
        return None if vars(scale).get("traceable") else f"a {scale.__name__} may run Python code in each step"

    #: Attributes of the inner optimizer that each step sets before it reads them.
    _set_in_each_step: tuple[str, ...] = ()

    def _own_copies(self) -> Iterable[tuple[Any, str]]:
        """Return (object, attribute) of each variable of which every replica writes its own copy in a step."""
        return ()

    def _eager_result(self) -> Any:
        """Return the result of `apply_gradients` in eager mode."""
        return None

    # Counting. --------------------------------------------------------------------------------------------------

    def _advance_iterations(self) -> Any:
        """Count a step that was skipped."""
        return self._optimizer.iterations.assign_add(1)

    def _start_averages(self) -> Any:
        """Start, in a skipped step, the averages that the inner optimizer would start in its first step."""
        return None

    # Hyperparameters. -------------------------------------------------------------------------------------------

    #: Attributes of the inner optimizer that are read and set through the wrapper, beside its hyperparameters.
    _delegated: tuple[str, ...] = ("clipnorm", "clipvalue", "global_clipnorm")

    def _hyperparameter_names(self) -> tuple[str, ...]:
        """Return the names of the inner optimizer's hyperparameters, without `learning_rate`."""
        return tuple(getattr(self._optimizer, "hyperparameter_names", ()))

    # Options. ---------------------------------------------------------------------------------------------------

    #: Keyword arguments of the constructor that the family's optimizers have, and that are set on them.
    _inner_options: tuple[str, ...] = ("clipnorm", "clipvalue", "global_clipnorm")

    def _checked_options(self, inner: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that must be set on the inner optimizer, or raise and change nothing."""
        wanted = options.checked(inner, given, self._inner_options)
        if wanted and self._is_built(inner):
            raise ValueError(
                f"`{next(iter(wanted))}` must be set before the inner {type(inner).__name__} is built, but it is "
                "built. Wrap the optimizer before its first step."
            )
        return wanted

    def _adopt(self, options: dict[str, Any]) -> None:
        """Set the options on the inner optimizer, and on the wrapper what its library's base class needs."""
        for name, value in options.items():
            setattr(self._optimizer, name, value)

    # Configs and copies. ----------------------------------------------------------------------------------------

    def _serialized_inner(self) -> Any:
        """Return the config of the inner optimizer."""
        raise _without_config(type(self._optimizer).__name__)

    @classmethod
    def _deserialized_inner(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        """Return an optimizer made from what `_serialized_inner` returned."""
        del config, custom_objects
        raise _without_config("The inner optimizer")

    def _copied_inner(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the inner optimizer, with its state."""
        return copy.deepcopy(self._optimizer, memo)

    # Restoring, for `migrate`. ---------------------------------------------------------------------------------

    #: The library's module of optimizer classes; None for a family that `migrate` cannot restore.
    _optimizers: Any = None
    #: The name of that module in users' code.
    _optimizers_name = ""
    #: Whether slots are lists of variables, as in Keras 3 and tf_keras; False for TensorFlow 2's slots and formulas.
    _slots_are_lists = True
    #: Nadam's attribute with the product of its momenta, and the decay of its schedule.
    _nadam_product = ("_u_product", 1.0)

    @staticmethod
    def _is_built(optimizer: Any) -> bool:
        """Return whether an optimizer has its slots; then it takes no new options."""
        del optimizer
        return False

    @staticmethod
    def _build(optimizer: Any, variables: list[Any]) -> None:
        """Create the slots of an optimizer, bare or in a wrapper of any library."""
        optimizer.build(variables)

    @staticmethod
    def _slot_of(inner: Any, variable: Any, slot: str, attribute: str) -> Any:
        """Return a variable's slot, named as in TensorFlow 2 and by its list in Keras 3; None if there is none."""
        raise _missing(inner, "_slot_of(inner, variable, slot, attribute)", "find a slot")

    @staticmethod
    def _set_iterations(inner: Any, value: int) -> None:
        """Set the count of steps."""
        inner.iterations.assign(value)

    @staticmethod
    def _given_learning_rate(inner: Any) -> Any:
        """Return the learning rate as it is kept: a variable, a number, a function or a schedule."""
        return getattr(inner, "_learning_rate", None)

    @staticmethod
    def _with_layer_names(objects: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Return the objects of a checkpoint, also under the names that the library has for layers and weights."""
        return objects


# Hook -> how it is called, and its purpose. The default of the last one is for optimizers with `iterations`.
_NEEDED = {
    "_build_inner": ("_build_inner(variables)", "create the inner optimizer's variables"),
    "_apply_reduced": ("_apply_reduced(grads_and_vars, **kwargs)", "apply reduced gradients"),
    "_advance_iterations": ("_advance_iterations()", "count a skipped step, as the optimizer has no `iterations`"),
}


def _missing(of: Any, hook: str, purpose: str) -> NotImplementedError:
    return NotImplementedError(
        f"The adapter for {type(of).__name__} must define {hook} to {purpose}. "
        "See tf_lossscale/wrapper/family.py and CONTRIBUTING.md."
    )


def _without_config(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no config, and so its LossScaleOptimizer has none. Save it with tf.train.Checkpoint."
    )
