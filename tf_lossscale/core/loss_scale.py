"""LossScale, the base class of loss scales, and the fixed loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import finite, misuse, origins, scaling, skipping
from tf_lossscale.core.factors import Factors
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.variables import LazyVariable, Variables, add, as_number, value_or_zero

if TYPE_CHECKING:
    from typing_extensions import Self

    from tf_lossscale.types import Gradient, Same, SameGradient, State


# The names of the values of `step_counts` in a state, and what an applied and a skipped step add to them. An applied
# step also sets the value that `_IN_A_ROW` selects to 0: it subtracts the value from itself.
STEP_COUNTS = ("total_steps", "skipped_steps", "skipped_in_a_row")
_APPLIED, _SKIPPED, _IN_A_ROW = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 1]])


def _noting_reads(call: Any) -> Any:
    """Return a `__call__` method that notes that the user has read the scale, and may scale a loss by it."""

    @functools.wraps(call)
    def noting(self: Any) -> Any:
        scale = call(self)
        self._factors.note_read(scale, self)
        return scale

    return noting


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

    _factors: Factors

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        new = super().__new__(cls, *args, **kwargs)
        # A subclass may not call the constructor. TensorFlow does not track what is set in `__dict__`.
        new.__dict__["_factors"] = Factors()
        return new

    def __init__(self) -> None:
        # A tf.Module reserves its name in the graph. This module is not called "loss_scale", because the variable of
        # tf.contrib's loss scale manager has that name.
        super().__init__(name="loss_scaling")
        if self._overrides("check") or self._overrides("move"):
            _ = self.step_counts

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _noting_reads(vars(cls)["__call__"])  # type: ignore[method-assign]

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
            RuntimeError: the loss is scaled already. In eager mode, the result of arithmetic on it is not recognized.
        """
        misuse.require_unscaled_loss(loss, self)
        return self._scaled(loss, lambda factor: factor)

    @overload
    def unscale(self, gradients: Iterable[SameGradient]) -> list[SameGradient]: ...

    @overload
    def unscale(self, gradients: Same) -> Same: ...

    @do_not_convert
    def unscale(self, gradients: Any) -> Any:
        """Divide the gradients of a scaled loss by the scale.

        A gradient is divided by the scale that multiplied its loss, also if a step has changed the scale since. In
        eager mode this is the scale of the last loss. If a `tf.function` may have scaled the loss, or the scale was
        read to scale a loss by hand, it is the current scale.

        >>> [g.numpy().item() for g in FixedLossScale(8.0).unscale([tf.constant(24.0)])]
        [3.0]

        Args:
            gradients: an iterable of floating-point tensors, IndexedSlices or None, or another structure of them, such
                as a dict or a single tensor. IndexedSlices stay sparse, and None stays None.

        Returns:
            A list of the unscaled gradients, with the same dtypes, or the same structure as `gradients`.

        Raises:
            TypeError: a gradient does not have a floating-point dtype.
            RuntimeError: a gradient is already unscaled. In eager mode, results of arithmetic on it are not recognized.
        """
        gradients, restructured = scaling.flattened(gradients)
        found = origins.origins(gradients)
        misuse.require_scaled(misuse.kinds_of(gradients, found, self), gradients, self)
        unscaled = self._unscaled(gradients, found, lambda factor: scaling.unscale(gradients, factor))
        origins.mark_pair(gradients, unscaled, self)
        return restructured(unscaled)

    def _current(self) -> tf.Tensor:
        """Return the result of `__call__` as a float32 scalar tensor, or raise an error if it is not a scalar."""
        returned: Any = self._factors.read(self)
        if returned is None or isinstance(returned, str):
            raise TypeError(
                f"{type(self).__name__}.__call__() must return the scale, as a float32 scalar tensor, but returned: "
                f"{returned!r}."
            )
        scale = tf.cast(returned, tf.float32)
        if scale.shape.rank not in (0, None):
            raise ValueError(
                f"{type(self).__name__}.__call__() must return a scalar, but returned a tensor of shape {scale.shape}."
            )
        self._factors.mark(scale, self)
        return scale

    def _scaled(self, loss: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        """Multiply a loss by the result of `change` for the current scale, and remember the scale for its gradients."""
        factor = self._current()
        record = functools.partial(self._factors.scaled, factor=factor)
        scaled = scaling.scale_loss(loss, change(factor), functools.partial(record, kind="backward"))
        record(scaled)
        origins.mark(scaled, self, True)
        return scaled

    def _with_scaled_gradient(self, outputs: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        """Return a model's outputs unchanged, but multiply their gradients as `_scaled` multiplies a loss."""
        factor = self._current()
        record = functools.partial(self._factors.scaled, factor=factor)

        def on_backward(gradient: Any) -> None:
            if self._factors.has_scaled_a_loss_since(same):
                raise RuntimeError(misuse.SCALED_TWICE)
            record(gradient, kind="outputs")

        same = scaling.scale_gradient(outputs, change(factor), on_backward)
        record(same)
        return same

    def _unscaled(
        self, gradients: list[Any], found: list[origins.Origin], divide: Callable[[tf.Tensor], list[Any]]
    ) -> list[Any]:
        """Return the result of `divide` for the factor of the loss of gradients, or for the current scale."""
        factor = self._factors.of(gradients, found, self)
        unscaled = divide(self._current() if factor is None else factor)
        self._factors.unscaled(unscaled)
        return unscaled

    # The step. --------------------------------------------------------------------------------------------------

    @do_not_convert
    def step(
        self,
        gradients: Iterable[Gradient],
        apply: Callable[[list[Any]], object],
        skip: Callable[[], object] | None = None,
        aggregate: bool = True,
    ) -> Any:
        """Apply gradients on all replicas, or skip the step on all replicas. Then change the scale.

        >>> import tf_lossscale
        >>> scale, weight = tf_lossscale.DynamicLossScale(8.0), tf.Variable(1.0)
        >>> scale.step([tf.constant(float("inf"))], lambda gradients: weight.assign_sub(gradients[0]))
        False
        >>> weight.numpy().item(), scale().numpy().item()
        (1.0, 4.0)

        Several optimizers that are applied or skipped together take one step: pass all gradients, and a function that
        applies them with all optimizers.

        Args:
            gradients: this replica's unscaled gradients: tensors, arrays, numbers, IndexedSlices or None.
            apply: a function that applies the gradients. It takes them as a list, summed over the replicas, and must
                not sum them again. It is called on each replica. In a TF1 graph it returns the operations to run.
            skip: a function without arguments that is called in place of `apply` if the step is skipped, after the step
                was counted. If the step makes a merge call, it is called once, in the cross-replica context.
            aggregate: whether the gradients still have to be summed over the replicas. Pass False if `apply` sums them,
                as `apply_gradients` of a Keras optimizer does under a strategy. The replicas then still make the same
                decision.

        Returns:
            Whether the step was applied: in eager mode a bool; in a graph a bool scalar tensor, which a session runs to
            take the step.

        Raises:
            ValueError: the method is called in a cross-replica context, or `check` does not return a scalar.
            TypeError: `gradients` is a single tensor or a dict, a gradient does not have a floating-point dtype,
                `apply` is no function, `check` does not return a tensor, or `move` does not return operations in a TF1
                graph.
            RuntimeError: the loss scale has multiplied a gradient twice.
        """
        if tf.is_tensor(gradients) or isinstance(gradients, Mapping):
            raise TypeError(f"`gradients` must be a list with a gradient for each variable, but got: {gradients!r}.")
        if not callable(apply):
            raise TypeError(
                "`apply` must be a function that applies a list of gradients, for example "
                f"lambda gradients: optimizer.apply_gradients(zip(gradients, variables)), but got: {apply!r}."
            )
        gradients = list(gradients)
        misuse.warn_of_scaled(gradients, self)
        return self._step(gradients, apply, skip, aggregate)

    def _step(self, gradients: list[Any], apply: Any, skip: Any, aggregate: bool) -> Any:
        """Take a step with gradients that were found to be unscaled, or that a user wants to be applied as they are."""
        return skipping.step(self, gradients, apply, skip, aggregate)

    # The methods to override. -----------------------------------------------------------------------------------

    def check(self, gradients: list[Gradient]) -> tf.Tensor:
        """Return whether to apply a step; by default, whether its gradients are finite.

        Args:
            gradients: tensors, IndexedSlices or None, already unscaled and summed over the replicas.

        Returns:
            A bool scalar tensor.
        """
        return finite.all_finite(gradients)

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
    def _is_one(self) -> bool:
        """Whether the scale is always 1, so that scaled and unscaled gradients are the same."""
        return False

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: whether the class overrides `check` or `move`. Otherwise neither is called."""
        return self._overrides("move") or self._overrides("check")

    def _overrides(self, method: str) -> bool:
        """Return whether the class has another implementation of a method than `LossScale`."""
        return getattr(type(self), method) is not getattr(LossScale, method)

    # The counts. ------------------------------------------------------------------------------------------------

    #: The numbers of steps, of skipped steps, and of skipped steps since the last applied one, as an int64 variable of
    #: shape [3]. Checkpoints do not contain it. Otherwise the checkpoints of TensorFlow's own LossScaleOptimizer, which
    #: lack it, could not be restored completely.
    step_counts: Any = LazyVariable([0, 0, 0], tf.int64, tracked=False)

    @property
    def total_steps(self) -> tf.Tensor:
        """The number of steps that could be skipped, applied or not, as an int64 scalar tensor."""
        return value_or_zero(self.step_counts)[0]

    @property
    def skipped_steps(self) -> tf.Tensor:
        """The number of skipped steps, as an int64 scalar tensor."""
        return value_or_zero(self.step_counts)[1]

    @property
    def skipped_in_a_row(self) -> tf.Tensor:
        """The number of skipped steps since the last applied step, as an int64 scalar tensor."""
        return value_or_zero(self.step_counts)[2]

    @property
    def last_step_skipped(self) -> tf.Tensor:
        """Whether the last step was skipped, as a bool scalar tensor."""
        return self.skipped_in_a_row > 0

    def prepare(self) -> None:
        """Create all variables that a step needs.

        LossScaleOptimizer calls this method when it is created. Otherwise the first step calls it, in the cross-replica
        context.
        """
        if self.may_skip:
            _ = self.step_counts

    def _warn_in_skipped_step(self) -> Any:
        """Warn of a scale with which every step is skipped. By default do nothing. Return operations for a session."""

    def _count_step(self, applied: bool) -> Any:
        counts = self.step_counts
        return add(counts, _APPLIED - value_or_zero(counts) * _IN_A_ROW if applied else _SKIPPED)

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
        """Map the names of a rule's own counts in the state to their variables, or to None."""
        return {}

    def _state(self, read: Callable[[Any], Any]) -> Any:
        state = {"loss_scale": read(self._saved_scale())}
        state |= {name: 0 if each is None else read(value_or_zero(each)) for name, each in self._counters().items()}
        if self.may_skip:
            total, skipped, in_a_row = read(value_or_zero(self.step_counts))
            state |= {"skipped_steps": skipped, "skipped_in_a_row": in_a_row, "total_steps": total}
        return state

    def _saved_scale(self) -> Any:
        """Return the scale that the state contains."""
        return self._current()

    def _set_state(self, state: Any, read: Callable[[Any], Any], assign: Callable[[Any, Any], Any]) -> None:
        counters, remedy = self._counters(), "Pass what state() returned."
        names = [*counters, *(STEP_COUNTS if self.may_skip else ())]
        allowed = {"loss_scale", *names}
        _require_keys(state, {"loss_scale", "dynamic_counter"} & allowed, allowed)
        scale = errors.positive_number("loss_scale", state["loss_scale"], remedy)
        counts = {name: errors.whole_number(name, state.get(name, 0), remedy, least=0) for name in names}
        for name, count in counts.items():
            # The loss scale managers of tf.contrib count in int32 variables; all other loss scales count in int64.
            largest = (tf.int64 if counters.get(name) is None else counters[name].dtype).max
            if count > largest:
                raise ValueError(f"`{name}` must be at most {largest}, but got: {count!r}.")
        self._set_scale(scale, read, assign)
        for name, variable in counters.items():
            if variable is not None:
                assign(variable, counts[name])
        if self.may_skip:
            assign(self.step_counts, [counts[name] for name in STEP_COUNTS])

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
        self.initial_scale: float = errors.normal_number("initial_scale", initial_scale, "Pass for example 1024.")
        if skip_nonfinite:
            _ = self.step_counts

    @property
    def _is_one(self) -> bool:
        """Whether the scale is 1."""
        return self.initial_scale == 1

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: if `skip_nonfinite` is True, or a subclass overrides `check` or `move`."""
        return self.skip_nonfinite or super().may_skip

    def __call__(self) -> tf.Tensor:
        return tf.constant(self.initial_scale, tf.float32)

    _NOT_SET = "The loss scale is fixed at {1:g}, but `state` has the loss scale {2!r}."


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
