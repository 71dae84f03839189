"""Reads the config of an optimizer, as in `.h5` files and in live optimizers."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tf_lossscale.core.rules import KEYWORDS
from tf_lossscale.migrate.checkpoints.saved import SCALE_NAMES, Optimizer
from tf_lossscale.wrapper.saving import STATE, from_tf23


def inner_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the inner optimizer. If the optimizer is not wrapped, return `config` unchanged."""
    values = config.get("config", {})
    parts = (values.get(name) for name in ("optimizer", "inner_optimizer"))
    return next((part for part in parts if isinstance(part, dict)), config)


def of_config(config: dict[str, Any], family: str) -> Optimizer:
    """Return an optimizer as its config describes it, still without its variables."""
    inner = inner_config(config)
    numbers = _numbers(inner["config"])
    rate = numbers.pop("learning_rate", None)
    name = inner["class_name"].rpartition(">")[2]
    made = Optimizer("optimizer", family, name, learning_rate=rate, hyperparameters=numbers)
    made.scope = str(inner["config"].get("name", ""))
    if inner is not config:
        made.wrapper = str(config["class_name"])
        arguments = _arguments_of_wrapper(config["config"])
        made.scale_is_fixed = not arguments.pop("dynamic", True)
        initial = arguments.pop("initial_scale", None)
        made.wrapper_arguments = arguments
        if made.scale_is_fixed and initial is not None:
            made.scale_state = {"loss_scale": initial}
    if STATE in inner:
        state = _numbers(inner[STATE])
        made.scale_state = {name: state[name] for name in SCALE_NAMES if name in state}
        made.others += [f"{STATE}/{name}" for name in inner[STATE] if name not in made.scale_state]
    return made


def _arguments_of_wrapper(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the config of a wrapper of any version into arguments of the current wrapper."""
    arguments = dict(settings)
    if "loss_scale" in settings:
        # `from_tf23` raises a ValueError for a user-defined loss scale class.
        with contextlib.suppress(ValueError):
            arguments = from_tf23(settings["loss_scale"])
    names = ("dynamic", "initial_scale", "dynamic_growth_steps", *KEYWORDS)
    return _numbers({name: arguments[name] for name in names if name in arguments})


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    values = {name: np.asarray(value) for name, value in settings.items() if not isinstance(value, (dict, list))}
    return {name: value.item() for name, value in values.items() if not value.shape and value.dtype.kind in "biuf"}
