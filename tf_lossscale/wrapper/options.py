"""The arguments of Keras's optimizers that the wrapper also accepts, and sets on the inner optimizer."""

from __future__ import annotations

from typing import Any

# Constructor arguments of Keras 3 optimizers and their defaults. An argument equal to its default counts as not set.
DEFAULTS = {
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
    """Remove the `name` argument from a dict of keyword arguments, and return its value.

    >>> take_name({"name": "scaled", "clipnorm": 1.0})
    'scaled'

    Args:
        given: the keyword arguments of a constructor. The `name` key is removed.

    Returns:
        The name. If the dict has no name, the result is None.

    Raises:
        TypeError: the name is not a string.
    """
    name = given.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"`name` must be a string, but got: {name!r} of type {type(name).__name__}.")
    return name


def checked(inner: Any, given: dict[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """Check the options for a Keras optimizer, and return the options to set on the inner optimizer.

    >>> import tensorflow as tf
    >>> checked(tf.keras.optimizers.SGD(), {"clipnorm": 1.0, "use_ema": False}, ("clipnorm", "use_ema"))
    {'clipnorm': 1.0}

    Args:
        inner: the inner optimizer.
        given: the keyword arguments that the caller passed.
        supported: the names of the options that the optimizer's family supports.

    Returns:
        A dict of the options whose values differ from their defaults.

    Raises:
        TypeError: a name is not one of Keras's options.
        ValueError: the family does not support an option, the optimizer already has a different value for the option,
            or more than one option that clips gradients is set.
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
