"""Checks and converts the gradients and variables that callers pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.wrapper.marks import is_scaled

_USUAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


def unzip(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Split an iterable of (gradient, variable) pairs into two lists. Convert numbers and arrays to tensors."""
    gradients, variables = [], []
    for pair in grads_and_vars:
        if (not isinstance(pair, tuple) and tf.is_tensor(pair)) or len(pair) != 2:
            raise ValueError(f"`grads_and_vars` must contain (gradient, variable) pairs, but got: {pair}.")
        gradient, variable = pair
        is_gradient = gradient is None or isinstance(gradient, (tf.Tensor, tf.IndexedSlices))
        gradients.append(gradient if is_gradient else _as_gradient(gradient, variable))
        variables.append(variable)
    return gradients, variables


def require_fitting(gradients: list[Any], variables: list[Any]) -> None:
    """Raise an error if the gradients cannot be applied to the variables."""
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
    _require_strategy_of(variables)
    has_gradient = False
    for gradient, variable in zip(gradients, variables):
        if gradient is None:
            continue
        has_gradient = True
        if getattr(variable, "overwrite_with_gradient", False) and is_scaled(gradient) is False:
            raise ValueError(
                f"{variable.name} has overwrite_with_gradient=True, so its gradient is the variable's new value, but "
                "get_unscaled_gradients() divided this gradient by the loss scale. Pass the gradients of the scaled "
                "loss to apply(gradients, variables), or call minimize(): both leave such gradients as they are."
            )
        if isinstance(gradient, tf.Tensor) and gradient.shape == variable.shape and gradient.dtype in _USUAL:
            continue
        _require_fitting_one(gradient, variable)
    if not has_gradient:
        names = ([v.name for v in variables],)
        raise ValueError(
            f"No gradients provided for any variable: {names}. "
            f"Provided `grads_and_vars` is {tuple(zip(gradients, variables))}."
        )


def _require_strategy_of(variables: list[Any]) -> None:
    """Raise an error if a variable has copies on several replicas, but no strategy is in use to update all copies."""
    if tf.distribute.has_strategy():
        return
    for variable in variables:
        # A Keras 3 variable contains a TensorFlow variable.
        variable = getattr(variable, "_value", variable)
        if not isinstance(variable, tf.distribute.DistributedValues):
            continue
        strategy: Any = replicas.strategy_of(variable)
        if strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"{variable.name} was created under {type(strategy).__name__} and has {strategy.num_replicas_in_sync} "
                "copies, but this step is outside of the strategy, so the copies would diverge. Take the step "
                "inside the function that you pass to strategy.run()."
            )


def _require_fitting_one(gradient: Any, variable: Any) -> None:
    if not gradient.dtype.is_floating:
        raise TypeError(
            f"The gradient of {variable.name} must be a floating-point tensor, but got dtype {gradient.dtype.name}."
        )
    if isinstance(gradient, tf.Tensor) and not _fits(gradient.shape, tf.TensorShape(variable.shape)):
        raise ValueError(
            f"The gradient of {variable.name} has shape {gradient.shape}, but the variable has shape "
            f"{variable.shape}. Check the order of the gradients and the variables."
        )


def without_none(change: Callable[..., Iterable[Any]], gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Transform gradients with a function of (gradient, variable) pairs that does not accept None. None stays None."""
    changed = iter(change([(g, v) for g, v in zip(gradients, variables) if g is not None]))
    return [None if g is None else next(changed)[0] for g in gradients]


def as_list(var_list: Any) -> list[Any]:
    """Return a single variable or an iterable of variables as a list."""
    if isinstance(var_list, (list, tuple)) or (hasattr(var_list, "__iter__") and not _is_one(var_list)):
        return list(var_list)
    return [var_list]


def tensors_of(variables: list[Any]) -> list[Any]:
    """Replace each `keras.Variable` in a list with its `tf.Variable`, which a gradient tape can watch."""
    # A `tf.Variable` has a `value` method. A `keras.Variable` has a `value` attribute, which is the `tf.Variable`.
    return [v if callable(getattr(v, "value", None)) else getattr(v, "value", v) for v in variables]


def assign_all(variables: list[Any], values: list[Any]) -> None:
    """Assign a value to each variable. If any shape is wrong, raise an error and assign nothing."""
    for variable, value in zip(variables, values):
        if tuple(variable.shape) != tuple(getattr(value, "shape", ())):
            raise ValueError(
                f"set_weights(weights): {variable.name} has shape {tuple(variable.shape)}, but the array has "
                f"shape {tuple(getattr(value, 'shape', ()))}."
            )
    for variable, value in zip(variables, values):
        variable.assign(value)


def _as_gradient(gradient: Any, variable: Any) -> Any:
    # A Python number has no dtype, so it gets the dtype of its variable.
    has_dtype = hasattr(gradient, "dtype") or not hasattr(variable, "dtype")
    return tf.convert_to_tensor(gradient, dtype_hint=None if has_dtype else tf.as_dtype(variable.dtype))


def _fits(gradient: tf.TensorShape, variable: tf.TensorShape) -> bool:
    """Return whether a gradient can be broadcast to the shape of its variable. Most optimizers broadcast gradients."""
    try:
        return tf.broadcast_static_shape(gradient, variable).is_compatible_with(variable)
    except ValueError:
        return False


def _is_one(var_list: Any) -> bool:
    return hasattr(var_list, "dtype") or isinstance(var_list, str)


def name_of(variable: Any) -> str:
    """Return the name of a variable for reports. The name of a `keras.Variable` is its path."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Number the names that occur several times: the second "kernel" becomes "kernel_1"."""
    made: list[str] = []
    for name in names:
        made.append(unused(name, made))
    return tuple(made)


def unused(name: str, taken: Container[str]) -> str:
    """Return the name, or the name with the first number that makes it different from those that are taken."""
    numbered = (f"{name}_{i}" if i else name for i in itertools.count())
    return next(each for each in numbered if each not in taken)
