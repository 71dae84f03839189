"""Checks the arguments of LossScaleOptimizer, and creates its loss scale and diagnostics."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.graphs import operations
from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
from tf_lossscale.core.rules import KEYWORDS, Rules
from tf_lossscale.diagnosis.exponents import EVERY, Exponents
from tf_lossscale.diagnosis.overflow import Diagnosis

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


def refuse_old_names(kwargs: dict[str, Any]) -> None:
    """Raise a TypeError for `loss_scale_manager`, the former name of `loss_scale`."""
    if "loss_scale_manager" in kwargs:
        raise TypeError("LossScaleOptimizer() has no argument `loss_scale_manager`. Its name is `loss_scale` now.")


def diagnosis(diagnose: Any, every: Any, loss_scale: LossScale) -> tuple[Diagnosis | None, Exponents | None]:
    """Create the recorder of overflows and the counter of gradients by exponent. One that is not requested is None."""
    if not isinstance(diagnose, (bool, str)) or (isinstance(diagnose, str) and diagnose != "exponents"):
        raise (ValueError if isinstance(diagnose, str) else TypeError)(
            '"diagnose" argument to LossScaleOptimizer.__init__ must be False, True or "exponents", but got: '
            f'{diagnose!r}. Pass True to record overflows, or "exponents" to count gradients by exponent.'
        )
    every = errors.whole_number("diagnose_every", every, "Pass the number of steps from one count to the next.")
    if diagnose == "exponents":
        return None, Exponents(every)
    if every != EVERY:
        raise ValueError(
            f'`diagnose_every` needs diagnose="exponents", but got diagnose={diagnose!r}. Leave `diagnose_every` out, '
            'or pass diagnose="exponents".'
        )
    if not diagnose:
        return None, None
    if not loss_scale.may_skip:
        raise ValueError(
            "`diagnose` cannot be True with a fixed scale that never skips a step, because such a scale does not check "
            "gradients. Pass skip_nonfinite=True or dynamic=True."
        )
    return Diagnosis(), None


def require_jit_compile(jit_compile: Any) -> None:
    """Raise an error unless `jit_compile` is a bool that can be honoured."""
    compiles = errors.boolean("jit_compile", jit_compile, "Pass True to have XLA compile the step.")
    if compiles and not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError(
            "`jit_compile` cannot be True in a TF1 graph, which cannot call a compiled function. Leave it out, or "
            "compile the whole session with tf.compat.v1.OptimizerOptions.global_jit_level."
        )


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
    "init_scale": "initial_scale",
    "initial_loss_scale": "initial_scale",
    "init_loss_scale": "initial_scale",
    "growth_interval": "dynamic_growth_steps",
    "increment_period": "dynamic_growth_steps",
    "scale_window": "dynamic_growth_steps",
    "multiplier": "growth_factor and backoff_factor",
    "scale_factor": "growth_factor and backoff_factor",
    "on_floor": "on_stall",
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


def checked(inner: Any, given: dict[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
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
