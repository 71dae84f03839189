"""Checks of what callers pass: the constructor's arguments, gradients and variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core import replicas
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
from tf_lossscale.core.origins import marked_by
from tf_lossscale.core.rules import KEYWORDS, Rules
from tf_lossscale.core.scaling import is_real_or_complex
from tf_lossscale.diagnosis.overflow import Diagnosis
from tf_lossscale.libraries.models import name_of, tensors_of

# The dtypes of gradients that fit any variable.
_USUAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
#: The scale that a dynamic loss scale starts with, unless `initial_scale` is passed.
DEFAULT_SCALE = 2.0**15


def loss_scale(
    dynamic: Any, initial_scale: Any, growth_steps: Any, skip_nonfinite: Any, given: Any, **rules: Any
) -> LossScale:
    """Create the loss scale that the constructor's arguments describe, or return `given` as a loss scale.

    None means that an argument was not passed. Raise an error if a value is out of range or contradicts another one.
    """
    errors.boolean("dynamic", dynamic, _instead_of(dynamic, initial_scale, growth_steps))
    if skip_nonfinite is not None:
        errors.boolean("skip_nonfinite", skip_nonfinite, "Pass True to skip steps whose gradients are not finite.")
    checked = Rules(Rules.growth_steps if growth_steps is None else growth_steps, **rules).checked()
    if given is not None:
        alone = dynamic and initial_scale is None and growth_steps is None and skip_nonfinite is None
        return _given(given, alone and checked == Rules())
    if dynamic and skip_nonfinite is False:
        raise ValueError(
            "`skip_nonfinite` cannot be False with a dynamic scale, because a dynamic scale makes gradients "
            "overflow now and then, and these non-finite gradients would be applied to the weights. Leave "
            "`skip_nonfinite` out, or pass dynamic=False and an `initial_scale`."
        )
    if dynamic:
        start = DEFAULT_SCALE if initial_scale is None else initial_scale
        return DynamicLossScale(start, checked.growth_steps, **{name: getattr(checked, name) for name in rules})
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False, for example initial_scale=1024.')
    if growth_steps is not None:
        raise ValueError(
            f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {growth_steps!r}. '
            "A fixed scale does not grow."
        )
    for name in rules:
        if getattr(checked, name) != KEYWORDS[name]:
            raise ValueError(
                f"`{name}` must be left out if `dynamic` is False, but got: {rules[name]!r}. A fixed scale does not "
                "change."
            )
    return FixedLossScale(initial_scale, bool(skip_nonfinite))


def _instead_of(dynamic: Any, initial_scale: Any, growth_steps: Any) -> str:
    """Return a hint for a `dynamic` argument that is not a bool.

    Code that passes such an argument was probably written for a different LossScaleOptimizer, whose second argument is
    the loss scale (in TensorFlow 2.3) or the initial scale (in Keras 3).
    """
    if isinstance(dynamic, str):
        return "A dynamic scale is the default: leave the argument out."
    if not isinstance(dynamic, (int, float)):
        return "For a fixed scale, pass dynamic=False, initial_scale=1024."
    steps = initial_scale if growth_steps is None else growth_steps
    if steps is not None:
        return f"Instead of Keras 3's order, pass initial_scale={dynamic!r}, dynamic_growth_steps={steps!r}."
    return (
        f"For a fixed scale, as in TensorFlow 2.3, pass dynamic=False, initial_scale={dynamic!r}. For a dynamic scale "
        f"with this initial value, as in Keras 3, pass initial_scale={dynamic!r}."
    )


def _given(given: Any, alone: bool) -> LossScale:
    if not alone:
        raise ValueError(
            "`loss_scale` determines the scale and its rules. Leave out `dynamic`, `initial_scale`, "
            "`dynamic_growth_steps`, `skip_nonfinite` and the arguments for the rules, such as `growth_factor`."
        )
    if given == "dynamic" or (isinstance(given, (int, float)) and not isinstance(given, bool)):
        instead = "leave it out" if given == "dynamic" else f"pass dynamic=False, initial_scale={given!r}"
        raise TypeError(f"`loss_scale={given!r}` is TensorFlow 2.3's argument. For the same scale, {instead}.")
    scale = as_loss_scale(given)
    if scale is None:
        raise TypeError(
            "`loss_scale` must be an instance of tf_lossscale.LossScale, or a manager from tf_lossscale.amp, but got: "
            f"{given!r}."
        )
    return scale


def as_loss_scale(value: Any) -> LossScale | None:
    """Convert an object to a loss scale.

    Return None if the object cannot be used as one. The object is a LossScale, has a method `as_loss_scale` that
    returns one, or is a callable that returns the scale and has a method `update(grads)`. That method changes the
    scale, and returns an operation (None in eager mode) and whether to apply the gradients.
    """
    if isinstance(value, type):
        return None
    if hasattr(value, "as_loss_scale"):
        return value.as_loss_scale()
    if isinstance(value, LossScale):
        return value
    return _Adopted(value) if callable(value) and callable(getattr(value, "update", None)) else None


class _Adopted(LossScale):
    initial_scale = float("nan")

    def __init__(self, loss_scale: Any):
        super().__init__()
        self.loss_scale = loss_scale

    def __call__(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.loss_scale())

    def check(self, gradients: list[Any]) -> tf.Tensor:
        return decision_of(self.loss_scale.update(gradients))


def decision_of(updated: tuple[Any, Any]) -> tf.Tensor:
    """Return whether to apply a step, from the result of an old loss scale's `update`, after the scale has changed."""
    update, apply = updated
    with tf.control_dependencies(operations(update)):
        return tf.identity(tf.convert_to_tensor(apply))


def diagnosis(diagnose: Any, loss_scale: LossScale) -> Diagnosis | None:
    """Return the recorder of overflows, or None if it is not requested."""
    errors.boolean("diagnose", diagnose, "Pass True to record which gradients overflow.")
    if diagnose and not loss_scale.may_skip:
        raise ValueError(
            "`diagnose` cannot be True with a fixed scale that never skips a step, because such a scale does not check "
            "gradients. Pass skip_nonfinite=True or dynamic=True."
        )
    return Diagnosis() if diagnose else None


# Constructor arguments of Keras 3 optimizers and their defaults. An argument equal to its default counts as not set.
DEFAULTS: dict[str, Any] = {
    "name": None,
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
# Maps other loss scalers' keywords to the equivalent arguments of `LossScaleOptimizer`, for error messages.
_ELSEWHERE = {
    "loss_scale_manager": "loss_scale",
    "init_scale": "initial_scale",
    "initial_loss_scale": "initial_scale",
    "init_loss_scale": "initial_scale",
    "growth_interval": "dynamic_growth_steps",
    "increment_period": "dynamic_growth_steps",
    "scale_window": "dynamic_growth_steps",
    "multiplier": "growth_factor and backoff_factor",
    "scale_factor": "growth_factor and backoff_factor",
    "enabled": "dynamic=False, initial_scale=1, to scale nothing",
}
#: The options that clip gradients. Only one of them can be set on an optimizer.
CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


def take_name(given: dict[str, Any]) -> str | None:
    """Remove the `name` argument from the constructor's keyword arguments, and return its value, or None."""
    name = given.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"`name` must be a string, but got: {name!r} of type {type(name).__name__}.")
    return name


def checked_options(inner: Any, given: dict[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """Check the options for a Keras optimizer, and return those whose values differ from their defaults.

    `supported` contains the names of the options that the optimizer's family supports. Raise an error if an option is
    unknown, is not supported, or contradicts the inner optimizer.
    """
    for name in given:
        if name not in DEFAULTS:
            instead = f". Pass {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
            raise TypeError(f"LossScaleOptimizer.__init__() got an unexpected keyword argument '{name}'{instead}")
    wanted = {name: value for name, value in given.items() if value != DEFAULTS[name]}
    for name, value in wanted.items():
        if name not in supported:
            raise ValueError(
                f"`{name}` is not supported for {type(inner).__name__}: optimizers from {type(inner).__module__} "
                "do not have this option. Leave it out, or use a Keras 3 optimizer from tf.keras.optimizers."
            )
        has = getattr(inner, name, None)
        if has != DEFAULTS[name] and has != value:
            raise ValueError(
                f"`{name}={value!r}` contradicts the inner {type(inner).__name__}, which has {name}={has!r}. "
                "Set it in one place."
            )
    clips = {name: wanted.get(name, getattr(inner, name, None)) for name in CLIPS}
    set_clips = {name: value for name, value in clips.items() if value is not None}
    if wanted.keys() & set_clips.keys() and len(set_clips) > 1:
        raise ValueError(f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set, but got: {set_clips}.")
    return wanted


# Gradients and variables. ---------------------------------------------------------------------------------------------


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
        if getattr(variable, "overwrite_with_gradient", False) and marked_by(gradient)[1] is False:
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
            f"Provided `grads_and_vars` is {tuple(zip(gradients, variables))}. Compute the loss, and scale it with "
            "get_scaled_loss() or scale_loss(), inside the `with` block of the gradient tape."
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
    if not is_real_or_complex(gradient.dtype):
        raise TypeError(
            f"The gradient of {variable.name} must be a floating-point or complex tensor, but got dtype "
            f"{gradient.dtype.name}."
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


def require_tensorflow_variables(variables: list[Any], optimizer: Any) -> None:
    """Raise an error if a variable is a `keras.Variable`, which optimizers of tf_keras cannot train."""
    for variable, tensor in zip(variables, tensors_of(variables)):
        if variable is not tensor:
            raise TypeError(
                f"{name_of(variable)} is a variable of Keras 3, but {type(optimizer).__name__} is an optimizer of "
                "tf_keras, which does not train such variables. Take the model and the optimizer from the same "
                "library: both from tf.keras, or both from tf_keras."
            )


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
