"""The public LossScaleOptimizer class: everything that does not depend on the optimizer family."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale.core import gradients as arithmetic
from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import do_not_convert, in_xla_context, operations, runs_in_order
from tf_lossscale.core.inside import scaled_inside
from tf_lossscale.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from tf_lossscale.diagnosis.exponents import EVERY
from tf_lossscale.families import registry as families
from tf_lossscale.wrapper import arguments, contract, hyperparameters
from tf_lossscale.wrapper.grads_and_vars import as_list, assign_all, names_of, require_fitting, tensors_of, unzip
from tf_lossscale.wrapper.hyperparameters import Delegating, setting
from tf_lossscale.wrapper.readings import Observable
from tf_lossscale.wrapper.saving import Configurable
from tf_lossscale.wrapper.stall import PATIENCE, Stall

if TYPE_CHECKING:
    from tf_lossscale.types import (
        Gradient,
        Loss,
        Optimizer,
        Same,
        SameFunction,
        SameGradient,
        Scalar,
        Variable,
        Variables,
    )


class CallableList(list[Any]):
    """A list that returns itself when called, so that both `variables` and `variables()` work on an optimizer.

    >>> CallableList([1])()
    [1]
    """

    def __call__(self) -> CallableList:
        return self


class _SignatureOfInit:
    """A descriptor for `__signature__` that makes `help` show the arguments of `__init__` instead of `__new__`."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class LossScaleOptimizer(Delegating, Observable, Configurable):
    """Wraps an optimizer and scales the loss, so that small float16 gradients do not become zero.

    If a gradient on any replica is infinite or NaN, the step is skipped on every replica, and the scale is multiplied
    by `backoff_factor`. After `dynamic_growth_steps` finite steps in a row, the scale is multiplied by `growth_factor`.
    `tf_lossscale.core.rules.Rules` states the algorithm in full.

    In a custom training loop:

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25))
    >>> weight = tf.Variable(1.0)
    >>> with tf.GradientTape() as tape:
    ...     loss = weight**2
    ...     scaled_loss = optimizer.get_scaled_loss(loss)
    >>> scaled_gradients = tape.gradient(scaled_loss, [weight])
    >>> gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    >>> _ = optimizer.apply_gradients(zip(gradients, [weight]))
    >>> weight.numpy().item()
    0.5

    `minimize` does the same in one call; `model.compile(optimizer)` and `fit` do it automatically.

    Hyperparameters of the inner optimizer can be read and set on the wrapper:

    >>> optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(1.0))
    >>> optimizer.beta_1 = 0.75
    >>> optimizer.inner_optimizer.beta_1
    0.75

    Args:
        inner_optimizer: the optimizer that updates the variables, for example one from `tf.keras.optimizers` (Keras 3),
            `tf_keras.optimizers` or `tf_keras.optimizers.legacy`.
        dynamic: whether the scale changes during training. Keep it True unless you know a scale that suits the entire
            training run. If False, the scale stays at `initial_scale`, and no step is skipped unless `skip_nonfinite`
            is True.
        initial_scale: the scale at the start, above 0. The default is 2**15; the argument is required if `dynamic` is
            False. Prefer a scale that is too high: it is lowered within a few steps, whereas a scale that is too low
            takes thousands of steps to grow.
        dynamic_growth_steps: the number of finite steps in a row after which the scale grows. The default is 2000; the
            argument is not allowed if `dynamic` is False.
        skip_nonfinite: whether a step is skipped if a gradient is infinite or NaN. The default is the value of
            `dynamic`. To skip such steps without scaling the loss, for example in float32 or bfloat16, pass
            `dynamic=False, initial_scale=1, skip_nonfinite=True`.
        growth_factor: the factor by which the scale is multiplied when it grows.
        backoff_factor: the factor by which the scale is multiplied after an overflow.
        hysteresis: the number of overflows in a row after which the scale is lowered.
        min_scale: the value below which the scale is never lowered.
        max_scale: the value above which the scale never grows. The default is the largest float32 number.
        on_stall: what happens in a stall, which means `stall_steps` skipped steps in a row: "warn", "raise", or a
            function that is called with the optimizer. "raise" raises a FloatingPointError in eager mode and an
            InvalidArgumentError in a graph. Each stall is reported once, in the last of these steps. If XLA compiles
            the step, the stall is reported when `loss_scale` or `state()` is read, and at the end of `fit`.
        stall_steps: the number of skipped steps in a row that count as a stall.
        diagnose: True to record the variables whose gradients overflow, for `overflow_report`, and the norm of all
            gradients, for `gradient_norm`. "exponents" to count the scaled gradients by exponent instead, for
            `precision_report`.
        diagnose_every: with `diagnose="exponents"`, gradients are counted in the first step and then in every
            `diagnose_every`-th step. `count_exponents()` requests a count in the next step. Steps in which gradients
            are not counted cost almost nothing extra.
        loss_scale: a `LossScale` of your own, a `SharedLossScale`, a manager from `tf_lossscale.amp`, or a loss scale
            of `tf_lossscale.legacy`. It determines the scale and its rules, so the arguments from `dynamic` to
            `max_scale` must not be passed.
        jit_compile: whether XLA compiles the optimizer's step inside a `tf.function`. The model is not compiled. The
            same steps are skipped, but weights may differ in their last bits. A step that XLA cannot compile, for
            example in eager mode, with sparse gradients or on several replicas, runs without XLA, and a warning says so
            once.
        **kwargs: arguments of Keras 3's optimizers, which are set on the inner optimizer: `name`, `weight_decay`,
            `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor` and `gradient_accumulation_steps`.

    Raises:
        TypeError: `inner_optimizer` belongs to no known family or is a LossScaleOptimizer, or an argument has the wrong
            type.
        ValueError: `inner_optimizer` is already wrapped, or an argument is out of range, contradicts a setting of the
            inner optimizer, or is not supported by the inner optimizer's family.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`,
    https://www.tensorflow.org/versions/r2.8/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer
    """

    __signature__ = _SignatureOfInit()

    # Calling LossScaleOptimizer creates an instance of the wrapper class for the inner optimizer's library. Calling a
    # user-defined subclass creates an instance of a class derived from the subclass and the wrapper class. Only wrapper
    # classes set `_family_class`.
    def __new__(cls, inner_optimizer: Any = None, *args: Any, **kwargs: Any) -> LossScaleOptimizer:
        old = [name for name in ("optimizer", "opt") if name in kwargs]
        if inner_optimizer is None and old:
            raise TypeError(
                f"LossScaleOptimizer() has no argument `{old[0]}`: since TensorFlow 2.4 its name is `inner_optimizer`. "
                "For TensorFlow 2.3's arguments, use tf_lossscale.legacy.experimental.LossScaleOptimizer."
            )
        del args, kwargs
        this: Any = cls
        is_complete = cls._family_class is not None
        return object.__new__(
            cls if is_complete else families.combined(this, families.require_wrapper_class(inner_optimizer))
        )

    def __init__(
        self,
        inner_optimizer: Optimizer,
        dynamic: bool = True,
        initial_scale: Scalar | None = None,
        dynamic_growth_steps: Scalar | None = None,
        *,
        skip_nonfinite: bool | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        on_stall: str | Callable[[LossScaleOptimizer], object] = "warn",
        stall_steps: int = PATIENCE,
        diagnose: bool | str = False,
        diagnose_every: int = EVERY,
        loss_scale: object = None,
        jit_compile: bool = False,
        **kwargs: Any,
    ):
        wrapper_class = families.require_wrapper_class(inner_optimizer)
        if not isinstance(self, wrapper_class):
            raise TypeError(
                f"{type(self).__module__}.LossScaleOptimizer cannot wrap this optimizer: {inner_optimizer!r}. Call "
                "tf_lossscale.LossScaleOptimizer, which chooses the class."
            )
        arguments.refuse_old_names(kwargs)
        scale = arguments.loss_scale(
            dynamic,
            initial_scale,
            dynamic_growth_steps,
            skip_nonfinite,
            loss_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        stall = Stall(on_stall, stall_steps)
        diagnosis, exponents = arguments.diagnosis(diagnose, diagnose_every, scale)
        arguments.require_jit_compile(jit_compile)
        family = wrapper_class._family_class(inner_optimizer)
        chosen = family.checked_options(kwargs)
        # If the constructor raises an error, the inner optimizer must be unchanged. `_save_scale_with_inner` can raise
        # an error, but only before it changes the inner optimizer. The statements after it cannot raise errors.
        scale.prepare()
        self.__dict__.update(
            _optimizer=inner_optimizer,
            _family=family,
            # TensorFlow's DelegatingTrackableMixin reads this attribute.
            _trackable=inner_optimizer,
            _scale=scale,
            _contract=contract.Contract(),
            _traced=False,
            _warned=set(),
            _stall=stall,
            _diagnosis=diagnosis,
            _exponents=exponents,
            _jit_compile=jit_compile,
        )
        self._save_scale_with_inner()
        family.set_options(chosen)
        self._init_base()
        families.mark(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = vars(cls).get("apply_gradients")
        if own is None or cls.__module__.startswith("tf_lossscale."):
            return

        # Keras 3's `fit` passes scaled gradients to `apply_gradients`. A user's override, which may clip them, gets
        # unscaled gradients in every loop.
        @functools.wraps(own)
        def with_unscaled_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, self._unscaled_pairs(grads_and_vars), *args, **kwargs)

        cls.apply_gradients = with_unscaled_gradients  # type: ignore[method-assign]

    def _unscaled_pairs(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        gradients, variables = unzip(grads_and_vars)
        if self._contract.decide(gradients, self._loss_scale).scaled:
            gradients = self._unscaled(gradients, variables)
        return list(zip(gradients, variables))

    def _unscaled(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        # A gradient that is a variable's new value does not depend on the scale.
        return self._family.unless_overwritten(
            lambda scaled, _: self.get_unscaled_gradients(scaled), gradients, variables
        )

    def _init_base(self) -> None:
        """Set the attributes that base classes from the inner optimizer's library need."""

    def _save_scale_with_inner(self) -> None:
        """Track the loss scale in the inner optimizer, so that a checkpoint of the inner optimizer includes it."""
        inner, scale = self._optimizer, self._loss_scale
        if not hasattr(inner, "_track_trackable"):
            if not isinstance(scale, FixedLossScale):
                logging.warning(
                    "A checkpoint of the inner %s does not hold the loss scale, because its class is not derived from "
                    "tf.Module. Save `state()` alongside the checkpoint, or derive the class from tf.Module.",
                    type(inner).__name__,
                )
            return
        # The constructors of legacy optimizers do not set up checkpoint tracking.
        inner._maybe_initialize_trackable()
        there = inner._lookup_dependency("loss_scale")
        if there is not None and not isinstance(there, LossScale):
            raise ValueError(
                f"`inner_optimizer` must not track an object named 'loss_scale', but {type(inner).__name__} has one: "
                f"{there!r}. In a checkpoint, the wrapper's loss scale has this name. Track your object under another "
                "name."
            )
        if there is not None or not isinstance(scale, FixedLossScale):
            inner._track_trackable(scale, "loss_scale", overwrite=True)
            inner._handle_deferred_dependencies("loss_scale", scale)
            self._family.parts_changed()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        # The variables of the diagnostics are left out of checkpoints, to keep TensorFlow's original checkpoint format.
        if save_type == "checkpoint":
            return children
        counting = {"diagnosis": self._diagnosis, "exponents": self._exponents}
        return {**children, **{name: part for name, part in counting.items() if part is not None}}

    # The loss and the gradients. --------------------------------------------------------------------------------

    @overload
    def get_scaled_loss(self, loss: float) -> tf.Tensor: ...

    @overload
    def get_scaled_loss(self, loss: Same) -> Same: ...

    @do_not_convert
    def get_scaled_loss(self, loss: Any) -> Any:
        """Multiply the loss by the loss scale.

        Call this method inside the `with` block of the gradient tape, and pass the gradients of the scaled loss to
        `get_unscaled_gradients`. `minimize` and Keras's `fit` scale losses and unscale gradients automatically.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> optimizer.get_scaled_loss(tf.constant(2.0)).numpy().item()
        16.0

        Args:
            loss: a floating-point tensor of any shape, a nested structure of such tensors, or a function without
                arguments that returns either.

        Returns:
            The scaled loss, with the structure and dtype of `loss`. If `loss` is a function, the result is a function
            that returns the scaled loss.

        Raises:
            TypeError: the loss does not have a floating-point dtype.
            RuntimeError: the loss is scaled already.
        """
        scaled = self._scaled("get_scaled_loss", loss)
        _warn_if_loss_cannot_hold(loss, self._current_factor)
        return scaled

    @overload
    def scale_loss(self, loss: float) -> tf.Tensor: ...

    @overload
    def scale_loss(self, loss: Same) -> Same: ...

    @do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss by the loss scale, as in Keras 3. `apply` or `apply_gradients` unscales the gradients.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> optimizer.scale_loss(tf.constant(2.0)).numpy().item()
        16.0

        Args:
            loss: a floating-point tensor of any shape, a nested structure of such tensors, or a function without
                arguments that returns either.

        Returns:
            The scaled loss. A float16 or bfloat16 loss becomes float32, which can hold large scales.

        Raises:
            TypeError: the loss does not have a floating-point dtype.
            RuntimeError: the loss is scaled already.
        """
        return self._scaled("scale_loss", loss)

    def _scaled(self, method: str, loss: Any) -> Any:
        """Scale a loss and mark it as scaled. For a function, return a function that scales the result of each call.

        A scaled function may be called in many steps, so each of its calls is recorded as a call to `method`.
        """
        contract.require_unscaled_loss(loss, self._loss_scale)
        if callable(loss) and not tf.is_tensor(loss):
            self._contract.called(method)
            return lambda: self._scaled(method, loss())
        if method == "scale_loss":
            loss = tf.nest.map_structure(_at_least_float32, loss)
        factor = self._current_factor()
        scaled = arithmetic.scale_loss(loss, factor)
        self._contract.called(method, factor)
        contract.mark(scaled, self._loss_scale, True)
        return scaled

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[SameGradient]) -> list[SameGradient]:
        """Divide the gradients of a loss from `get_scaled_loss` by the loss scale.

        `minimize` and Keras's `fit` scale losses and unscale gradients automatically.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> [g.numpy().item() for g in optimizer.get_unscaled_gradients([tf.constant(16.0)])]
        [2.0]

        Args:
            grads: an iterable of floating-point tensors, IndexedSlices or None. IndexedSlices stay sparse, and None
                stays None.

        Returns:
            A list of the unscaled gradients.

        Raises:
            TypeError: a gradient does not have a floating-point dtype.
            RuntimeError: a gradient is already unscaled.
        """
        grads = list(grads)
        self._contract.require_scaled(grads, self._loss_scale)
        unscaled = self._family.unscale(grads, self._contract.factor(self._current_factor))
        self._contract.called("get_unscaled_gradients")
        contract.mark(grads, self._loss_scale, True)
        contract.mark(unscaled, self._loss_scale, False)
        return unscaled

    def scale_inside(self, loss_fn: SameFunction) -> SameFunction:
        """Wrap a loss function for a library's training loop that calls no optimizer method except `apply_gradients`.

        The wrapped function returns the same, unscaled loss. Its gradients are scaled during backpropagation, and
        unscaled before the tape returns them. The library can therefore clip the gradients as usual.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.25))
        >>> weight = tf.Variable(3.0)
        >>> loss_fn = optimizer.scale_inside(lambda: weight**2)
        >>> with tf.GradientTape() as tape:  # in a library
        ...     loss = loss_fn()
        >>> _ = optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        >>> loss.numpy().item(), weight.numpy().item()
        (9.0, 1.5)

        Args:
            loss_fn: a function with any arguments that computes the loss from the trained variables. It must return a
                floating-point tensor of any shape, or a tuple whose first element is such a tensor. It must not contain
                Keras's float8 layers: some of their gradients are in fact new values for variables, which must not be
                unscaled.

        Returns:
            A function with the same arguments and results as `loss_fn`. Only the loss is differentiable, and only with
            respect to variables. The function raises a TypeError if `loss_fn` returns a list or another type.
        """

        def by_scaling(upstream: tf.Tensor, gradients_of: Callable[[Any], list[Any]]) -> list[Any]:
            factor = self._current_factor()
            gradients = gradients_of(arithmetic.scale_loss(upstream, factor))
            self._contract.unscaled_inside()
            return self._family.unscale(gradients, factor)

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = loss_fn(*args, **kwargs)
            contract.require_unscaled_loss(result, self._loss_scale)
            return result

        return cast("SameFunction", scaled_inside(checked, by_scaling))

    # The step. --------------------------------------------------------------------------------------------------

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> tf.Operation | tf.Tensor | None:
        """Apply unscaled gradients, or skip the step on all replicas if any gradient is not finite.

        If `scale_loss` was called but `get_unscaled_gradients` was not, as in Keras 3's `fit`, this method unscales the
        gradients first. In that case `iterations` does not count a skipped step; in all other cases it does, except
        with Keras 3's `gradient_accumulation_steps`. If the earlier calls leave open whether the gradients are scaled,
        this method raises an error.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=8)
        >>> weight = tf.Variable(1.0)
        >>> _ = optimizer.get_scaled_loss(0.0)
        >>> gradients = optimizer.get_unscaled_gradients([tf.constant(float("inf"))])
        >>> _ = optimizer.apply_gradients(zip(gradients, [weight]))
        >>> weight.numpy().item(), optimizer.loss_scale.numpy().item()
        (1.0, 4.0)

        Args:
            grads_and_vars: any iterable of (gradient, variable) pairs. A gradient may be None. A variable is a
                `tf.Variable` or a `keras.Variable`.
            name: ignored; accepted for compatibility with other optimizers.
            experimental_aggregate_gradients: False if the gradients are already summed over the replicas.
            skip_gradients_aggregation: True if the gradients are already summed over the replicas.
            **kwargs: passed to the inner optimizer.

        Returns:
            In eager mode, None or `iterations`, whichever the inner optimizer returns. In a `tf.function`, a tensor
            that is available when the step is complete, unless the optimizer shares its loss scale. In a TF1 graph, the
            operation that takes the step.

        Raises:
            ValueError: all gradients are None, or the call is in a cross-replica context.
            TypeError: a keyword argument is not accepted by the inner optimizer.
            RuntimeError: it is unclear whether the gradients are scaled.
        """
        del name
        if tf.distribute.in_cross_replica_context():
            raise replicas.not_in_replica_context("apply_gradients")
        gradients, variables = unzip(grads_and_vars)
        if gradients or not self._family.takes_empty_steps:
            require_fitting(gradients, variables)
        if kwargs:
            self._require_keywords(kwargs)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        decision = self._contract.decide(gradients, self._loss_scale)
        outcome = self._step(gradients, variables, decision.scaled, aggregate, kwargs)
        self._contract.record(decision)
        return self._result(outcome)

    @do_not_convert
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Unscale and apply gradients of a loss from `scale_loss`, as in Keras 3.

        If a gradient is not finite, the step is skipped, and `iterations` does not count it.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=8)
        >>> weight = tf.Variable(1.0)
        >>> _ = optimizer.scale_loss(0.0)
        >>> optimizer.apply([tf.constant(8.0)], [weight])
        >>> weight.numpy().item()
        0.5

        Args:
            grads: gradients of the scaled loss. A gradient may be None.
            trainable_variables: one variable for each gradient. The default is the variables that were passed to
                `build`.

        Raises:
            ValueError: the lengths differ, all gradients are None, there are no variables, or the call is in a
                cross-replica context.
            RuntimeError: the gradients were already unscaled by `get_unscaled_gradients` or `scale_inside`.
        """
        if tf.distribute.in_cross_replica_context():
            raise replicas.not_in_replica_context("apply")
        grads = list(grads)
        variables = self._given_or_known(trainable_variables, "apply(grads)")
        require_fitting(grads, variables)
        decision = self._contract.decide_for_apply(grads, self._loss_scale, self._family.apply_takes_unscaled)
        outcome = self._step(grads, variables, decision.scaled, aggregate=True, keywords={})
        self._contract.record(decision)
        self._result(outcome)

    def _step(
        self, gradients: list[Any], variables: list[Any], scaled: bool, aggregate: bool, keywords: dict[str, Any]
    ) -> Any:
        """Unscale the gradients unless that was done, and let the loss scale apply them or skip the step."""
        family, loss_scale = self._family, self._loss_scale
        if not tf.executing_eagerly():
            family.require_graph_mode()
        trained = [v for g, v in zip(gradients, variables) if g is not None or not family.slots_need_gradients]
        if family.ensure_built(trained):
            self._warn_of_float16(trained)

        def apply(gradients: list[Any]) -> Any:
            with replicas.local_copies(family.replica_variables):
                return family.apply(gradients, variables, **keywords)

        def skip() -> list[Any]:
            with replicas.local_copies(family.replica_variables):
                started = family.start_averages()
                with tf.control_dependencies(operations(started)):
                    # If the caller passed unscaled gradients, `iterations` counts a skipped step, as in TensorFlow 2.
                    # If the caller passed scaled gradients, a skipped step is not counted, as in Keras 3.
                    counted = None if scaled else family.count_skipped_step()
            with tf.control_dependencies(operations([started, counted])):
                return [started, counted, [] if tf.executing_eagerly() else self._stall.in_graph(self)]

        compiles = self._jit_compile and self._compiles(gradients, variables)
        counted = [] if self._exponents is None else self._count_by_exponent(gradients, variables, scaled)
        # In a TF1 graph the control dependency ensures that the exponents are counted before the scale changes.
        with tf.control_dependencies(counted):
            if scaled:
                gradients = family.unscale(gradients, self._contract.factor(self._current_factor), variables)
            aggregate = aggregate and family.sums_over_replicas
            if aggregate and family.reduces_itself(variables):
                with replicas.explaining_refused_merge_calls():
                    gradients, aggregate = family.reduce(gradients, variables), False
            # A user's rule may have an attribute that is called `step`.
            return type(loss_scale).step(
                loss_scale, gradients, apply, skip, aggregate, observe=self._observer(variables), jit_compile=compiles
            )

    def _count_by_exponent(self, gradients: list[Any], variables: list[Any], scaled: bool) -> list[tf.Operation]:
        """Count this replica's gradients by exponent, as they are while they are multiplied by the loss scale."""
        if self._exponents is None or not variables:
            return []
        if any(isinstance(variable, tf.experimental.dtensor.DVariable) for variable in variables):
            raise ValueError(
                "Gradients cannot be counted by exponent on a DTensor mesh. Leave out "
                'diagnose="exponents", or count in a run without a mesh.'
            )

        def as_scaled() -> list[Any]:
            if scaled:
                return gradients
            return [arithmetic.multiplied(gradient, self._current_factor()) for gradient in gradients]

        return self._exponents.record(lambda: names_of(variables), as_scaled, self._current_factor)

    def _current_factor(self) -> tf.Tensor:
        """Return the factor to multiply a loss by: the loss scale, times Keras 3's `loss_scale_factor` if it is set."""
        factor = vars(self).get("loss_scale_factor")
        return self._loss_scale() if factor is None else self._loss_scale() * factor

    def _observer(self, variables: list[Any]) -> Callable[..., Any]:
        """Return a function that is called at the end of each step, for the diagnosis and for stalls in eager mode."""
        diagnosis = self._diagnosis if variables else None
        names = () if diagnosis is None else names_of(variables)
        if diagnosis is not None:
            diagnosis.prepare(names)

        def observe(applied: tf.Tensor, gradients: list[Any], checked: list[Any]) -> Any:
            recorded = diagnosis and diagnosis.record(names, applied, gradients, checked)
            if tf.executing_eagerly() and not applied:
                self._stall.after_step(self)
            return recorded

        return observe

    def _compiles(self, gradients: list[Any], variables: list[Any]) -> bool:
        """Return whether XLA compiles the step. If it cannot, log a warning once."""
        reason = self._family.obstacle() or _obstacle(gradients, variables)
        if reason is not None:
            self._warn_once(f"LossScaleOptimizer(jit_compile=True) takes steps that are not compiled: {reason}.")
        return reason is None and not in_xla_context()

    def _warn_of_float16(self, variables: list[Any]) -> None:
        float16 = [variable for variable in tensors_of(variables) if variable.dtype == tf.float16]
        if float16:
            self._warn_once(
                f"The variable {names_of(float16)[0]} is float16, in which small updates are lost: with Adam's default "
                "settings, a float16 variable may never change. Use the dtype policy mixed_float16, under which layers "
                "compute in float16 and keep their variables in float32."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)

    def _result(self, outcome: Any) -> Any:
        """Return the value that `apply_gradients` returns."""
        if tf.executing_eagerly():
            return self._family.result()
        self.__dict__["_traced"] = True
        if not runs_in_order():
            return outcome
        with tf.control_dependencies(operations(outcome)):
            # The result is a tensor, because a tf.function cannot return an operation.
            return tf.constant(True)

    @do_not_convert
    def compute_gradients(
        self, loss: Loss, var_list: Variables, grad_loss: tf.Tensor | None = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, Variable]]:
        """Scale the loss, compute its gradients, and return them unscaled.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
        >>> weight = tf.Variable(3.0)
        >>> [(gradient, _)] = optimizer.compute_gradients(lambda: weight**2, [weight])
        >>> gradient.numpy().item()
        6.0

        Args:
            loss: a function that returns the loss, or a loss tensor together with its tape.
            var_list: a variable, a list of them, or a function that returns one of these.
            grad_loss: the gradient of the final objective with respect to the loss. By default it is 1.
            tape: the tape that recorded the loss; required if `loss` is a tensor.

        Returns:
            A list of (gradient, variable) pairs.

        Raises:
            ValueError: `loss` is a tensor, and `tape` is missing.
        """
        if not callable(loss) and tape is None and tf.executing_eagerly():
            raise ValueError(
                "`tape` is required when `loss` is a tensor. Pass the GradientTape that recorded it, or pass a "
                f"function that returns the loss. Received: loss={loss}, tape=None."
            )
        tape = tf.GradientTape() if tape is None else tape
        # The variables may be an iterator, which can be read only once.
        var_list = var_list if callable(var_list) else as_list(var_list)
        with tape:
            if callable(loss) and not callable(var_list):
                tape.watch(tensors_of(var_list))
            loss = loss() if callable(loss) else loss
            variables = as_list(var_list()) if callable(var_list) else var_list
            scaled_loss = self.get_scaled_loss(loss)
        pairs = self._family.gradients(scaled_loss, variables, grad_loss, tape)
        variables = [variable for _, variable in pairs]
        return list(zip(self._unscaled([gradient for gradient, _ in pairs], variables), variables))

    @do_not_convert
    def minimize(
        self,
        loss: Loss,
        var_list: Variables,
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
        tape: tf.GradientTape | None = None,
        **kwargs: Any,
    ) -> tf.Operation | tf.Tensor | None:
        """Take one training step: scale the loss, then compute, unscale and apply its gradients.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.25))
        >>> weight = tf.Variable(2.0)
        >>> _ = optimizer.minimize(lambda: weight**2, [weight])
        >>> weight.numpy().item()
        1.0

        Args:
            loss: a function that returns the loss, or a loss tensor together with its tape.
            var_list: a variable, a list of them, or a function that returns one of these.
            grad_loss: the gradient of the final objective with respect to the loss. By default it is 1.
            name: ignored; accepted for compatibility with other optimizers.
            tape: the tape that recorded the loss; required if `loss` is a tensor.
            **kwargs: passed to the inner optimizer.

        Returns:
            The result of `apply_gradients`.

        Raises:
            ValueError: `loss` is a tensor and `tape` is missing, or all gradients are None.
        """
        return self.apply_gradients(self._compute_gradients(loss, var_list, grad_loss, tape), name=name, **kwargs)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Any, Any]]:
        """Call `compute_gradients`. In legacy optimizers, `minimize` calls this method, and subclasses override it."""
        # A user-defined `compute_gradients` may have no `grad_loss` argument.
        keywords = {} if grad_loss is None else {"grad_loss": grad_loss}
        return self.compute_gradients(loss, var_list, tape=tape, **keywords)

    @do_not_convert
    def get_gradients(self, loss: tf.Tensor, params: list[Variable]) -> list[Gradient]:
        """Return the unscaled gradients of a loss in a TF1 graph, where no gradient tape is needed.

        >>> with tf.Graph().as_default():
        ...     weight = tf.Variable(1.0)
        ...     optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
        ...     len(optimizer.get_gradients(weight**2, [weight]))
        1

        Args:
            loss: a floating-point tensor.
            params: the variables to differentiate with respect to.

        Returns:
            A list with one gradient for each variable.
        """
        return self.get_unscaled_gradients(tf.gradients(self.get_scaled_loss(loss), params))

    def _require_keywords(self, kwargs: dict[str, Any]) -> None:
        """Raise an error if the inner optimizer's `apply_gradients` does not accept one of the keyword arguments."""
        for name in kwargs:
            if not self._family.takes(name):
                raise TypeError(
                    f"apply_gradients() got an unexpected keyword argument '{name}': neither LossScaleOptimizer nor "
                    f"the inner {type(self._optimizer).__name__} takes it."
                )

    # Properties. --------------------------------------------------------------------------------------------

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic rather than fixed."""
        return isinstance(self._loss_scale, DynamicLossScale)

    @property
    def _loss_scale(self) -> Any:
        """The `LossScale` object. It can be set, because old code assigns its own loss scale to this attribute."""
        return vars(self)["_scale"]

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        scale = arguments.as_loss_scale(value)
        if scale is None:
            raise TypeError(
                "`_loss_scale` must be a tf_lossscale LossScale, or an object with the methods __call__() and "
                f"update(grads), but got: {value!r}. Make a new LossScaleOptimizer with the arguments you need."
            )
        scale.prepare()
        self.__dict__["_scale"] = scale
        self._save_scale_with_inner()

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The number of finite steps that count towards the next growth of the scale, as an int64 variable.

        It is None if the scale is fixed.
        """
        return self._loss_scale.good_steps if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The loss scale at the start. A rule of your own that has no `initial_scale` has NaN."""
        return getattr(self._loss_scale, "initial_scale", float("nan"))

    dynamic_growth_steps: int | None = setting(
        "growth_steps",
        "The number of finite steps in a row after which the scale grows, or None if the scale is fixed.",
    )
    growth_factor: float | None = setting(
        "growth_factor", "The factor by which the scale grows, or None if the scale is fixed."
    )
    backoff_factor: float | None = setting(
        "backoff_factor",
        "The factor by which the scale is multiplied after an overflow, or None if the scale is fixed.",
    )
    hysteresis: int | None = setting(
        "hysteresis", "The number of overflows in a row after which the scale is lowered. None if the scale is fixed."
    )
    min_scale: float | None = setting(
        "min_scale", "The value below which the scale is never lowered, or None if the scale is fixed."
    )
    max_scale: float | None = setting(
        "max_scale",
        "The value above which the scale never grows. None means float32's maximum, or that the scale is fixed.",
    )

    def change_rules(self, **rules: Scalar | None) -> None:
        """Change the rules by which the scale grows and shrinks. Call this method between training steps.

        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
        >>> optimizer.change_rules(dynamic_growth_steps=500, min_scale=4.0)
        >>> optimizer.dynamic_growth_steps, optimizer.min_scale
        (500, 4.0)

        A `tf.function` that was traced before the call keeps the old rules, and a warning says so: create the
        function again. If the current scale is outside the new bounds, it is set to the nearest bound at once.

        Args:
            **rules: `dynamic_growth_steps`, `growth_factor`, `backoff_factor`, `hysteresis`, `min_scale` and
                `max_scale`, as in the constructor. Rules that are not passed do not change.

        Raises:
            TypeError: a keyword is not one of these rules, or a value is not a number.
            ValueError: a value is out of range, the scale is fixed or user-defined, or `hysteresis` changes from 1 to a
                larger value or back to 1.
            RuntimeError: the method is called while a graph is being built.
        """
        hyperparameters.change_rules(self._loss_scale, **rules)
        for name in rules:
            self._warn_if_traced(name)

    @property
    def iterations(self) -> tf.Variable:
        """The inner optimizer's step count."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        if isinstance(value, tf.Variable):
            self._optimizer.iterations = value
        else:
            self._optimizer.iterations.assign(value)

    @property
    def variables(self) -> CallableList:
        """The inner optimizer's variables, followed by the loss scale's. `variables()` returns the same list."""
        return CallableList([*self.weights, *self._loss_scale.variables])

    @property
    def weights(self) -> list[Variable]:
        """The inner optimizer's variables."""
        inner = self._optimizer.variables
        return list(inner() if callable(inner) else inner)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the values of `weights`, as NumPy arrays."""
        return [weight.numpy() for weight in self.weights]

    def set_weights(self, weights: list[Any]) -> None:
        """Set the inner optimizer's variables, and optionally also the loss scale's variables.

        Args:
            weights: the NumPy arrays that `get_weights` returned. The values of the loss scale's variables may come
                after these arrays, as in h5 files.

        Raises:
            ValueError: the number of arrays or the shape of an array does not match. In that case, no value is set.
        """
        variables = self.weights
        if self._are_of_scale(weights[len(variables) :]):
            variables = list(self.variables)
        if len(weights) != len(variables):
            raise ValueError(
                f"set_weights(weights) needs {len(self.weights)} arrays, as many as get_weights() returns, but got "
                f"{len(weights)}. Build the optimizer with build(variables) before setting its weights."
            )
        assign_all(variables, weights)

    def _are_of_scale(self, values: list[Any]) -> bool:
        """Return whether arrays match the loss scale's variables in shape and kind of dtype. Slots do not match."""
        arrays, variables = [np.asarray(value) for value in values], self._loss_scale.variables
        return [(array.shape, array.dtype.kind) for array in arrays] == [
            (tuple(variable.shape), variable.dtype.as_numpy_dtype().dtype.kind) for variable in variables
        ]

    @do_not_convert
    def build(self, var_list: Iterable[Variable]) -> None:
        """Create the inner optimizer's variables.

        Args:
            var_list: the variables to train.
        """
        self._family.build(list(var_list))

    def _create_all_weights(self, var_list: list[Any]) -> None:
        """Call `build`. Legacy optimizers have `_create_all_weights` instead of `build`."""
        self.build(var_list)

    def _given_or_known(self, variables: Iterable[Any] | None, call: str) -> list[Any]:
        chosen = self._family.known_variables() if variables is None else variables
        if chosen is None:
            raise ValueError(
                f"{call} without variables needs a built optimizer. Call build(trainable_variables) first, or pass "
                "the variables."
            )
        return list(chosen)

    def __repr__(self) -> str:
        scale = tf.convert_to_tensor(self._loss_scale())
        shown = f"{scale.numpy().item():g}" if tf.executing_eagerly() else f"{self.initial_scale:g} at the start"
        kind = f"dynamic_growth_steps={self.dynamic_growth_steps}" if self.dynamic else type(self._loss_scale).__name__
        kind = "fixed" if isinstance(self._loss_scale, FixedLossScale) else kind
        if self.dynamic and tf.executing_eagerly():
            kind = f"dynamic_counter={int(tf.convert_to_tensor(self.dynamic_counter))}, {kind}"
        return f"<LossScaleOptimizer loss_scale={shown}, {kind}, inner_optimizer={type(self._optimizer).__name__}>"


def finalize_variable_values(self: Any, var_list: list[Variable] | None = None) -> None:
    """Overwrite the variables with their moving averages, if the inner optimizer keeps moving averages.

    Keras 3 and tf_keras call this method on optimizers. It is defined outside of LossScaleOptimizer, because only the
    wrapper classes for these two libraries have it.

    Args:
        var_list: the variables to overwrite. The default is all variables for which the optimizer is built.
    """
    self._optimizer.finalize_variable_values(self._given_or_known(var_list, "finalize_variable_values()"))
    # Keras calls this method at the end of `fit`, so a stall that no step has reported yet is reported here.
    self._stall.report_silent_steps(self)


def _warn_if_loss_cannot_hold(loss: Any, factor: Callable[[], tf.Tensor]) -> None:
    if not isinstance(loss, tf.Tensor) or loss.dtype != tf.float16 or not tf.executing_eagerly():
        return
    scale = factor().numpy().item()
    if scale > 65504:
        logging.log_first_n(
            logging.WARNING,
            "The loss is float16, whose largest value is 65504, and the loss scale is %g: the scaled loss overflows. "
            "Cast the loss first: optimizer.get_scaled_loss(tf.cast(loss, tf.float32)).",
            1,
            scale,
        )


def _obstacle(gradients: list[Any], variables: list[Any]) -> str | None:
    """Return why XLA cannot compile a step with these gradients as one function. If it can, return None."""
    if tf.executing_eagerly():
        return (
            "in eager mode, Python values can change between steps. Decorate the function that takes the step:\n"
            "    @tf.function(jit_compile=True)\n"
            "    def train_step(gradients):\n"
            "        optimizer.apply_gradients(zip(gradients, variables))"
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "a TF1 graph cannot call a compiled function"
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return "a gradient is sparse, and may have a different number of rows in each step"
    if replicas.several_replicas():
        return "there are several replicas. Put jit_compile=True on the function that is given to strategy.run"
    devices = {getattr(variable, "device", "") for variable in variables} - {""}
    return "the variables are on several devices" if len(devices) > 1 else None


def _at_least_float32(loss: Any) -> Any:
    loss = tf.convert_to_tensor(loss)
    return tf.cast(loss, tf.float32) if loss.dtype in (tf.float16, tf.bfloat16) else loss
