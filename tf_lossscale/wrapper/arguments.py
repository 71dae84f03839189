"""Checks the arguments of LossScaleOptimizer, and creates its loss scale, diagnostics and cache of compiled steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale import errors
from tf_lossscale.core.compiled_steps import CompiledSteps
from tf_lossscale.core.rules import Rules
from tf_lossscale.core.state import DynamicLossScale, FixedLossScale, LossScale
from tf_lossscale.diagnosis.exponents import EVERY, Exponents
from tf_lossscale.diagnosis.overflow import Diagnosis


def loss_scale(
    dynamic: Any, initial_scale: Any, growth_steps: Any, skip_nonfinite: Any, manager: Any, **rules: Any
) -> LossScale:
    """Create the loss scale that the arguments describe, or return the loss scale of `manager`.

    >>> loss_scale(False, 8, None, None, None)().numpy().item()
    8.0

    Args:
        dynamic: whether the scale changes during training.
        initial_scale: a finite number above 0, or None for the default.
        growth_steps: the number of finite steps in a row after which the scale grows, or None for the default.
        skip_nonfinite: whether a step with a non-finite gradient is skipped, or None for the default.
        manager: None, or an object whose `as_loss_scale` method returns the loss scale. If a manager is passed, all
            other arguments must have their defaults.
        **rules: the other fields of `Rules`, such as `growth_factor`.

    Returns:
        A loss scale.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of range, or contradicts another argument.
    """
    errors.boolean("dynamic", dynamic, _instead_of(dynamic, initial_scale, growth_steps))
    if skip_nonfinite is not None:
        errors.boolean("skip_nonfinite", skip_nonfinite, "Pass True to skip steps whose gradients are not finite.")
    checked = Rules(Rules.growth_steps if growth_steps is None else growth_steps, **rules).checked()
    if manager is not None:
        alone = dynamic and initial_scale is None and growth_steps is None and skip_nonfinite is None
        return _of_manager(manager, alone and checked == Rules())
    if dynamic and skip_nonfinite is False:
        raise ValueError(
            "`skip_nonfinite` cannot be False with a dynamic scale, because a dynamic scale makes gradients "
            "overflow now and then, and these non-finite gradients would be applied to the weights. Leave "
            "`skip_nonfinite` out, or pass dynamic=False and an `initial_scale`."
        )
    if dynamic:
        return DynamicLossScale(rules=checked) if initial_scale is None else DynamicLossScale(initial_scale, checked)
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False, for example initial_scale=1024.')
    if growth_steps is not None:
        raise ValueError(
            f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {growth_steps!r}. '
            "A fixed scale does not grow."
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


def _of_manager(manager: Any, alone: bool) -> LossScale:
    if not alone:
        raise ValueError(
            "`loss_scale_manager` determines the scale and its rules. Leave out `dynamic`, `initial_scale`, "
            "`dynamic_growth_steps`, `skip_nonfinite` and the arguments for the rules, such as `growth_factor`."
        )
    if not hasattr(manager, "as_loss_scale"):
        raise TypeError(
            "`loss_scale_manager` must be a FixedLossScaleManager or DynamicLossScaleManager from tf_lossscale.amp, "
            f"or have an as_loss_scale() method, but got: {manager!r}."
        )
    return manager.as_loss_scale()


def diagnosis(diagnose: Any, every: Any, loss_scale: LossScale) -> tuple[Diagnosis | None, Exponents | None]:
    """Create the diagnostics: a recorder of overflows, and a counter of gradients by exponent.

    A diagnostic that is not requested is None.

    >>> diagnosis("exponents", 10, FixedLossScale(8))[1].every
    10

    Args:
        diagnose: False, True to record overflows, or "exponents" to count gradients by exponent.
        every: the number of steps from one count of gradients to the next.
        loss_scale: the optimizer's loss scale.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; or `diagnose` is True, but the loss scale does not check gradients
            because it never skips a step.
    """
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


def compiled_steps(jit_compile: Any) -> CompiledSteps | None:
    """Return a new cache of compiled steps if `jit_compile` is True, otherwise None.

    >>> compiled_steps(False) is None
    True

    Args:
        jit_compile: whether XLA compiles the optimizer's step.

    Raises:
        TypeError: `jit_compile` is not a bool.
        ValueError: `jit_compile` is True in a TF1 graph.
    """
    if not errors.boolean("jit_compile", jit_compile, "Pass True to have XLA compile the step."):
        return None
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError(
            "`jit_compile` cannot be True in a TF1 graph, which cannot call a compiled function. Leave it out, or "
            "compile the whole session with tf.compat.v1.OptimizerOptions.global_jit_level."
        )
    return CompiledSteps()
