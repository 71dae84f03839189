"""The part of a step that concerns a single wrapper: unscaling, reducing and applying its gradients, and skipping."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas, step
from tf_lossscale.core.compiled_steps import StepToCompile, obstacle
from tf_lossscale.core.graphs import in_xla_context, operations
from tf_lossscale.core.notes import dividend_of
from tf_lossscale.core.scaling import multiplied
from tf_lossscale.wrapper.grads_and_vars import names_of

#: The Python attributes of a variable that affect its update. A compiled step is reused only if they are unchanged.
_TRAITS = ("constraint", "overwrite_with_gradient")


class OptimizerUpdate(step.Update):
    """One update of variables by a wrapper.

    Args:
        optimizer: a LossScaleOptimizer.
        gradients: this replica's gradients, each a tensor, IndexedSlices or None.
        variables: one variable for each gradient.
        scaled: whether the gradients are gradients of the scaled loss.
        aggregate: whether the gradients still have to be summed over the replicas.
        keywords: keyword arguments for the inner optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        scaled: bool,
        aggregate: bool,
        keywords: dict[str, Any],
    ):
        self.optimizer, self._family = optimizer, optimizer._family
        self._gradients, self._variables, self._keywords = gradients, variables, keywords
        self._scaled = scaled
        self.aggregate = aggregate and self._family.sums_over_replicas
        self.observes = optimizer._diagnosis is not None and bool(gradients)

    def prepare(self) -> None:
        """Create the optimizer's missing variables, and decide whether XLA compiles the step."""
        if not tf.executing_eagerly():
            self._family.require_graph_mode()
        optimizer = self.optimizer
        if optimizer._compiled_steps is None or not self._compiles():
            self._build()
            return
        # A compiled step cannot contain a merge call. Each replica therefore writes to its own copy of every variable,
        # and the copies must exist before the step. Inside this block, `once` makes no merge call either.
        with replicas.independent_writes():
            if tf.distribute.has_strategy():
                replicas.once(optimizer._loss_scale.give_copies)
            self._build()
        self.to_compile = self._to_compile()

    def _build(self) -> None:
        variables = self._variables
        if self._family.slots_need_gradients:
            variables = [v for g, v in zip(self._gradients, variables) if g is not None]
        self._family.ensure_built(variables)
        if self.observes:
            self.optimizer._diagnosis.prepare(names_of(self._variables))

    def count_exponents(self) -> list[tf.Operation]:
        exponents = self.optimizer._exponents
        if exponents is None or not self._gradients:
            return []
        return exponents.record(self._names_to_count, self._as_they_arrived, self._current_factor)

    def _current_factor(self) -> tf.Tensor:
        return self.optimizer._factor.current(self.optimizer._loss_scale)

    def _names_to_count(self) -> tuple[str, ...]:
        if any(isinstance(variable, tf.experimental.dtensor.DVariable) for variable in self._variables):
            raise ValueError(
                "Gradients cannot be counted by exponent on a DTensor mesh. Leave out "
                'diagnose="exponents", or count in a run without a mesh.'
            )
        return names_of(self._variables)

    def _as_they_arrived(self) -> list[Any]:
        """Return this replica's scaled gradients, before they are summed over the replicas.

        For an unscaled gradient, return the scaled gradient from which it was computed. If the caller has changed the
        unscaled gradient, return the changed gradient, multiplied by the scale.
        """
        if self._scaled:
            return self._gradients
        scaled_gradients = [dividend_of(gradient) for gradient in self._gradients]
        if all(scaled is not None or g is None for scaled, g in zip(scaled_gradients, self._gradients)):
            return scaled_gradients
        factor = self._current_factor()
        return [
            multiplied(gradient, factor) if scaled is None else scaled
            for scaled, gradient in zip(scaled_gradients, self._gradients)
        ]

    def unscaled_gradients(self) -> list[Any]:
        if not self._scaled:
            return self._gradients
        factor = self.optimizer._factor.for_gradients(self.optimizer._loss_scale)
        return self._family.unscale(self._gradients, factor, self._variables)

    def reduce(self, gradients: list[Any]) -> list[Any]:
        return self._family.reduce(gradients, self._variables)

    def may_differ(self) -> bool:
        return (
            super().may_differ() or self._family.aggregates_itself or any(map(self._family.overwrites, self._variables))
        )

    def apply(self, gradients: list[Any]) -> Any:
        with replicas.local_copies(self._family.replica_variables):
            return self._family.apply(gradients, self._variables, **self._keywords)

    def skip(self) -> list[Any]:
        reported = self.optimizer._stall.before_skip(self.optimizer)
        with tf.control_dependencies(reported), replicas.local_copies(self._family.replica_variables):
            started = self._family.start_averages()
            with tf.control_dependencies(operations(started)):
                # If the caller passed unscaled gradients, `iterations` counts a skipped step, as in TensorFlow 2. If
                # the caller passed scaled gradients, a skipped step is not counted, as in Keras 3.
                counted = None if self._scaled else self._family.count_skipped_step()
                return [*reported, started, counted]

    def observe(self, applied: tf.Tensor, gradients: list[Any], checked: list[Any]) -> Any:
        return self.optimizer._diagnosis.record(names_of(self._variables), applied, gradients, checked)

    def _compiles(self) -> bool:
        """Return whether XLA compiles the step separately. It does not if it is already compiling the caller."""
        if in_xla_context():
            return False
        scale = type(self.optimizer._loss_scale)
        own_rule = None if vars(scale).get("traceable") else f"a {scale.__name__} may run Python code in each step"
        reason = self._family.obstacle() or own_rule or obstacle(self._gradients, self._variables)
        if reason is not None:
            self.optimizer._compiled_steps.log_once(reason)
        return reason is None

    def _to_compile(self) -> StepToCompile:
        """Collect all Python objects that the compiled step depends on."""
        # If a gradient occurs twice in the list, the compiled function takes it as a single argument. `types` therefore
        # also contains, for each gradient, the index of its argument.
        place: dict[int, int] = {}
        types = [
            None if g is None else (g.dtype, g.shape, place.setdefault(id(g), len(place))) for g in self._gradients
        ]
        traits = [getattr(variable, name, None) for variable in self._variables for name in _TRAITS]
        scale = self.optimizer._loss_scale
        arguments = (self._scaled, self.aggregate, self._keywords)
        reads = [tf.distribute.get_strategy(), types, self._variables, traits, arguments, scale, self._family.inner]
        return StepToCompile(
            self.optimizer._compiled_steps, reads, (*self._family.set_in_each_step, *scale.not_in_a_step)
        )
