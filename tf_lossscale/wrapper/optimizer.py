"""LossScaleOptimizer: its constructor, and the methods that a training loop calls."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import tensorflow as tf
from absl import logging

from tf_lossscale.core import misuse, origins, replicas, scaling
from tf_lossscale.core.graphs import do_not_convert, operations, runs_in_order
from tf_lossscale.core.loss_scale import FixedLossScale
from tf_lossscale.libraries.models import name_of, tensors_of
from tf_lossscale.wrapper import checks, contract, registry
from tf_lossscale.wrapper.checks import as_list, require_fitting, unzip
from tf_lossscale.wrapper.hidden_overflow import Results, with_hidden_overflow
from tf_lossscale.wrapper.saving import Saving
from tf_lossscale.wrapper.shared import SharedLossScale

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


class _SignatureOfInit:
    """A descriptor for `__signature__` that makes `help` show the arguments of `__init__` instead of `__new__`."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Update(NamedTuple):
    """The arguments that an optimizer passes to `LossScale.step`, and what was decided about its gradients."""

    gradients: list[Any]
    apply: Callable[[list[Any]], object]
    skip: Callable[[], object]
    aggregate: bool
    decision: contract.Decision


class LossScaleOptimizer(Saving):
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
        diagnose: whether to record the variables whose gradients overflow, for `overflow_report`.
        loss_scale: a `LossScale` of your own, a `SharedLossScale`, a manager from `tf_lossscale.amp`, or a loss scale
            of `tf_lossscale.legacy`. It determines the scale and its rules, so the arguments from `dynamic` to
            `max_scale` must not be passed. The attribute `scaler` returns it; the attribute `loss_scale` is a tensor.
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
        # Libraries that inject arguments may pass them to `__init__` only, which then chooses the class.
        is_known = cls._family_class is not None or inner_optimizer is None
        return object.__new__(cls if is_known else _class_for(cls, inner_optimizer))

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
        diagnose: bool = False,
        loss_scale: object = None,
        **kwargs: Any,
    ):
        if type(self)._family_class is None:
            object.__setattr__(self, "__class__", _class_for(type(self), inner_optimizer))
        wrapper_class = registry.require_wrapper_class(inner_optimizer)
        if not isinstance(self, wrapper_class):
            raise TypeError(
                f"{type(self).__module__}.LossScaleOptimizer cannot wrap this optimizer: {inner_optimizer!r}. Call "
                "tf_lossscale.LossScaleOptimizer, which chooses the class."
            )
        scale = checks.loss_scale(
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
        diagnosis = checks.diagnosis(diagnose, scale)
        family = wrapper_class._family_class(inner_optimizer)
        chosen = family._checked_options(kwargs)
        # If the constructor raises an error, the inner optimizer must be unchanged. `_save_scale_with_inner` can raise
        # an error, but only before it changes the inner optimizer. The statements after it cannot raise errors.
        scale.prepare()
        self.__dict__.update(
            _optimizer=inner_optimizer,
            _family=family,
            # TensorFlow's DelegatingTrackableMixin reads this attribute.
            _trackable=inner_optimizer,
            _scale=scale,
            _contract=contract.contract_of(scale),
            _results=Results(),
            _traced=False,
            _stepped=False,
            _warned_of=set(),
            _diagnosis=diagnosis,
            _variable_names=weakref.WeakValueDictionary(),
        )
        self._save_scale_with_inner(is_of_user=loss_scale is not None)
        family._set_options(chosen)
        self._init_base()
        registry.add(self)

    # Keras 3's `fit` passes scaled gradients to `apply_gradients`. An override, which may clip them, gets unscaled
    # gradients in every loop, whether it is a method of a subclass, of a mixin or of the object.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "apply_gradients" in vars(base))
        override: Any = vars(owner)["apply_gradients"]
        if not owner.__module__.startswith("tf_lossscale.") and not hasattr(override, _GETS_UNSCALED):
            cls.apply_gradients = _with_unscaled_gradients(override, override.__get__)  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "apply_gradients" and callable(value):
            override = value
            value = _with_unscaled_gradients(override, lambda self: override).__get__(self)
        super().__setattr__(name, value)

    def _overrides_apply_gradients(self) -> bool:
        return hasattr(self.apply_gradients, _GETS_UNSCALED)

    def _init_base(self) -> None:
        """Set the attributes that base classes from the inner optimizer's library need."""

    def _custom_sum(self) -> Callable[..., Any] | None:
        """Return a user's method of the wrapper that sums (gradient, variable) pairs over the replicas, or None."""
        return None

    # Scaling and unscaling. ------------------------------------------------------------------------------------------

    @overload
    def get_scaled_loss(self, loss: float) -> tf.Tensor: ...

    @overload
    def get_scaled_loss(self, loss: Same) -> Same: ...

    @do_not_convert
    def get_scaled_loss(self, loss: Any) -> Any:
        """Multiply the loss by the loss scale.

        Call this method inside the `with` block of the gradient tape, and pass the gradients of the scaled loss to
        `get_unscaled_gradients`. `minimize` and Keras's `fit` scale losses and unscale gradients automatically.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> optimizer.get_scaled_loss(tf.constant(2.0)).numpy().item()
        16.0

        Args:
            loss: a floating-point tensor of any shape, which may be ragged, a nested structure of such tensors, or a
                function without arguments that returns either.

        Returns:
            The scaled loss, with the structure and dtype of `loss`. If `loss` is a function, the result is a function
            that returns the scaled loss.

        Raises:
            TypeError: the loss does not have a floating-point dtype.
            RuntimeError: the loss is scaled already. In eager mode, the result of arithmetic on it is not recognized.
        """
        self._warn_if_float16_overflows(loss)
        return self._scaled("get_scaled_loss", loss)

    @overload
    def scale_loss(self, loss: float) -> tf.Tensor: ...

    @overload
    def scale_loss(self, loss: Same) -> Same: ...

    @do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss by the loss scale, as in Keras 3. `apply` or `apply_gradients` unscales the gradients.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> optimizer.scale_loss(tf.constant(2.0)).numpy().item()
        16.0

        Args:
            loss: a floating-point tensor of any shape, which may be ragged, a nested structure of such tensors, or a
                function without arguments that returns either.

        Returns:
            The scaled loss. A float16 or bfloat16 loss becomes float32, which can hold large scales.

        Raises:
            TypeError: the loss does not have a floating-point dtype.
            RuntimeError: the loss is scaled already. In eager mode, the result of arithmetic on it is not recognized.
        """
        return self._scaled("scale_loss", loss)

    def _warn_if_float16_overflows(self, loss: Any) -> None:
        """In eager mode, warn if a loss is float16 and the factor to multiply it by exceeds the range of float16."""
        if not isinstance(loss, tf.Tensor) or loss.dtype != tf.float16 or not tf.executing_eagerly():
            return
        if self._times_loss_scale_factor(self._scale._current()).numpy().item() > 65504:
            misuse.warn_once(
                self._scale,
                "The loss is float16, and the loss scale exceeds 65504, the largest value of float16: the scaled loss "
                "overflows. Cast the loss first: optimizer.get_scaled_loss(tf.cast(loss, tf.float32)).",
            )

    # AutoGraph converts a user's function that returns the loss, but need not convert this one.
    @do_not_convert
    def _scaled(self, method: str, loss: Any) -> Any:
        """Scale a loss and mark it as scaled. For a function, return a function that scales the result of each call.

        A scaled function may be called in many steps, so each of its calls is recorded as a call to `method`.
        """
        misuse.require_unscaled_loss(loss, self._scale)
        if callable(loss) and not tf.is_tensor(loss):
            self._contract.called(method)
            return lambda: self._scaled(method, loss())
        if method == "scale_loss":
            loss = tf.nest.map_structure(_at_least_float32, loss)
        scaled = self._scale._scaled(loss, self._times_loss_scale_factor)
        self._contract.called(method)
        return scaled

    @overload
    def get_unscaled_gradients(self, grads: Iterable[SameGradient]) -> list[SameGradient]: ...

    @overload
    def get_unscaled_gradients(self, grads: Same) -> Same: ...

    @do_not_convert
    def get_unscaled_gradients(self, grads: Any) -> Any:
        """Divide the gradients of a loss from `get_scaled_loss` by the loss scale.

        `minimize` and Keras's `fit` scale losses and unscale gradients automatically.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> [g.numpy().item() for g in optimizer.get_unscaled_gradients([tf.constant(16.0)])]
        [2.0]

        Args:
            grads: an iterable of floating-point tensors, IndexedSlices or None, or another structure of them, such as
                a dict or a single tensor. IndexedSlices stay sparse, and None stays None.

        Returns:
            A list of the unscaled gradients, or the same structure as `grads`.

        Raises:
            TypeError: a gradient does not have a floating-point dtype.
            RuntimeError: a gradient is already unscaled. In eager mode, results of arithmetic on it are not recognized.
        """
        grads, restructured = scaling.flattened(grads)
        found = self._contract.require_scaled(grads, self._scale)
        unscaled = self._divided(grads, found)
        self._contract.called("get_unscaled_gradients")
        origins.mark_pair(grads, unscaled, self._scale)
        self._results.hold(unscaled)
        return restructured(unscaled)

    @do_not_convert
    def scale_gradient(self, outputs: Same) -> Same:
        """Return a model's outputs unchanged, and multiply their gradients by the loss scale.

        Use this method for a library that runs the model, computes a loss of its outputs, and calls only
        `apply_gradients`. The library's loss stays unscaled, the backward pass of the model is scaled, and
        `apply_gradients` divides its gradients. Without a step, for example in an evaluation, nothing changes.

        Every gradient must pass through this method once: a loss of the weights alone, such as a regularizer, is lost,
        and outputs must not be fed to this or another such model. The library must not clip the gradients. If it adds
        such losses or clips, use `scale_inside`.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), initial_scale=8)
        >>> weight = tf.Variable(3.0)
        >>> model = lambda x: optimizer.scale_gradient(weight * x)
        >>> with tf.GradientTape() as tape:  # in a library
        ...     loss = model(tf.constant(2.0)) ** 2
        >>> gradient = tape.gradient(loss, weight)
        >>> loss.numpy().item(), gradient.numpy().item()
        (36.0, 192.0)
        >>> _ = optimizer.apply_gradients([(gradient, weight)])
        >>> weight.numpy().item()
        -3.0

        Args:
            outputs: a tensor of any shape, or a nested structure of tensors. Parts that are neither real nor complex
                tensors stay as they are. Cast float16 outputs to float32 first: the loss computes their gradients
                before they are scaled.

        Returns:
            The outputs, with the same structure, values and dtypes.

        Raises:
            RuntimeError: a loss of these outputs was scaled as well, or contains their derivatives. The error is raised
                when its gradients are computed, or in a graph when they are unscaled or applied.
        """
        if any(getattr(part, "dtype", None) == tf.float16 for part in tf.nest.flatten(outputs)):
            misuse.warn_once(
                self._scale,
                "The outputs passed to scale_gradient() are float16. The loss computes their gradients in float16 "
                "before they are scaled, so small gradients become zero. Cast the outputs first: "
                "optimizer.scale_gradient(tf.cast(outputs, tf.float32)).",
            )
        same = self._scale._with_scaled_gradient(outputs, self._times_loss_scale_factor)
        self._contract.called("scale_loss")
        return same

    def scale_inside(self, loss_fn: SameFunction) -> SameFunction:
        """Wrap a loss function for a library's training loop that calls no optimizer method except `apply_gradients`.

        The wrapped function returns the same, unscaled loss. Its gradients are scaled during backpropagation, and
        unscaled before the tape returns them. The library can therefore clip the gradients as usual.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
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
            respect to variables. The function raises a TypeError if `loss_fn` returns a list or another type. Computing
            its gradients raises a RuntimeError if an argument is a model's output, for which there is `scale_gradient`.
        """

        @do_not_convert
        def by_scaling(upstream: tf.Tensor, gradients_of: Callable[[Any], list[Any]]) -> list[Any]:
            factor = self._times_loss_scale_factor(self._scale._current())
            gradients = gradients_of(scaling.scale_loss(upstream, factor))
            unscaled = self._family._unscale(gradients, factor)
            self._contract.unscaled_inside()
            self._scale._factors.unscaled(unscaled)
            return unscaled

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = loss_fn(*args, **kwargs)
            misuse.require_unscaled_loss(result, self._scale)
            return result

        return cast("SameFunction", scaling.scaled_inside(checked, by_scaling))

    @do_not_convert
    def _unscaled_pairs(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Return the pairs that a user's override of `apply_gradients` gets: unscaled now if they are scaled."""
        gradients, variables = unzip(grads_and_vars)
        if self._contract.decide(self._that_scale(gradients, variables), self._scale).scaled:
            gradients = self._unscaled(gradients, variables)
        return list(zip(gradients, variables))

    def _that_scale(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients without those that are new values of variables, which do not depend on the scale."""
        return [None if self._family._overwrites(v) else gradient for gradient, v in zip(gradients, variables)]

    def _unscaled(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return self._family._unless_overwritten(
            lambda scaled, _: self.get_unscaled_gradients(scaled), gradients, variables
        )

    def _divided(
        self, gradients: list[Any], found: list[origins.Origin], variables: list[Any] | None = None
    ) -> list[Any]:
        """Divide gradients with these origins by the factor that multiplied their loss."""

        def divide(scale: tf.Tensor) -> list[Any]:
            return self._family._unscale(gradients, self._times_loss_scale_factor(scale), variables)

        return self._scale._unscaled(gradients, found, divide)

    def _times_loss_scale_factor(self, scale: tf.Tensor) -> tf.Tensor:
        """Multiply a scale by Keras 3's `loss_scale_factor`, if it is set."""
        factor = vars(self).get("loss_scale_factor")
        return scale if factor is None else scale * factor

    # The step. -------------------------------------------------------------------------------------------------------

    @do_not_convert
    def compute_gradients(
        self, loss: Loss, var_list: Variables, grad_loss: tf.Tensor | None = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, Variable]]:
        """Scale the loss, compute its gradients, and return them unscaled.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
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
            ValueError: `loss` is a tensor, and `tape` is missing. In a TF1 graph a tensor needs no tape.
        """
        if not callable(loss) and tape is None and tf.compat.v1.executing_eagerly_outside_functions():
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
        pairs = self._family._gradients(scaled_loss, variables, grad_loss, tape)
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

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
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
            ValueError: `loss` is a tensor and `tape` is missing, all gradients are None, or the call is in a
                cross-replica context.
        """
        replicas.require_replica_context("minimize")
        pairs = self._compute_gradients(loss, var_list, grad_loss, tape)
        if not pairs and self._family._minimizes_without_variables:
            return self._family._result()
        return self.apply_gradients(pairs, name=name, **kwargs)

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

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
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
            In eager mode, None, or `iterations` around an optimizer of Keras 3. In a `tf.function`, whether the step
            was applied, as a bool scalar tensor that is available when the step is complete. In a TF1 graph, the
            operation that takes the step.

        Raises:
            ValueError: all gradients are None, a gradient does not have the shape of its variable, or the call is in a
                cross-replica context.
            TypeError: a pair does not contain a variable, a gradient is not floating-point, or a keyword argument is
                not accepted by the inner optimizer.
            RuntimeError: it is unclear whether the gradients are scaled, another optimizer's loss scale multiplies
                them, the loss scale belongs to several optimizers, or the optimizer cannot train in a TF1 graph.
        """
        del name
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        return self._take(self._checked_update(grads_and_vars, aggregate, kwargs))

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
        replicas.require_replica_context("apply")
        grads = list(grads)
        variables = self._given_or_known(trainable_variables, "apply(grads)")
        require_fitting(grads, variables)
        scaled = self._that_scale(grads, variables)
        decision = self._contract.decide_for_apply(scaled, self._scale, self._family._apply_takes_unscaled)
        result = self._take(self._prepared(grads, variables, scaled, decision))
        return None if tf.compat.v1.executing_eagerly_outside_functions() else result

    def _checked_update(self, grads_and_vars: Any, aggregate: bool, keywords: dict[str, Any]) -> Update:
        """Check (gradient, variable) pairs, and prepare the update that `apply_gradients` takes with them."""
        replicas.require_replica_context("apply_gradients")
        gradients, variables = unzip(grads_and_vars)
        if gradients or not self._family._takes_empty_steps:
            require_fitting(gradients, variables)
        if keywords:
            self._require_keywords(keywords)
        scaled = self._that_scale(gradients, variables)
        decision = self._contract.decide(scaled, self._scale)
        return self._prepared(gradients, variables, scaled, decision, aggregate, keywords)

    def _prepared(
        self,
        gradients: list[Any],
        variables: list[Any],
        that_scale: list[Any],
        decision: contract.Decision,
        aggregate: bool = True,
        keywords: dict[str, Any] | None = None,
    ) -> Update:
        """Create the optimizer's variables, unscale the gradients if they are scaled, and return the update to take."""
        self._prepare_to_train(gradients, variables)
        if decision.scaled:
            gradients = self._divided(gradients, decision.found, variables)
        elif self._scale.may_skip:
            gradients = with_hidden_overflow(gradients, that_scale, self._results, self._scale)
        aggregate = aggregate and self._family.sums_over_replicas
        if aggregate:
            gradients, aggregate = self._reduced(gradients, variables)
        apply, skip = self._apply_and_skip(variables, decision.scaled, keywords or {})
        update = Update(gradients, apply, skip, aggregate, decision)
        return update if self._diagnosis is None or not variables else self._recording(update, variables)

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], bool]:
        """Sum the gradients over the replicas if the user or the family does that in its own way.

        Return them, and whether the loss scale's step still has to sum them.
        """
        family, custom_sum = self._family, self._custom_sum() or self._family._custom_sum()
        if custom_sum is None and not family._reduces_itself(variables):
            return gradients, True
        with replicas.explaining_refused_merge_calls():
            return family._reduce(gradients, variables, custom_sum), False

    def _apply_and_skip(
        self, variables: list[Any], scaled: bool, keywords: dict[str, Any]
    ) -> tuple[Callable[[list[Any]], Any], Callable[[], Any]]:
        """Return the functions of an update: one applies gradients, the other does what a skipped step does."""
        family = self._family

        def apply(gradients: list[Any]) -> Any:
            with replicas.local_copies(family._replica_variables):
                return family.apply(gradients, variables, **keywords)

        def skip() -> list[Any]:
            with replicas.local_copies(family._replica_variables):
                started = family._start_averages()
                with tf.control_dependencies(operations(started)):
                    # If the caller passed unscaled gradients, `iterations` counts a skipped step, as in TensorFlow 2.
                    # If the caller passed scaled gradients, a skipped step is not counted, as in Keras 3.
                    return [started, None if scaled else family.count_skipped_step()]

        return apply, skip

    def _prepare_to_train(self, gradients: list[Any], variables: list[Any]) -> None:
        """Create the optimizer's variables that do not exist yet."""
        family = self._family

        def updated() -> list[Any]:
            return [variable for gradient, variable in zip(gradients, variables) if gradient is not None]

        if not tf.executing_eagerly():
            family._require_graph_mode()
        if family._ensure_built(updated() if family._slots_need_gradients else variables):
            self._warn_of_half_precision(updated())
            self._require_own_scale()

    def _warn_of_half_precision(self, variables: list[Any]) -> None:
        """Warn once of each half-precision dtype of which the optimizer trains variables."""
        for variable in tensors_of(variables):
            if variable.dtype in _LOST_IN and variable.dtype not in self._warned_of:
                self._warned_of.add(variable.dtype)
                logging.warning(
                    "The variable %s is %s, in which %s. Use the dtype policy mixed_%s, under which layers compute in "
                    "%s and keep their variables in float32.",
                    *(name_of(variable), variable.dtype.name, _LOST_IN[variable.dtype]),
                    *(variable.dtype.name,) * 2,
                )

    def _take(self, update: Update) -> Any:
        """Let the loss scale apply or skip the update, and return the result of `apply_gradients`."""
        scaler = self._scale
        if isinstance(scaler, SharedLossScale):
            raise RuntimeError(
                "This optimizer shares its loss scale with others, and one decision has to be made for all of them. "
                "Step with all optimizers at once: shared.apply_gradients([(optimizer, grads_and_vars), ...]). "
                "compute_gradients(loss, variables) returns such pairs."
            )
        # A user's rule may have an attribute that is called `_step`, so the method is looked up in the class.
        outcome = type(scaler)._step(scaler, update.gradients, update.apply, update.skip, update.aggregate)
        self._record(update)
        if tf.executing_eagerly():
            return self._family._result()
        return outcome if runs_in_order() else outcome.op

    def _record(self, update: Update) -> None:
        """Record that an update was taken or traced."""
        self._contract.record(update.decision)
        self._results.hold([])
        self.__dict__.update(_stepped=True, _traced=self._traced or not tf.executing_eagerly())

    def _require_own_scale(self) -> None:
        """Raise an error if another optimizer has stepped with the same loss scale, which changes in each step."""
        scaler = self._scale
        if isinstance(scaler, SharedLossScale) or not (scaler.may_skip and scaler._overrides("move")):
            return

        def has_others() -> bool:
            wrappers = [other for other in registry.wrappers() if other.scaler is scaler and other._stepped]
            return any(other._optimizer is not self._optimizer for other in wrappers)

        if registry.holds_after_collection(has_others):
            raise RuntimeError(
                f"Two optimizers step with the same {type(scaler).__name__}, which changes in each of their steps. "
                "Pass each optimizer a loss scale of its own. Or pass both a SharedLossScale, and step with "
                "shared.apply_gradients([(optimizer, grads_and_vars), ...]). If the other optimizer is no longer "
                "needed, delete it."
            )

    def _require_keywords(self, kwargs: dict[str, Any]) -> None:
        """Raise an error if the inner optimizer's `apply_gradients` does not accept one of the keyword arguments."""
        for name in kwargs:
            if not self._family._takes(name):
                raise TypeError(
                    f"apply_gradients() got an unexpected keyword argument '{name}': neither LossScaleOptimizer nor "
                    f"the inner {type(self._optimizer).__name__} takes it."
                )

    # The parts. ------------------------------------------------------------------------------------------------------

    @property
    def _loss_scale(self) -> Any:
        """The old name of `scaler`. It can be set, because old code assigns its own loss scale to this attribute."""
        return self._scale

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        scale = checks.as_loss_scale(value)
        if scale is None:
            raise TypeError(
                "`_loss_scale` must be a tf_lossscale LossScale, or an object with the methods __call__() and "
                f"update(grads), but got: {value!r}. Make a new LossScaleOptimizer with the arguments you need."
            )
        scale.prepare()
        self.__dict__.update(_scale=scale, _contract=contract.contract_of(scale))
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
        scale = self._scale._current()
        shown = f"{scale.numpy().item():g}" if tf.executing_eagerly() else f"{self.initial_scale:g} at the start"
        kind = f"dynamic_growth_steps={self.dynamic_growth_steps}" if self.dynamic else type(self._scale).__name__
        kind = "fixed" if isinstance(self._scale, FixedLossScale) else kind
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


def _class_for(cls: Any, inner_optimizer: Any) -> Any:
    """Return the class of a wrapper around an optimizer that derives from `cls`."""
    return registry.combined(cls, registry.require_wrapper_class(inner_optimizer))


# What half-precision variables lose.
_LOST_IN = {
    tf.float16: "small updates are lost, and Adam's averages of small squared gradients are zero, so that its steps "
    "are far too large, or zero",
    tf.bfloat16: "updates below 1/256 of the variable's value are lost",
}

_GETS_UNSCALED = "_gets_unscaled_gradients"


def _with_unscaled_gradients(override: Any, bind: Callable[[Any], Callable[..., Any]]) -> Any:
    """Return a method that unscales the gradients, and then calls the user's `override`, which `bind` binds."""

    @functools.wraps(override)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return bind(self)(self._unscaled_pairs(grads_and_vars), *args, **kwargs)

    setattr(apply_gradients, _GETS_UNSCALED, True)
    return apply_gradients


def _at_least_float32(loss: Any) -> Any:
    loss = loss if tf.is_tensor(loss) else tf.convert_to_tensor(loss)
    return tf.cast(loss, tf.float32) if loss.dtype in (tf.float16, tf.bfloat16) else loss
