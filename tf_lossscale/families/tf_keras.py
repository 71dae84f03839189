"""Adapter for the optimizers in `tf_keras.optimizers`, which TensorFlow 2.15 calls `tf.keras.optimizers`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, scaling
from tf_lossscale.core.graphs import operations
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import family, forwarding, optimizer, registry, saving
from tf_lossscale.wrapper.checks import CLIPS, require_tensorflow_variables
from tf_lossscale.wrapper.forwarding import of_inner

tf_keras: Any = keras_versions.keras_2()
# The class that tf_keras publishes as `mixed_precision.LossScaleOptimizer`. It is the last base class of the wrapper
# that tf_keras itself uses.
_OwnWrapper: Any = keras_versions.own_class(tf_keras.optimizers.Optimizer, "LossScaleOptimizerV3")
_BaseLossScaleOptimizer: Any = _OwnWrapper.__bases__[-1]


class TFKerasFamily(family.Family):
    """The adapter for `tf_keras.optimizers`."""

    _minimizes_without_variables = True
    _writes_variables_directly = False
    _saving = tf_keras.saving
    _options: tuple[str, ...] = (*CLIPS, "weight_decay", "use_ema", "ema_momentum", "ema_overwrite_frequency")
    # The wrapper delegates `name`, because tf_keras includes the name in the warning that it logs if a saved file does
    # not fit the optimizer.
    delegated: tuple[str, ...] = (
        *(*CLIPS, "use_ema", "ema_momentum", "jit_compile", "name"),
        *("_iterations", "_learning_rate", "_mesh", "_run_with_dtensor"),
    )
    _name_attribute: str | None = "name"

    def __init__(self, inner: Any):
        super().__init__(inner)
        self._variables: list[weakref.ref[Any]] = []

    def _custom_sum(self) -> Any:
        # A user may override this method to sum gradients over workers without a distribution strategy.
        return family.overridden(self.inner, "aggregate_gradients", tf_keras.optimizers.Optimizer)

    def _parts_changed(self) -> Any:
        # When an optimizer is first saved or restored, tf_keras caches a list of the objects that the optimizer tracks.
        # These objects have changed, so the cached list is deleted.
        vars(self.inner).pop("_coalesced_children", None)

    def _unscale(self, gradients: list[Any], factor: tf.Tensor, variables: list[Any] | None = None) -> list[Any]:
        # `gradients.unscale` uses an optimization barrier, which DTensor neither supports nor needs.
        if not self.inner._mesh:
            return super()._unscale(gradients, factor, variables)
        return [
            scaling.over_values(lambda values: scaling.divide(values, factor), gradient)
            for gradient in scaling.floating(gradients)
        ]

    def build(self, variables: list[Any]) -> None:
        inner = self.inner
        require_tensorflow_variables(variables, inner)
        if tf.distribute.has_strategy():
            # tf_keras records the strategy in the optimizer's constructor, which may run outside of the strategy's
            # scope.
            inner._distribution_strategy = tf.distribute.get_strategy()
        replicas.give_copies(inner, ("_iterations", "_learning_rate", "_current_learning_rate"), inner._variables)
        # tf_keras does not store the variables that an optimizer is built for, so the adapter stores them.
        if not self._is_built:
            self._variables = [weakref.ref(variable) for variable in variables]
        with tf.init_scope():
            inner.build(variables)

    @property
    def _is_built(self) -> bool:
        return getattr(self.inner, "_built", False)

    def known_variables(self) -> list[Any] | None:
        variables = [variable() for variable in self._variables]
        return variables if variables and all(variable is not None for variable in variables) else None

    def _gradients(
        self, loss: tf.Tensor, variables: list[Any], grad_loss: Any, tape: tf.GradientTape
    ) -> list[tuple[Any, Any]]:
        # The inner optimizer's `compute_gradients` has no `grad_loss` argument.
        if grad_loss is not None:
            return super()._gradients(loss, variables, grad_loss, tape)
        return self.inner.compute_gradients(loss, variables, tape)

    def apply(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> Any:
        grads_and_vars = list(zip(gradients, variables))
        if self._takes("skip_gradients_aggregation"):
            kwargs = {**kwargs, "skip_gradients_aggregation": True}
        with family.without_summing(self.inner, "aggregate_gradients"):
            return self.inner.apply_gradients(grads_and_vars, **kwargs)

    def count_skipped_step(self) -> Any:
        # In eager mode, Nadam compares `_u_product_counter` with `iterations` to update its momentum product once per
        # step. A skipped step therefore increments both.
        if tf.executing_eagerly() and hasattr(self.inner, "_u_product_counter"):
            self.inner._u_product_counter += 1
        if tf.executing_eagerly() or not hasattr(self.inner, "_u_product"):
            return super().count_skipped_step()
        # In a traced function, some of Nadam's steps read its momentum product without updating it first. If the first
        # step was skipped, the product is still 1, and Nadam would divide by zero.
        product = self.inner._u_product
        step = tf.cast(self.inner.iterations + 1, product.dtype)
        first = tf.cast(self.inner.beta_1, product.dtype) * (1.0 - 0.5 * tf.pow(tf.cast(0.96, product.dtype), step))
        started = product.assign(tf.where(tf.equal(product, 1.0), first, product))
        with tf.control_dependencies(operations(started)):
            return [started, super().count_skipped_step()]

    def _replica_variables(self) -> Iterable[tuple[Any, str]]:
        return [(self.inner, "_iterations")]

    def hyperparameter_names(self) -> tuple[str, ...]:
        return forwarding.names(self.inner)

    def config(self) -> Any:
        # If TensorFlow 2 behavior is disabled, Keras 2's `fit` reads the config in order to create a legacy optimizer
        # from it. In a TF1 graph the inner optimizer cannot train, so raise an error that names alternatives.
        if not tf.__internal__.tf2.enabled():
            self._require_graph_mode()
        return tf_keras.optimizers.serialize(self.inner)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        config = saving.by_registered_name(config, tf_keras.saving)
        # Keras 2 cannot look up its own Lion and Adafactor by name. In TensorFlow 2.15, it cannot look up AdamW either.
        classes = {name: getattr(tf_keras.optimizers, name) for name in ("Adafactor", "AdamW", "Lion")}
        classes.update(custom_objects or {})
        return tf_keras.optimizers.deserialize(config, custom_objects=classes)

    def _copied(self, memo: dict[int, Any]) -> Any:
        # A tf_keras optimizer refers to its strategy. A strategy cannot be copied, so the copy of the optimizer refers
        # to the same strategy.
        strategy = self.inner._distribution_strategy
        memo[id(strategy)] = strategy
        return super()._copied(memo)


@tf_keras.saving.register_keras_serializable("tf_lossscale")
@registry.named
class TFKerasWrapper(
    optimizer.LossScaleOptimizer,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    tf_keras.optimizers.Optimizer,
    _BaseLossScaleOptimizer,
):
    """The wrapper around an optimizer from `tf_keras.optimizers`."""

    _family_class = TFKerasFamily
    _family: TFKerasFamily
    # tf_keras checks this attribute before it wraps an optimizer in its own LossScaleOptimizer.
    _is_wrapped_by_loss_scale_optimizer = True

    def _init_base(self) -> None:
        if self._optimizer._mesh:
            _move_to_mesh(self.scaler, self._optimizer._mesh)

    def _custom_sum(self) -> Any:
        # A subclass of this wrapper may override `aggregate_gradients`, for example to average over processes.
        return family.overridden(self, "aggregate_gradients", TFKerasWrapper)

    aggregate_gradients = of_inner(tf_keras.optimizers.Optimizer.aggregate_gradients)

    finalize_variable_values = optimizer.finalize_variable_values
    exclude_from_weight_decay = of_inner(tf_keras.optimizers.Optimizer.exclude_from_weight_decay)

    def get_updates(self, loss: Any, params: list[Any]) -> list[Any]:
        """Raise the error that `apply_gradients` raises in a TF1 graph.

        Keras 2's `fit` calls `get_updates` only in TF1 graphs.
        """
        return [self.apply_gradients(list(zip(self.get_gradients(loss, params), params)))]


LossScaleOptimizer = TFKerasWrapper


def _move_to_mesh(loss_scale: Any, mesh: Any) -> None:
    """Move a loss scale's variables and their values to a DTensor mesh, where each device has a copy."""
    dtensor = tf.experimental.dtensor
    for (graph, name), variable in list(loss_scale._variables_by_name.items()):
        layout = dtensor.Layout.replicated(mesh, rank=variable.shape.rank)
        value = dtensor.copy_to_mesh(variable.read_value(), layout)
        moved = loss_scale._variables_by_name[graph, name] = dtensor.DVariable(value, trainable=False, name=name)
        if name in loss_scale._tracked_names:
            loss_scale._track_trackable(moved, name, overwrite=True)
