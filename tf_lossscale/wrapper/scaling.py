"""Scales losses and unscales gradients: the methods of LossScaleOptimizer that training loops call before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, overload

import tensorflow as tf
from absl import logging

from tf_lossscale.core import gradients as arithmetic
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.inside import scaled_inside
from tf_lossscale.core.loss_scale import current_scale
from tf_lossscale.wrapper import marks
from tf_lossscale.wrapper.grads_and_vars import as_list, tensors_of
from tf_lossscale.wrapper.hyperparameters import Parts

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Loss, Same, SameFunction, SameGradient, Variable, Variables


class Scaling(Parts):
    """Methods of LossScaleOptimizer that scale losses, and compute and unscale gradients."""

    apply_gradients: Any

    def _unscaled(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        # A gradient that is a variable's new value does not depend on the scale.
        return self._family.unless_overwritten(
            lambda scaled, _: self.get_unscaled_gradients(scaled), gradients, variables
        )

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

    def _scaled(self, method: str, loss: Any) -> Any:
        """Scale a loss and mark it as scaled. For a function, return a function that scales the result of each call.

        A scaled function may be called in many steps, so each of its calls is recorded as a call to `method`.
        """
        marks.require_unscaled_loss(loss, self._loss_scale)
        if callable(loss) and not tf.is_tensor(loss):
            self._contract.called(method)
            return lambda: self._scaled(method, loss())
        if method == "scale_loss":
            loss = tf.nest.map_structure(_at_least_float32, loss)
        factor = self._current_factor()
        scaled = arithmetic.scale_loss(loss, factor)
        self._contract.called(method, factor)
        marks.mark(scaled, self._loss_scale, True)
        return scaled

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[SameGradient]) -> list[SameGradient]:
        """Divide the gradients of a loss from `get_scaled_loss` by the loss scale.

        `minimize` and Keras's `fit` scale losses and unscale gradients automatically.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
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
            RuntimeError: a gradient is already unscaled. In eager mode, results of arithmetic on it are not recognized.
        """
        grads = list(grads)
        self._contract.require_scaled(grads, self._loss_scale)
        unscaled = self._family.unscale(grads, self._factor_of_gradients())
        self._contract.called("get_unscaled_gradients")
        marks.mark(grads, self._loss_scale, True)
        marks.mark(unscaled, self._loss_scale, False)
        return unscaled

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
            respect to variables. The function raises a TypeError if `loss_fn` returns a list or another type.
        """

        def by_scaling(upstream: tf.Tensor, gradients_of: Callable[[Any], list[Any]]) -> list[Any]:
            factor = self._current_factor()
            gradients = gradients_of(arithmetic.scale_loss(upstream, factor))
            self._contract.unscaled_inside()
            return self._family.unscale(gradients, factor)

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = loss_fn(*args, **kwargs)
            marks.require_unscaled_loss(result, self._loss_scale)
            return result

        return cast("SameFunction", scaled_inside(checked, by_scaling))

    def _current_factor(self) -> tf.Tensor:
        """Return the factor to multiply a loss by: the loss scale, times Keras 3's `loss_scale_factor` if it is set."""
        factor = vars(self).get("loss_scale_factor")
        scale = current_scale(self._loss_scale)
        return scale if factor is None else scale * factor

    def _factor_of_gradients(self) -> tf.Tensor:
        """Return the factor that multiplied the loss of the gradients that are being unscaled or applied."""
        return self._contract.factor(self._current_factor)

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


def _at_least_float32(loss: Any) -> Any:
    loss = loss if tf.is_tensor(loss) else tf.convert_to_tensor(loss)
    return tf.cast(loss, tf.float32) if loss.dtype in (tf.float16, tf.bfloat16) else loss
