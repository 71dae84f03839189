"""Gradients and their variables, as callers pass them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

_USUAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


def unzip(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the gradients and the variables of (gradient, variable) pairs.

    >>> unzip([(None, "weight"), (None, "bias")])
    ([None, None], ['weight', 'bias'])

    Args:
        grads_and_vars: any iterable of pairs; numbers and arrays become tensors.

    Returns:
        Two lists of the same length.

    Raises:
        ValueError: an element is not a pair.
    """
    gradients, variables = [], []
    for pair in grads_and_vars:
        if (not isinstance(pair, tuple) and tf.is_tensor(pair)) or len(pair) != 2:
            raise ValueError(f"`grads_and_vars` must contain (gradient, variable) pairs, but got: {pair}.")
        gradient, variable = pair
        known = gradient is None or isinstance(gradient, (tf.Tensor, tf.IndexedSlices))
        gradients.append(gradient if known else _as_gradient(gradient, variable))
        variables.append(variable)
    return gradients, variables


def require_fitting(gradients: list[Any], variables: list[Any]) -> None:
    """Raise if these gradients cannot be applied to these variables, before anything has changed.

    >>> require_fitting([tf.constant([1.0]), None], [tf.Variable([2.0]), tf.Variable(3.0)])

    Args:
        gradients: tensors, IndexedSlices or None.
        variables: one for each gradient.

    Raises:
        ValueError: the lengths differ, all gradients are None, or a shape does not fit.
        TypeError: a gradient is not of a floating dtype, or a variable is not a variable.
    """
    if len(gradients) != len(variables):
        raise ValueError(
            f"Each variable must have one gradient, but got {len(gradients)} gradients for {len(variables)} variables. "
            "Pass None for a variable without a gradient."
        )
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                f"`grads_and_vars` must contain (gradient, variable) pairs, but {variable!r} is not a variable."
            )
    has_gradient = False
    for gradient, variable in zip(gradients, variables):
        if gradient is None:
            continue
        has_gradient = True
        if isinstance(gradient, tf.Tensor) and gradient.shape == variable.shape and gradient.dtype in _USUAL:
            continue
        _require_fitting_one(gradient, variable)
    if not has_gradient:
        names = ([v.name for v in variables],)
        raise ValueError(
            f"No gradients provided for any variable: {names}. "
            f"Provided `grads_and_vars` is {tuple(zip(gradients, variables))}."
        )


def _require_fitting_one(gradient: Any, variable: Any) -> None:
    if not gradient.dtype.is_floating:
        raise TypeError(
            f"The gradient of {variable.name} must be a floating tensor, but got dtype {gradient.dtype.name}."
        )
    if isinstance(gradient, tf.Tensor) and not _fits(gradient.shape, tf.TensorShape(variable.shape)):
        raise ValueError(
            f"The gradient of {variable.name} has shape {gradient.shape}, but the variable has shape "
            f"{variable.shape}. Check the order of the gradients and the variables."
        )


def without_none(change: Callable[..., Iterable[Any]], gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Change gradients by a function of (gradient, variable) pairs that does not accept None.

    >>> without_none(lambda pairs: [(2 * g, v) for g, v in pairs], [None, 3], ["weight", "bias"])
    [None, 6]

    Args:
        change: a function that takes and returns pairs, in the same order.
        gradients: the gradients; None stays None.
        variables: one for each gradient.

    Returns:
        A list as long as `gradients`.
    """
    changed = iter(change([(g, v) for g, v in zip(gradients, variables) if g is not None]))
    return [None if g is None else next(changed)[0] for g in gradients]


def as_list(var_list: Any) -> list[Any]:
    """Return one variable, or an iterable of them, as a list.

    >>> as_list("weight"), as_list(("weight", "bias"))
    (['weight'], ['weight', 'bias'])

    Args:
        var_list: one variable, or any iterable of variables.

    Returns:
        A new list.
    """
    if isinstance(var_list, (list, tuple)) or (hasattr(var_list, "__iter__") and not _is_one(var_list)):
        return list(var_list)
    return [var_list]


def tensors_of(variables: list[Any]) -> list[Any]:
    """Return the `tf.Variable`s of a list of variables, which may include `keras.Variable`s, for the tape.

    >>> tensors_of([tf.keras.Variable(1.0)])[0].numpy().item()
    1.0

    Args:
        variables: of TensorFlow or Keras 3.

    Returns:
        A list of the same length.
    """
    # `value` is a method of TensorFlow's variables, and the inner variable of Keras's.
    return [v if callable(getattr(v, "value", None)) else getattr(v, "value", v) for v in variables]


def assign_all(variables: list[Any], values: list[Any]) -> None:
    """Assign a value to each variable, or raise without assigning any.

    >>> weight = tf.Variable([1.0])
    >>> assign_all([weight], [tf.constant([2.0])])
    >>> weight.numpy().tolist()
    [2.0]

    Args:
        variables: of TensorFlow or Keras 3.
        values: an array for each.

    Raises:
        ValueError: a shape does not fit.
    """
    for variable, value in zip(variables, values):
        if tuple(variable.shape) != tuple(getattr(value, "shape", ())):
            raise ValueError(
                f"set_weights(weights): {variable.name} has shape {tuple(variable.shape)}, but the array has "
                f"shape {tuple(getattr(value, 'shape', ()))}."
            )
    for variable, value in zip(variables, values):
        variable.assign(value)


def _as_gradient(gradient: Any, variable: Any) -> Any:
    # Python numbers have no dtype.
    has_dtype = hasattr(gradient, "dtype") or not hasattr(variable, "dtype")
    return tf.convert_to_tensor(gradient, dtype_hint=None if has_dtype else tf.as_dtype(variable.dtype))


def _fits(gradient: tf.TensorShape, variable: tf.TensorShape) -> bool:
    """Return whether the gradient can be broadcast to the variable, as most optimizers do."""
    try:
        return tf.broadcast_static_shape(gradient, variable).is_compatible_with(variable)
    except ValueError:
        return False


def _is_one(var_list: Any) -> bool:
    return hasattr(var_list, "dtype") or isinstance(var_list, str)
