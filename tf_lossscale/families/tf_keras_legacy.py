"""Adapter for Keras 2's legacy optimizers, the subclasses of OptimizerV2 in `tf_keras.optimizers.legacy`."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, variables
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import family, optimizer, registry, saving
from tf_lossscale.wrapper.checks import CLIPS, require_tensorflow_variables, without_none
from tf_lossscale.wrapper.forwarding import of_inner

tf_keras: Any = keras_versions.keras_2()

_Optimizer = tf_keras.optimizers.legacy.Optimizer
# Keras 2's own loss scale wrapper for legacy optimizers. In graph mode, `compile` checks for this class, which has no
# public name. It cannot be taken from an instance, because creating an instance fails in the scope of a
# ParameterServerStrategy.
_Wrapper: Any = keras_versions.own_class(_Optimizer, "LossScaleOptimizer")
_USUAL_AGGREGATOR = tf_keras.optimizers.legacy.SGD().gradient_aggregator
# Strategies under which legacy optimizers reject the `experimental_aggregate_gradients=False` argument.
_ALWAYS_AGGREGATING = (
    tf.distribute.experimental.CentralStorageStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
)
# In graph mode, Keras 2's session initializes only the variables that were registered with `track_variable`.
variables.tell_of_new(tf_keras.__internal__.backend.track_variable)


class LegacyFamily(family.Family):
    """The adapter for `tf_keras.optimizers.legacy`."""

    _writes_variables_directly = False
    _saving = tf_keras.saving
    _takes_empty_steps = True
    _returns_operations = True
    _slots_need_gradients = True
    _options: tuple[str, ...] = CLIPS
    delegated: tuple[str, ...] = (
        *(*CLIPS, "gradient_aggregator", "gradient_transformers", "_hyper", "_weights", "_slots"),
        *("_hypers_created", "_initial_decay", "_distribution_strategy", "_use_locking"),
    )
    _name_attribute: str | None = "_name"

    def build(self, variables: list[Any]) -> None:
        inner = self.inner
        require_tensorflow_variables(variables, inner)
        _require_no_clipping_in_central_storage(inner)
        replicas.give_copies(inner, ("_iterations",), inner._weights)
        # As in tf_keras, the variables are created in a name scope, so their names begin with the optimizer's name. In
        # a checkpoint, only these names distinguish Adam from Adamax.
        with tf.name_scope(inner._name), tf.init_scope():
            inner._create_all_weights(variables)

    def _gradients(
        self, loss: tf.Tensor, variables: list[Any], grad_loss: Any, tape: tf.GradientTape
    ) -> list[tuple[Any, Any]]:
        return self.inner._compute_gradients(loss, variables, grad_loss, tape)

    # Users can override `_aggregate_gradients` or replace `gradient_aggregator`, for example to sum gradients over
    # workers without a distribution strategy, at any time. Each step looks for such a method.

    def _custom_sum(self) -> Any:
        has_own_aggregator = self.inner.gradient_aggregator is not _USUAL_AGGREGATOR
        custom_sum = family.overridden(self.inner, "_aggregate_gradients", _Optimizer)
        return self.inner._aggregate_gradients if has_own_aggregator else custom_sum

    def _reduces_itself(self, variables: list[Any]) -> bool:
        transform = family.overridden(self.inner, "_transform_unaggregated_gradients", _Optimizer)
        return transform is not None

    def _reduce(self, gradients: list[Any], variables: list[Any], custom_sum: Any) -> list[Any]:
        gradients = without_none(self.inner._transform_unaggregated_gradients, gradients, variables)
        return super()._reduce(gradients, variables, custom_sum)

    def apply(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> Any:
        grads_and_vars = list(zip(gradients, variables))
        takes = self._takes("experimental_aggregate_gradients")
        if takes and not isinstance(tf.distribute.get_strategy(), _ALWAYS_AGGREGATING):
            kwargs = {**kwargs, "experimental_aggregate_gradients": False}
        with family.without_summing(self.inner, "_transform_unaggregated_gradients", "_aggregate_gradients"):
            return self.inner.apply_gradients(grads_and_vars, **kwargs)

    def _replica_variables(self) -> Iterable[tuple[Any, str]]:
        return [(self.inner, name) for name, part in vars(self.inner).items() if isinstance(part, tf.Variable)]

    def hyperparameter_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.inner._hyper if name != "learning_rate")

    def config(self) -> Any:
        return tf_keras.optimizers.serialize(self.inner)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        config = saving.by_registered_name(config, tf_keras.saving)
        return tf_keras.optimizers.deserialize(config, custom_objects=custom_objects, use_legacy_optimizer=True)


@tf_keras.saving.register_keras_serializable("tf_lossscale.legacy")
@registry.named
class LegacyWrapper(optimizer.LossScaleOptimizer, _Wrapper):
    """The wrapper around an optimizer from `tf_keras.optimizers.legacy`."""

    _family_class = LegacyFamily
    _family: LegacyFamily
    # tf_keras checks this attribute before it wraps an optimizer in its own LossScaleOptimizer.
    _is_wrapped_by_loss_scale_optimizer = True
    _HAS_AGGREGATE_GRAD = True

    def _custom_sum(self) -> Any:
        # A subclass of this wrapper may override `_aggregate_gradients`, for example to average over processes.
        return family.overridden(self, "_aggregate_gradients", LegacyWrapper)

    def get_gradients(self, loss: tf.Tensor, params: list[Any]) -> list[Any]:
        return self.get_unscaled_gradients(self._optimizer.get_gradients(self.get_scaled_loss(loss), params))

    def get_updates(self, loss: Any, params: list[Any]) -> list[Any]:
        """Return a list of the operations that take one step in a TF1 graph."""
        return [self.apply_gradients(list(zip(self.get_gradients(loss, params), params)))]

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("lr", "learning_rate"):
            _require_number(name, value)
            # Reading the learning rate creates its variable with dtype float32. If the variable did not exist yet,
            # assigning an integer would create an int32 variable.
            _ = self._optimizer.learning_rate
        elif "_optimizer" in vars(self) and name in self._optimizer._hyper and self._is_delegated(name):
            _require_number(name, value)
        super().__setattr__(name, value)

    # The wrapper has the following methods because old code calls them on optimizers.

    def get_slot(self, var: Any, slot_name: str) -> Any:
        """Return the inner optimizer's slot variable for `var`."""
        slot = self._optimizer.get_slot(var, slot_name)
        if slot is not None:
            _require_not_saved_beside(self._optimizer)
        return slot

    add_slot = of_inner(_Optimizer.add_slot)
    get_slot_names = of_inner(_Optimizer.get_slot_names)
    add_weight = of_inner(_Optimizer.add_weight)
    set_weights = of_inner(_Optimizer.set_weights)
    get_weights = of_inner(_Optimizer.get_weights)
    _get_hyper = of_inner(_Optimizer._get_hyper)
    _set_hyper = of_inner(_Optimizer._set_hyper)
    _create_hypers = of_inner(_Optimizer._create_hypers)
    _create_slots = of_inner(_Optimizer._create_slots)
    _create_all_weights = of_inner(_Optimizer._create_all_weights)
    _aggregate_gradients = of_inner(_Optimizer._aggregate_gradients)
    _restore_slot_variable = of_inner(_Optimizer._restore_slot_variable)

    @property
    def variables(self) -> saving.CallableList:
        """The inner optimizer's variables. `optimizer.variables()` returns the same list."""
        return saving.CallableList(self.weights)

    def _decayed_lr(self, var_dtype: Any) -> Any:
        self._optimizer._create_hypers()
        return self._optimizer._decayed_lr(var_dtype)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        dependency = self._optimizer._lookup_dependency(name, *args)
        # TensorFlow 2.0 to 2.2 saved the inner optimizer in a child object called `base_optimizer`. In checkpoints that
        # newer versions wrote, this object is empty.
        return self._optimizer if dependency is None and name == "base_optimizer" else dependency

    def _create_or_restore_slot_variable(
        self, slot_variable_position: Any, slot_name: str, variable: Any, **kwargs: Any
    ) -> Any:
        # A checkpoint may be restored outside of the strategy's scope, but slots must be created inside the scope.
        with replicas.scope_of(variable):
            return self._optimizer._create_or_restore_slot_variable(
                slot_variable_position, slot_name, variable, **kwargs
            )


LossScaleOptimizer = LegacyWrapper


def _require_number(name: str, value: Any) -> None:
    """Raise an error for a value that the inner optimizer accepts but that makes its next step fail."""
    if not (callable(value) or isinstance(value, numbers.Real) or hasattr(value, "dtype")):
        raise ValueError(
            f"`{name}` must be a number, a scalar tensor, a learning rate schedule or a function, but got: {value!r}."
        )


def _require_not_saved_beside(inner: Any) -> None:
    """Raise an error if the checkpoint being written contains both the wrapper and its inner optimizer."""
    # While TensorFlow writes a checkpoint, it asks each object for its slots, and raises an error if two objects return
    # the same slots.
    saving = sys._getframe(2)
    if saving.f_code.co_name != "serialize_slot_variables":
        return
    if any(each is inner for each in saving.f_locals.get("non_slot_objects", ())):
        raise ValueError(
            f"A checkpoint cannot contain both a LossScaleOptimizer and the inner {type(inner).__name__}, because "
            "TensorFlow saves each slot variable for one optimizer only. Pass only the wrapper, which includes the "
            "inner optimizer: tf.train.Checkpoint(model=model, optimizer=model.optimizer)."
        )


def _require_no_clipping_in_central_storage(inner: Any) -> None:
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.experimental.CentralStorageStrategy):
        return
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        value = getattr(inner, name)
        if value is not None:
            raise ValueError(
                f"`{name}={value!r}` of the inner {type(inner).__name__} does not work under CentralStorageStrategy: "
                "tf_keras's legacy optimizers cannot clip gradients under it. Use the optimizer of the same name in "
                "tf.keras.optimizers or tf_keras.optimizers, or use a different strategy."
            )
