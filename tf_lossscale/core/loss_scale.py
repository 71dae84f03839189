"""LossScale, the base class of loss scales, with its guarded step; and the fixed loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import gradients as gradients_lib
from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import do_not_convert, finished, operations, runs_in_order
from tf_lossscale.core.variables import LazyVariable, Variables, add, as_number, value_or_zero

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, SameGradient, State


class LossScale(Variables):
    """The base class of loss scales. A loss scale scales losses, unscales gradients, and applies or skips each step.

    It needs no optimizer class: any function that applies gradients will do. Every step does the following::

        gradients = the sums of the gradients over the replicas
        if check(gradients):
            apply(gradients)
        else:
            skip()
        move(applied)

    Derive a class to define how a scale changes. A subclass must define `__call__`. It may override `check`, which
    decides whether to apply a step, and `move`, which changes the scale. Write these methods with TensorFlow's
    operations, because a `tf.function` traces them only once. A class that overrides neither applies every step.

    >>> import tf_lossscale
    >>> class Scheduled(tf_lossscale.LossScale):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.steps = tf.Variable(0.0, trainable=False)
    ...     def __call__(self):
    ...         return 1024.0 / (1.0 + self.steps)
    ...     def move(self, applied):
    ...         return [self.steps.assign_add(1.0)]
    >>> scale, weight = Scheduled(), tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     loss = scale.scale(weight**2)
    >>> gradients = scale.unscale(tape.gradient(loss, [weight]))
    >>> applied = scale.step(gradients, lambda gradients: weight.assign_sub(0.5 * gradients[0]))
    >>> bool(applied), weight.numpy().item(), scale().numpy().item()
    (True, 0.0, 512.0)

    `LossScaleOptimizer(optimizer, loss_scale=scale)` does the same for the optimizers that it knows.
    """

    def __init__(self) -> None:
        # A tf.Module reserves its name in the graph. This module is not called "loss_scale", because the variable of
        # tf.contrib's loss scale manager has that name.
        super().__init__(name="loss_scaling")

    def __call__(self) -> tf.Tensor:
        """Return the current scale, as a float32 scalar tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(), which returns the current scale as a float32 scalar tensor."
        )

    # Scaling. ---------------------------------------------------------------------------------------------------

    @do_not_convert
    def scale(self, loss: Any) -> Any:
        """Multiply the loss by the scale.

        >>> FixedLossScale(8.0).scale(tf.constant(3.0)).numpy().item()
        24.0

        Args:
            loss: a floating-point tensor of any shape, or a nested structure of such tensors.

        Returns:
            The scaled loss, with the same structure and dtypes.

        Raises:
            TypeError: a loss does not have a floating-point dtype.
        """
        return gradients_lib.scale_loss(loss, current_scale(self))

    @do_not_convert
    def unscale(self, gradients: Iterable[SameGradient]) -> list[SameGradient]:
        """Divide the gradients of a scaled loss by the scale.

        If several steps use gradients of the same scale, unscale all of them before the first step, which may change
        the scale.

        >>> [g.numpy().item() for g in FixedLossScale(8.0).unscale([tf.constant(24.0)])]
        [3.0]

        Args:
            gradients: an iterable of floating-point tensors, IndexedSlices or None. IndexedSlices stay sparse, and None
                stays None.

        Returns:
            A list of the unscaled gradients, with the same dtypes.

        Raises:
            TypeError: a gradient does not have a floating-point dtype.
        """
        return gradients_lib.unscale(gradients, current_scale(self))

    # The step. --------------------------------------------------------------------------------------------------

    @do_not_convert
    def step(
        self,
        gradients: Iterable[Gradient],
        apply: Callable[[list[Any]], object],
        skip: Callable[[], object] | None = None,
        aggregate: bool = True,
        *,
        observe: Callable[[tf.Tensor, list[Any], list[Any]], object] | None = None,
        jit_compile: bool = False,
    ) -> Any:
        """Apply gradients on all replicas, or skip the step on all replicas. Then change the scale.

        >>> import tf_lossscale
        >>> scale, weight = tf_lossscale.DynamicLossScale(8.0), tf.Variable(1.0)
        >>> scale.step([tf.constant(float("inf"))], lambda gradients: weight.assign_sub(gradients[0]))
        False
        >>> weight.numpy().item(), scale().numpy().item()
        (1.0, 4.0)

        Args:
            gradients: this replica's unscaled gradients: tensors, IndexedSlices or None.
            apply: a function that applies the gradients. It takes them as a list, summed over the replicas, and must
                not sum them again. It is called on each replica. In a TF1 graph it returns the operations to run.
            skip: a function without arguments that is called in place of `apply` if the step is skipped, after the step
                was counted. If the step makes a merge call, it is called once, in the cross-replica context.
            aggregate: whether the gradients still have to be summed over the replicas.
            observe: a function for monitoring, which is called at the end of a step that could be skipped. It takes the
                result of `check`, the summed gradients, and the values that were checked. Each value is finite if and
                only if its gradient is finite on all replicas.
            jit_compile: whether XLA compiles the step, except for the sum over the replicas.

        Returns:
            In eager mode, whether the step was applied. In a graph, the operations or tensors that a session has to
            run. If the step cannot be skipped, the result of `apply` in a graph.

        Raises:
            ValueError: the method is called in a cross-replica context; `jit_compile` is True in eager mode or in a TF1
                graph; or `check` does not return a scalar.
            TypeError: `check` does not return a tensor, or `move` does not return operations in a TF1 graph.
        """
        if tf.distribute.in_cross_replica_context():
            raise replicas.not_in_replica_context("step")
        if jit_compile and (tf.executing_eagerly() or not runs_in_order()):
            raise ValueError("step(jit_compile=True) must be called inside a tf.function.")
        # `keep_state` asks whether a step was taken or traced.
        self.__dict__["_steps_called"] = vars(self).get("_steps_called", 0) + 1
        gradients, functions = list(gradients), (apply, skip or (lambda: None), observe)
        with replicas.explaining_refused_merge_calls():
            if aggregate:
                gradients = replicas.sum_over_replicas(gradients)
            if not self.may_skip:
                updates = _compiled(lambda own, _: apply(own), gradients, []) if jit_compile else apply(gradients)
                return True if tf.executing_eagerly() else updates
            # `prepare` creates all variables, so one of them stands for all. If `once` uses a merge call, it waits for
            # all replicas before it creates them, so either all replicas call it or none.
            if self._is_missing("total_steps"):
                replicas.once(self.prepare)
            # Gradients that the caller has summed may differ between the replicas.
            agrees = aggregate or not replicas.several_replicas()
            to_check = gradients if agrees else self._agreed(gradients)
            if jit_compile:
                finish = lambda own, checked: self._once_for_all_replicas(own, checked, *functions)  # noqa: E731
                return _compiled(finish, gradients, to_check)
            return self._once_for_all_replicas(gradients, to_check, *functions)

    def _once_for_all_replicas(
        self, gradients: list[Any], to_check: list[Any], apply: Any, skip: Any, observe: Any
    ) -> Any:
        if not replicas.uses_merge_call():
            return self._apply_or_skip(gradients, to_check, lambda: apply(gradients), skip, observe)

        # To apply gradients, many optimizers call merge_call, which TensorFlow refuses inside a tf.cond. The tf.cond is
        # therefore created in the cross-replica context, and its branches enter the replica context again. All replicas
        # run the first replica's functions, each with its own gradients.
        def across_replicas(strategy: tf.distribute.Strategy, per_replica: list[Any], to_check: list[Any]) -> Any:
            # All replicas have the same gradients, or the same values to check in place of them.
            first, first_to_check = _first(strategy, per_replica), _first(strategy, to_check)
            on_each = lambda: strategy.extended.call_for_each_replica(apply, args=(per_replica,))  # noqa: E731
            return self._apply_or_skip(first, first_to_check, on_each, skip, observe)

        return tf.distribute.get_replica_context().merge_call(across_replicas, args=(gradients, to_check))

    def _apply_or_skip(self, gradients: list[Any], to_check: list[Any], apply: Any, skip: Any, observe: Any) -> Any:
        """Check the gradients, apply or skip them, and move the scale."""
        applied = self._checked(to_check)

        def record() -> list[Any]:
            moved = self.move(applied)
            if not tf.executing_eagerly() and self._overrides("move") and not (operations(moved) or runs_in_order()):
                raise TypeError(
                    f"{type(self).__name__}.move() must return the results of `assign` in a TF1 graph, where a session "
                    f"runs nothing else, but returned: {moved!r}."
                )
            return [moved, observe and observe(applied, gradients, to_check)]

        def skip_counted() -> list[Any]:
            counted = self._count_step(applied=False)
            with tf.control_dependencies(operations(counted)):
                return [counted, skip()]

        if tf.executing_eagerly():
            # `bool` waits for the device if the check has not already done so.
            outcome = bool(applied)
            _ = (apply(), self._count_step(applied=True)) if outcome else skip_counted()
            record()
            return outcome
        branch = tf.cond(
            applied, lambda: finished([apply(), self._count_step(applied=True)]), lambda: finished(skip_counted())
        )
        with tf.control_dependencies([branch]):
            return tf.group(*operations(record()))

    def _checked(self, gradients: list[Any]) -> tf.Tensor:
        decision = self.check(gradients)
        if decision is None or isinstance(decision, tf.Operation):
            raise TypeError(
                f"{type(self).__name__}.check() must return whether to apply the step, as a bool scalar tensor, but "
                f"returned: {decision!r}."
            )
        decision = tf.cast(decision, tf.bool)
        if self._overrides("check") and replicas.several_replicas() and not replicas.uses_merge_call():
            # Without a merge call, every replica has made its own decision. A step is applied if all would apply it.
            [refusals] = replicas.all_reduce([tf.cast(tf.logical_not(decision), tf.float32)])
            decision = tf.equal(refusals, 0)
        if decision.shape.rank not in (0, None):
            raise ValueError(
                f"{type(self).__name__}.check() must return a bool scalar tensor, but returned one of shape "
                f"{decision.shape}. Reduce it, for example with tf.reduce_all."
            )
        return decision

    def _agreed(self, gradients: list[Any]) -> list[Any]:
        """Return values for all replicas to check in place of gradients that may differ between the replicas.

        A value is finite if and only if its gradient is finite on all replicas. If `check` is overridden, the values
        are this replica's gradients, with infinity or NaN added to all values of a gradient that has one on any
        replica.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return gradients
        [kinds] = replicas.all_reduce([tf.stack([gradients_lib.nonfinite_kind(g) for g in present])])
        each = iter(tf.unstack(kinds))
        agreed = [None if gradient is None else next(each) for gradient in gradients]
        if not self._overrides("check"):
            return agreed

        def with_kind(gradient: Any, kind: Any) -> Any:
            return gradients_lib.over_values(lambda values: values + tf.cast(kind, values.dtype), gradient)

        return list(map(with_kind, gradients, agreed))

    # The methods to override. -----------------------------------------------------------------------------------

    def check(self, gradients: list[Gradient]) -> tf.Tensor:
        """Return whether to apply a step; by default, whether its gradients are finite.

        Args:
            gradients: tensors, IndexedSlices or None, already unscaled and summed over the replicas.

        Returns:
            A bool scalar tensor.
        """
        return gradients_lib.all_finite(gradients)

    def move(self, applied: tf.Tensor) -> Any:
        """Change the scale after a step. Unless a subclass overrides this method, the scale does not change.

        Under a ParameterServerStrategy, several workers may run this method at the same time, so a finite step of one
        worker may not be counted.

        Args:
            applied: the result of `check`, a bool scalar tensor, equal on all replicas.

        Returns:
            The results of `assign`, which a session has to run in a TF1 graph.
        """
        del applied

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: whether the class overrides `check` or `move`. Otherwise neither is called."""
        return self._overrides("move") or self._overrides("check")

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(LossScale, method)

    # The counts. ------------------------------------------------------------------------------------------------

    # The variables that count steps are not saved. Otherwise the checkpoints of TensorFlow's own LossScaleOptimizer,
    # which lack these variables, could not be restored completely.

    total_steps: Any = LazyVariable(0, tf.int64, tracked=False)
    """The number of steps that could be skipped, applied or not, as an int64 scalar variable."""
    skipped_steps: Any = LazyVariable(0, tf.int64, tracked=False)
    """The number of skipped steps, as an int64 scalar variable."""
    skipped_in_a_row: Any = LazyVariable(0, tf.int64, tracked=False)
    """The number of skipped steps since the last applied step, as an int64 scalar variable."""

    @property
    def last_step_skipped(self) -> tf.Tensor:
        """Whether the last step was skipped, as a bool scalar tensor."""
        return value_or_zero(self.skipped_in_a_row) > 0

    def prepare(self) -> None:
        """Create all variables that a step needs.

        LossScaleOptimizer calls this method when it is created. Otherwise the first step calls it, in the cross-replica
        context.
        """
        if self.may_skip:
            _ = self.total_steps, self.skipped_steps, self.skipped_in_a_row

    def _count_step(self, applied: bool) -> list[Any]:
        counted = [add(self.total_steps, 1)]
        if applied:
            return [*counted, self.skipped_in_a_row.assign(0), add(self.skipped_steps, 0)]
        return [*counted, add(self.skipped_steps, 1), add(self.skipped_in_a_row, 1)]

    # The state. -------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the state as plain numbers, for a log or a JSON file. Call this method in eager mode.

        >>> FixedLossScale(8.0).state()
        {'loss_scale': 8.0}

        Returns:
            A dict with `loss_scale` (float). It also has the counts of steps, as ints, if a step can be skipped.
        """
        return self._state(as_number)

    def set_state(self, state: State | Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Call this method in eager mode.

        Args:
            state: a dict that `state` returned. Counts other than `dynamic_counter` are set to 0 if they are missing.

        Raises:
            ValueError: a key is missing or unknown, a value is out of range, or the scale is fixed at a different
                value. The state is then unchanged.
            TypeError: the state is not a mapping, or a value is not a number.
        """
        self._set_state(state, as_number, lambda variable, value: variable.assign(value))

    def _counters(self) -> dict[str, Any]:
        """Map the names of the counts in the state to their variables, or to None."""
        names = ("skipped_steps", "skipped_in_a_row", "total_steps")
        return {name: getattr(self, name) for name in names} if self.may_skip else {}

    def _state(self, read: Callable[[Any], Any]) -> Any:
        counts = {name: 0 if each is None else read(value_or_zero(each)) for name, each in self._counters().items()}
        return {"loss_scale": read(self._saved_scale()), **counts}

    def _saved_scale(self) -> Any:
        """Return the scale that the state contains."""
        return current_scale(self)

    def _set_state(self, state: Any, read: Callable[[Any], Any], assign: Callable[[Any, Any], Any]) -> None:
        variables, remedy = self._counters(), "Pass what state() returned."
        _require_keys(state, {"loss_scale", "dynamic_counter"} & {"loss_scale", *variables}, {"loss_scale", *variables})
        scale = errors.positive_number("loss_scale", state["loss_scale"], remedy)
        counts = {name: errors.whole_number(name, state.get(name, 0), remedy, least=0) for name in variables}
        for name, variable in variables.items():
            # The loss scale managers of tf.contrib count in int32 variables; all other loss scales count in int64.
            if variable is not None and counts[name] > variable.dtype.max:
                raise ValueError(f"`{name}` must be at most {variable.dtype.max}, but got: {counts[name]!r}.")
        self._set_scale(scale, read, assign)
        for name, variable in variables.items():
            if variable is not None:
                assign(variable, counts[name])

    def _set_scale(self, scale: float, read: Callable[[Any], Any], assign: Callable[[Any, Any], Any]) -> None:
        """Raise an error unless the scale is already this one. A subclass may set it instead."""
        now = read(self._saved_scale())
        if np.float32(scale) != np.float32(now):
            raise ValueError(self._NOT_SET.format(type(self).__name__, now, scale))

    # The error for a state with another scale: the class, the scale now and the scale of the state.
    _NOT_SET = (
        "A {0} determines its scale itself, which is {1:g} now, but `state` has the loss scale {2!r}. Set the "
        "variables of the {0}."
    )


class FixedLossScale(LossScale):
    """A fixed scale. By default, every step is applied and the object has no variables.

    >>> FixedLossScale(128)().numpy().item()
    128.0

    Args:
        initial_scale: the scale, a finite number above 0.
        skip_nonfinite: whether a step with a non-finite gradient is skipped.

    Raises:
        TypeError: `initial_scale` is not a number, or `skip_nonfinite` is not a bool.
        ValueError: `initial_scale` is out of range.
    """

    def __init__(self, initial_scale: Any, skip_nonfinite: bool = False):
        super().__init__()
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"`skip_nonfinite` must be a bool, but got: {skip_nonfinite!r}.")
        self.skip_nonfinite = skip_nonfinite
        self.initial_scale: float = errors.positive_number("initial_scale", initial_scale, "Pass for example 1024.")

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: if `skip_nonfinite` is True, or a subclass overrides `check` or `move`."""
        return self.skip_nonfinite or super().may_skip

    def __call__(self) -> tf.Tensor:
        return tf.constant(self.initial_scale, tf.float32)

    _NOT_SET = "The loss scale is fixed at {1:g}, but `state` has the loss scale {2!r}."


def current_scale(loss_scale: LossScale) -> tf.Tensor:
    """Return the result of `__call__` as a float32 scalar tensor, or raise an error if it is not a scalar."""
    returned: Any = loss_scale()
    if returned is None or isinstance(returned, str):
        raise TypeError(
            f"{type(loss_scale).__name__}.__call__() must return the scale, as a float32 scalar tensor, but returned: "
            f"{returned!r}."
        )
    scale = tf.cast(returned, tf.float32)
    if scale.shape.rank not in (0, None):
        raise ValueError(
            f"{type(loss_scale).__name__}.__call__() must return a scalar, but returned a tensor of shape "
            f"{scale.shape}."
        )
    return scale


def _first(strategy: tf.distribute.Strategy, per_replica: list[Any]) -> list[Any]:
    return [None if each is None else strategy.experimental_local_results(each)[0] for each in per_replica]


def _compiled(finish: Callable[..., Any], gradients: list[Any], to_check: list[Any]) -> tf.Tensor:
    # XLA's errors contain the name of the function.
    def LossScaleOptimizer_with_jit_compile(gradients: list[Any], to_check: list[Any]) -> tf.Tensor:
        return finished(finish(gradients, to_check))

    compiled = tf.function(LossScaleOptimizer_with_jit_compile, jit_compile=True, autograph=False)
    return compiled(gradients, to_check)


def _require_keys(state: Any, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`state` must be a dict that state() returned, but got: {state!r}. To change only the scale, call "
            "set_state({**optimizer.state(), 'loss_scale': value})."
        )
    if not needed <= state.keys() <= allowed:
        raise ValueError(
            f"`state` must have the keys {sorted(needed)} and may also have {sorted(allowed - needed)}, "
            f"but got: {state!r}. A state fits only a loss scale of the kind that returned it: dynamic, fixed, or a "
            "rule of your own."
        )
