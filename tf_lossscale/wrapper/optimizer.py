"""The public LossScaleOptimizer class: its constructor and its step, the same for every optimizer family."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import do_not_convert, in_xla_context, operations, runs_in_order
from tf_lossscale.core.loss_scale import FixedLossScale, current_scale
from tf_lossscale.diagnosis.exponents import EVERY
from tf_lossscale.wrapper import arguments, contract
from tf_lossscale.wrapper import registry as families
from tf_lossscale.wrapper.grads_and_vars import name_of, require_fitting, tensors_of, unzip
from tf_lossscale.wrapper.hyperparameters import Delegating
from tf_lossscale.wrapper.readings import Observable
from tf_lossscale.wrapper.saving import Configurable
from tf_lossscale.wrapper.scaling import Scaling
from tf_lossscale.wrapper.stall import PATIENCE, Stall

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Optimizer, Scalar, Variable


class _SignatureOfInit:
    """A descriptor for `__signature__` that makes `help` show the arguments of `__init__` instead of `__new__`."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class LossScaleOptimizer(Scaling, Delegating, Observable, Configurable):
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

    Read and set hyperparameters on the wrapper, and constants such as `epsilon` on `inner_optimizer`:

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
        dynamic_growth_steps: the number of finite steps in a row after which the scale grows. The default is 2000. This
            argument and those from `growth_factor` to `max_scale` are not allowed if `dynamic` is False.
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

    __signature__: Any = _SignatureOfInit()

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
            _variable_names=weakref.WeakValueDictionary(),
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

    def _init_base(self) -> None:
        """Set the attributes that base classes from the inner optimizer's library need."""

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
            In eager mode, None, or `iterations` around an optimizer of Keras 3. In a `tf.function`, a tensor
            that is available when the step is complete; with a `SharedLossScale`, the end of the block completes it. In
            a TF1 graph, the operation that takes the step.

        Raises:
            ValueError: all gradients are None, a gradient does not have the shape of its variable, or the call is in a
                cross-replica context.
            TypeError: a pair does not contain a variable, a gradient is not floating-point, or a keyword argument is
                not accepted by the inner optimizer.
            RuntimeError: it is unclear whether the gradients are scaled, another optimizer's loss scale multiplies
                them, or the optimizer cannot train in a TF1 graph.
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
    def apply(
        self, grads: Iterable[Gradient], trainable_variables: Iterable[Variable] | None = None
    ) -> tf.Operation | None:
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

        Returns:
            In a TF1 graph, the operation that takes the step. Otherwise None.

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
        result = self._result(outcome)
        return None if tf.compat.v1.executing_eagerly_outside_functions() else result

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
                # In a graph this branch reports stalls, because applied steps then need not look for one.
                return [started, counted, [] if tf.executing_eagerly() else self._stall.in_graph(self)]

        compiles = self._jit_compile and self._compiles(gradients, variables)
        counted = [] if self._exponents is None else self._count_by_exponent(gradients, variables, scaled)
        # In a TF1 graph the control dependency ensures that the exponents are counted before the scale changes.
        with tf.control_dependencies(counted):
            if scaled:
                gradients = family.unscale(gradients, self._factor_of_gradients(), variables)
            aggregate = aggregate and family.sums_over_replicas
            if aggregate and family.reduces_itself(variables):
                with replicas.explaining_refused_merge_calls():
                    gradients, aggregate = family.reduce(gradients, variables), False
            # A user's rule may have an attribute that is called `step`.
            return type(loss_scale).step(
                loss_scale, gradients, apply, skip, aggregate, observe=self._observer(variables), jit_compile=compiles
            )

    def _compiles(self, gradients: list[Any], variables: list[Any]) -> bool:
        """Return whether the step becomes a function that XLA compiles. If it cannot, log a warning once."""
        if in_xla_context():
            return False  # XLA compiles the whole function in which the step is taken.
        reason = self._family.obstacle() or _obstacle(gradients, variables)
        if reason is not None:
            self._warn_once(f"LossScaleOptimizer(jit_compile=True) takes steps that are not compiled: {reason}.")
        return reason is None

    def _warn_of_float16(self, variables: list[Any]) -> None:
        float16 = [variable for variable in tensors_of(variables) if variable.dtype == tf.float16]
        if float16:
            self._warn_once(
                f"The variable {name_of(float16[0])} is float16, in which small updates are lost: with Adam's default "
                "settings, a float16 variable may never change. Use the dtype policy mixed_float16, under which layers "
                "compute in float16 and keep their variables in float32."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)

    def _result(self, outcome: Any) -> Any:
        """Return the value that `apply_gradients` returns. In a graph, record that a step was traced."""
        if tf.executing_eagerly():
            return self._family.result()
        self.__dict__["_traced"] = True
        if not runs_in_order():
            return outcome
        with tf.control_dependencies(operations(outcome)):
            # The result is a tensor, because a tf.function cannot return an operation.
            return tf.constant(True)

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
        scale = current_scale(self._loss_scale)
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
