"""MindSpore's mixed-precision system, by its names, over Keras models.

>>> from tf_lossscale import amp
>>> amp.DynamicLossScaleManager().get_loss_scale()
16777216
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DynamicLossScaleManager": "managers",
    "DynamicLossScaleUpdateCell": "managers",
    "DynamicLossScaler": "scalers",
    "FixedLossScaleManager": "managers",
    "FixedLossScaleUpdateCell": "managers",
    "LossMonitor": "monitors",
    "LossScaleManager": "own_manager",
    "Model": "model",
    "OverflowMonitor": "monitors",
    "StaticLossScaler": "scalers",
    "TrainOneStep": "train_step",
    "TrainOneStepWithLossScale": "train_step",
    "WithLoss": "train_step",
    "all_finite": "scalers",
    "auto_mixed_precision": "levels",
    "dtype_table": "levels",
    "to_float": "levels",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tf_lossscale.amp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tf_lossscale.amp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
