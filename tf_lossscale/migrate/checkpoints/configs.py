"""Reads the config of an optimizer, as in `.h5` files and in live optimizers."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

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
    if inner is not config:
        made.wrapper = str(config["class_name"])
        settings = config["config"]
        # `from_tf23` raises a ValueError for a user-defined loss scale class.
        with contextlib.suppress(ValueError):
            settings = from_tf23(settings["loss_scale"]) if "loss_scale" in settings else settings
        made.scale_is_fixed = not settings.get("dynamic", True)
        if made.scale_is_fixed:
            scale = _numbers(settings).get("initial_scale")
            made.scale_state = {} if scale is None else {"loss_scale": scale}
    if STATE in inner:
        state = _numbers(inner[STATE])
        made.scale_state = {name: state[name] for name in SCALE_NAMES if name in state}
        # The values of a user-defined loss scale's own variables.
        made.others += [f"{STATE}/variables"] if "variables" in inner[STATE] else []
    return made


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    values = {name: np.asarray(value) for name, value in settings.items() if not isinstance(value, (dict, list))}
    return {name: value.item() for name, value in values.items() if not value.shape and value.dtype.kind in "biuf"}
