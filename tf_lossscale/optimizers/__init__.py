"""This package's own optimizers, for use with or without LossScaleOptimizer.

`Adafactor` is the class for the library that `tf.keras` uses: Keras 3, or tf_keras if `TF_USE_LEGACY_KERAS=1` is set.
To choose the library yourself, use `optimizers.keras3.Adafactor` or `optimizers.tf_keras.Adafactor`.

>>> import tf_lossscale
>>> tf_lossscale.optimizers.Adafactor.__module__
'tf_lossscale.optimizers.keras3'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_ROOMS = ("keras3", "tf_keras")
_HOOKS = ("register_optimizer_step_post_hook", "register_optimizer_step_pre_hook")

__all__ = ["Adafactor", "register_optimizer_step_post_hook", "register_optimizer_step_pre_hook"]

if TYPE_CHECKING:
    from tf_lossscale.optimizers.hooks import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from tf_lossscale.optimizers.keras3 import Adafactor


def __getattr__(name: str) -> Any:
    if name == "Adafactor":
        from tf_lossscale.families import registry as families

        module = families.MODULES[families.keras_of_tensorflow()]
        return importlib.import_module(f"tf_lossscale.optimizers.{module}").Adafactor
    if name in _ROOMS:
        return importlib.import_module(f"tf_lossscale.optimizers.{name}")
    if name in _HOOKS:
        return getattr(importlib.import_module("tf_lossscale.optimizers.hooks"), name)
    raise AttributeError(f"module 'tf_lossscale.optimizers' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
