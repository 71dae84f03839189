"""Arithmetic on losses and gradients: multiplication and division by a scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tf_lossscale.core.graphs import in_xla_context, optimization_barrier

#: TensorFlow runs an elementwise operation on up to about this many values in one thread, in less time than it takes to
#: start several operations.
SMALL = 20_000


def scale_loss(loss: Any, scale: tf.Tensor, on_backward: Callable[[Any], None] | None = None) -> Any:
    """Multiply a floating-point tensor, or a nested structure of them, by a float32 scale, in the loss's own dtype.

    In eager mode, each backward pass passes the gradient of a loss to `on_backward`.
    """

    def product(part: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Mul(x=part, y=tf.cast(scale, part.dtype))

    recorded = with_gradient(product, lambda upstream, _: product(upstream), on_backward or (lambda _: None))

    def scaled(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.with_flat_values(scaled(part.flat_values))
        part = tf.convert_to_tensor(part)
        if not part.dtype.is_floating:
            raise TypeError(
                f"`loss` must be a floating-point tensor, but got dtype {part.dtype.name}. "
                "Cast it first, for example with tf.cast(loss, tf.float32)."
            )
        return product(part) if on_backward is None or not tf.executing_eagerly() else recorded(part)

    return tf.nest.map_structure(scaled, loss)


def scale_gradient(tensors: Any, scale: tf.Tensor, on_backward: Callable[[Any], None]) -> Any:
    """Return the tensors in a structure unchanged, but multiply the gradients of real and complex ones by a scale.

    In eager mode, each backward pass passes the product to `on_backward`.
    """

    def times_scale(upstream: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
        product = tf.cast(multiplied(upstream, scale), upstream.dtype)
        return _without_gradient(_DERIVATIVE, product, tensor)

    same = with_gradient(tf.identity, times_scale, on_backward)

    def unchanged(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.with_flat_values(unchanged(part.flat_values))
        return same(part) if tf.is_tensor(part) and is_real_or_complex(part.dtype) else part

    return tf.nest.map_structure(unchanged, tensors)


def with_gradient(
    function: Callable[[Any], Any], backward: Callable[[Any, Any], Any], on_backward: Callable[[Any], None]
) -> Any:
    """Return a function of a tensor with another gradient, a function of the upstream gradient and the tensor.

    In eager mode, each backward pass passes its result to `on_backward`.
    """

    def with_its_gradient(tensor: tf.Tensor) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            result = backward(upstream, tensor)
            if tf.executing_eagerly():
                on_backward(result)
            return result

        return function(tensor), gradient

    return tf.custom_gradient(with_its_gradient)


def flattened(gradients: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the gradients in a structure as a list, and a function that gives a list the structure again.

    `tape.gradient` returns the structure of its sources: for example a dict, a list for each network, or one tensor.
    """
    if not (tf.is_tensor(gradients) or isinstance(gradients, Mapping)):
        gradients = list(gradients)
        if not any(isinstance(gradient, (list, tuple, Mapping)) for gradient in gradients):
            return gradients, list
    return tf.nest.flatten(gradients), lambda flat: tf.nest.pack_sequence_as(gradients, flat)


def unscale(gradients: Iterable[Any], scale: tf.Tensor) -> list[Any]:
    """Divide gradients by a float32 scale, and keep the graph optimizer from merging the division with the scaling.

    The results have the dtypes of the gradients. IndexedSlices stay sparse, and None stays None.
    """
    scale, compiled = optimization_barrier(tf.convert_to_tensor(scale)), in_xla_context()

    def unscaled(values: tf.Tensor) -> tf.Tensor:
        return divide(values, _opaque_to_xla(scale, values) if compiled else scale)

    result = floating(gradients)
    for positions in alike(result):
        if len(positions) == 1:
            result[positions[0]] = over_values(unscaled, result[positions[0]])
        else:
            # Only without XLA: in its functions, `alike` returns groups of one.
            quotients = divide(tf.stack([result[i] for i in positions]), scale)
            for i, quotient in zip(positions, tf.unstack(quotients)):
                result[i] = quotient
    return result


def _opaque_to_xla(scale: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return the scale, once for each value, in a form that XLA cannot recognize as a constant.

    XLA merges the multiplication by a constant with the division by it, so that an overflow between the two would go
    unnoticed. It also multiplies by the reciprocal of a constant, which is zero for large scales. XLA's own
    optimization barrier does not prevent this in TensorFlow 2.22.
    """
    always_true = tf.logical_or(tf.equal(values, values), tf.not_equal(values, values))
    return tf.where(always_true, scale, tf.cast(values, scale.dtype))


def alike(gradients: list[Any]) -> list[list[int]]:
    """Group the positions of small tensors that can be stacked, to start fewer operations.

    Starting an operation takes longer than computing a small tensor's values. Other tensors, complex ones and
    IndexedSlices are groups of one, and so are up to three small tensors, for which stacking takes as long as it saves.
    XLA fuses operations, so in its functions every group is of one.
    """
    groups: dict[Any, list[int]] = {}
    compiled = in_xla_context()
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        dense = not isinstance(gradient, tf.IndexedSlices) and not gradient.dtype.is_complex
        small = dense and (gradient.shape.num_elements() or SMALL + 1) <= SMALL
        key = (gradient.dtype, tuple(gradient.shape.as_list()), gradient.device) if small and not compiled else i
        groups.setdefault(key, []).append(i)
    return [part for group in groups.values() for part in ([group] if len(group) > 3 else [[i] for i in group])]


def divide(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Divide values by a float32 scale, and round the quotients to the dtype of the values.

    Float16 and bfloat16 values are divided in float32. Multiplication by the reciprocal of the scale is guaranteed to
    give the same bits only if the scale is a power of two up to 2**126. For larger scales the reciprocal is subnormal,
    and kernels treat it as zero. In float16 the reciprocal is zero for scales of 2**25 and above.
    """
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(tf.raw_ops.RealDiv(x=tf.cast(values, wide), y=tf.cast(scale, wide)), values.dtype)


def multiplied(gradient: Any, scale: tf.Tensor) -> Any:
    """Multiply a gradient by the scale, in float32, or in float64 if the gradient is float64."""

    def product(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32
        return tf.cast(values, wide) * tf.cast(scale, wide)

    return over_values(product, gradient)


def floating(gradients: Iterable[Any]) -> list[Any]:
    """Convert gradients to tensors, except IndexedSlices and None.

    Raise an error if one is neither of a floating-point dtype nor complex.
    """
    tensors = []
    for gradient in gradients:
        if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if gradient is not None and not is_real_or_complex(gradient.dtype):
            raise TypeError(
                f"A gradient must be a floating-point or complex tensor, but got dtype {gradient.dtype.name}. "
                "Compute gradients only for floating-point and complex variables."
            )
        tensors.append(gradient)
    return tensors


def is_real_or_complex(dtype: tf.DType) -> bool:
    """Return whether a gradient may have a dtype."""
    return dtype.is_floating or dtype.is_complex


def over_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Apply a function to a gradient's values, to the rows of IndexedSlices, or to real and imaginary parts.

    If the gradient is None, return None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(over_values(function, gradient.values), gradient.indices, gradient.dense_shape)
    if gradient.dtype.is_complex:
        return tf.complex(*map(function, real_parts(gradient)))
    return function(gradient)


def real_parts(values: tf.Tensor) -> list[tf.Tensor]:
    """Return the real and the imaginary part of a complex tensor, and other tensors as they are."""
    return [tf.math.real(values), tf.math.imag(values)] if values.dtype.is_complex else [values]


def scaled_inside(
    loss_fn: Callable[..., Any], by_scaling: Callable[[tf.Tensor, Callable[[tf.Tensor], list[Any]]], list[Any]]
) -> Callable[..., Any]:
    """Wrap a loss function, so that its gradients are computed from the scaled loss and then unscaled.

    A gradient with respect to an argument raises an error: the part of the model that computed it is outside, where
    nothing is scaled.

    `by_scaling` takes the upstream gradient, and a function that returns the variables' gradients for an upstream
    gradient. It returns the gradients for the upstream gradient that it got. `loss_fn` returns the loss, or a tuple
    that begins with the loss; other parts of the tuple have no gradients.
    """

    def same_loss(*args: Any, **kwargs: Any) -> Any:
        results = []
        tensors = [each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, tf.Tensor)]
        watched = [_without_gradient(_PREDICTIONS, each) for each in tensors if each.dtype.is_floating]

        def loss_and_gradients(*_: Any) -> Any:
            # The tape is persistent, because the caller's tape may be persistent and request the gradients several
            # times.
            with tf.GradientTape(persistent=True) as tape:
                result = loss_fn(*args, **kwargs)
                loss = _loss_of(result)
            results.append(result)

            def gradients(upstream: Any, variables: Any = ()) -> Any:
                def gradients_of(scaled: tf.Tensor) -> list[Any]:
                    return tape.gradient(loss, variables, output_gradients=scaled)

                # The backward pass goes on to the arguments that the caller's tape watches.
                return [tf.zeros([], each.dtype) for each in watched], by_scaling(upstream, gradients_of)

            return loss, gradients

        loss, (result,) = tf.custom_gradient(loss_and_gradients)(*watched), results
        return _beginning_with(loss, result) if isinstance(result, tuple) else loss

    return same_loss


_PREDICTIONS = (
    "A loss function from scale_inside() got a tensor that was computed from trained variables outside of it, such as "
    "a model's predictions, so the model's gradients would not be scaled. The function must run the model itself. If a "
    "library runs the model and then calls loss(labels, predictions), pass it the unwrapped loss function, and as its "
    "model lambda x: optimizer.scale_gradient(model(x)). If the argument needs no gradient, pass "
    "tf.stop_gradient(argument)."
)
_DERIVATIVE = (
    "A loss contains a derivative of outputs from scale_gradient(), which the loss scale would multiply. Leave the "
    "outputs as they are, and scale the loss: optimizer.scale_loss(loss)."
)


def _without_gradient(message: str, tensor: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
    """Return a tensor as a function of itself and of others, whose gradient is an error."""

    def refuse(_: Any) -> Any:
        raise RuntimeError(message)

    return tf.custom_gradient(lambda first, *_: (tf.identity(first), refuse))(tensor, *others)


def _loss_of(result: Any) -> tf.Tensor:
    """Return the loss from a loss function's result.

    A list is rejected, because it may contain either several losses, or one loss and further results.
    """
    part = result[0] if isinstance(result, tuple) and result else result
    try:
        loss = None if isinstance(part, (list, tuple)) else tf.convert_to_tensor(part)
    except (TypeError, ValueError):
        loss = None
    if loss is None or not loss.dtype.is_floating:
        raise TypeError(
            "`loss_fn` must return the loss (a floating-point tensor) or a tuple that begins with the loss, but "
            f"returned: {result!r}. If there are several losses, add them up. Return further results in a tuple, not "
            "in a list."
        )
    return loss


def _beginning_with(loss: tf.Tensor, result: tuple[Any, ...]) -> tuple[Any, ...]:
    rest = [tf.stop_gradient(part) if tf.is_tensor(part) else part for part in tf.nest.flatten(result[1:])]
    parts = (loss, *tf.nest.pack_sequence_as(result[1:], rest))
    return type(result)._make(parts) if hasattr(result, "_make") else parts
