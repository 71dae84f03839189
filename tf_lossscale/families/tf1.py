"""Adapter for TensorFlow 1's optimizers (`tf.compat.v1.train`), in TF1 graphs and in eager mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import replicas, scaling
from tf_lossscale.wrapper import family, optimizer, registry
from tf_lossscale.wrapper.checks import as_list
from tf_lossscale.wrapper.forwarding import of_inner

_Optimizer: Any = tf.compat.v1.train.Optimizer
# Type checkers do not know TensorFlow 1's class.
if TYPE_CHECKING:
    _Base = object
else:
    _Base = _Optimizer


class TF1Family(family.Family):
    """The adapter for the optimizers in `tf.compat.v1.train`."""

    _writes_variables_directly = False
    _slots_need_gradients = True
    _returns_operations = True
    delegated: tuple[str, ...] = ("_lr", "_learning_rate")

    def build(self, variables: list[Any]) -> None:
        def build() -> None:
            with tf.init_scope():
                self.inner._create_slots(variables)

        replicas.once(build)

    def apply(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> Any:
        if replicas.several_replicas():
            # The gradients are already summed over the replicas, but TensorFlow 1's optimizers sum them again. One
            # replica therefore passes the sum, and the other replicas pass zeros. The zeros have the gradient's shape:
            # if `disable_v2_behavior` was called, a scalar zero would keep the weights from being trained.
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            gradients = [
                scaling.over_values(lambda values: tf.where(first, values, tf.zeros_like(values)), gradient)
                for gradient in gradients
            ]
        return self.inner.apply_gradients(list(zip(gradients, variables)), **kwargs)

    def count_skipped_step(self) -> Any:
        # The steps are counted only in `global_step`, which a skipped step does not increment.
        return tf.no_op()

    @property
    def learning_rate_name(self) -> str:
        return "_lr" if hasattr(self.inner, "_lr") else "_learning_rate"


@registry.named
class TF1Wrapper(optimizer.LossScaleOptimizer, _Base):
    """The wrapper around a `tf.compat.v1.train.Optimizer`.

    Its methods accept the same arguments as the inner optimizer's methods.
    """

    _family_class = TF1Family
    _family: TF1Family

    def _init_base(self) -> None:
        _Optimizer.__init__(self, use_locking=False, name=self._optimizer.get_name())

    def compute_gradients(self, loss: Any, var_list: Any = None, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Scale a loss, compute its gradients, and unscale them.

        Args:
            loss: a tensor, or in eager mode a function that returns one.
            var_list: a variable, a list of variables, or a function that returns either. The default is all trainable
                variables in the graph.
            *args: as in `tf.compat.v1.train.Optimizer.compute_gradients`.
            **kwargs: as in `tf.compat.v1.train.Optimizer.compute_gradients`, and additionally `tape`, the tape that
                recorded the loss. In eager mode, `tape` is required if `loss` is a tensor.

        Returns:
            A list of (gradient, variable) pairs.
        """
        tape = kwargs.pop("tape", None)
        if tape is not None:
            return super().compute_gradients(loss, var_list, kwargs.get("grad_loss"), tape)
        if var_list is not None:
            var_list = tf.nest.flatten(as_list(var_list() if callable(var_list) else var_list))
        pairs = self._optimizer.compute_gradients(self.get_scaled_loss(loss), var_list, *args, **kwargs)
        gradients = self.get_unscaled_gradients([g for g, _ in pairs])
        return list(zip(gradients, [v for _, v in pairs]))

    def apply_gradients(  # type: ignore[override]  # TensorFlow 1's arguments
        self, grads_and_vars: Any, global_step: Any = None, name: Any = None, **kwargs: Any
    ) -> Any:
        """Apply unscaled gradients, or skip the step. A skipped step does not increment `global_step`.

        Args:
            grads_and_vars: an iterable of (gradient, variable) pairs.
            global_step: a variable that counts the applied steps.
            name: a name for the operation.
            **kwargs: `experimental_aggregate_gradients` or `skip_gradients_aggregation`.

        Returns:
            In a TF1 graph, the operation that takes the step.
        """
        return super().apply_gradients(grads_and_vars, name, global_step=global_step, **kwargs)

    def minimize(  # type: ignore[override]  # TensorFlow 1's arguments
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: Any = None,
        grad_loss: Any = None,
        tape: Any = None,
    ) -> Any:
        """Take one step: scale the loss, then compute, unscale and apply its gradients.

        Args:
            loss: a tensor, or in eager mode a function that returns one.
            global_step: a variable that counts the applied steps.
            var_list: the variables. The default is all trainable variables in the graph.
            gate_gradients: as in `tf.compat.v1.train.Optimizer.minimize`.
            aggregation_method: as in `tf.compat.v1.train.Optimizer.minimize`.
            colocate_gradients_with_ops: as in `tf.compat.v1.train.Optimizer.minimize`.
            name: a name for the operation.
            grad_loss: the gradient of the final objective with respect to the loss. None stands for a tensor of ones.
            tape: the tape that recorded the loss, in eager mode.

        Returns:
            In a TF1 graph, the operation that takes the step.
        """
        # As in Keras's `minimize(loss, var_list)`, the second argument may be the variables.
        if global_step is not None and not _counts(global_step):
            global_step, var_list = var_list, global_step
        pairs = self.compute_gradients(
            loss,
            var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
            **({} if tape is None else {"tape": tape}),
        )
        return self.apply_gradients(pairs, global_step=global_step, name=name)

    def __getattr__(self, name: str) -> Any:
        if name == "iterations":
            raise AttributeError(
                "Optimizers from tf.compat.v1.train have no `iterations`, because they do not count their steps. Pass "
                "a variable as `global_step` to minimize() or apply_gradients()."
            )
        return super().__getattr__(name)

    get_name: Any = of_inner(_Optimizer.get_name)
    get_slot: Any = of_inner(_Optimizer.get_slot)
    get_slot_names: Any = of_inner(_Optimizer.get_slot_names)
    _restore_slot_variable = of_inner(_Optimizer._restore_slot_variable)
    _create_or_restore_slot_variable = of_inner(_Optimizer._create_or_restore_slot_variable)

    # Checkpoints are written with the names that TensorFlow 1.15's loss scale optimizer used. Checkpoints of an
    # optimizer without a wrapper can be restored as well.

    def __dir__(self) -> list[str]:
        # tf.train.Checkpoint saves the slots of each object that has a `get_slot_names` method. The wrapper hides this
        # method, because the slots are already saved for the inner optimizer.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        del save_type, kwargs
        return {"base_optimizer": self._optimizer, "loss_scale": self.scaler}

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        children = self._trackable_children()
        return children[name] if name in children else self._optimizer._lookup_dependency(name, *args)

    @property
    def _deferred_dependencies(self) -> Any:
        # Values of a checkpoint of an unwrapped optimizer that is restored before the first step creates its variables.
        return self._optimizer._deferred_dependencies


LossScaleOptimizer = TF1Wrapper


def _counts(value: Any) -> bool:
    """Return whether a variable may count steps: it contains integers, or is not trained."""
    return hasattr(value, "dtype") and (tf.as_dtype(value.dtype).is_integer or not getattr(value, "trainable", False))
