"""MindSpore's mixed-precision API for Keras models.

>>> from tf_lossscale import amp
>>> amp.DynamicLossScaleManager().get_loss_scale()
16777216
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "TrainOneStepCell": "train_step",
    "TrainOneStepWithLossScale": "train_step",
    "TrainOneStepWithLossScaleCell": "train_step",
    "WithLoss": "with_loss",
    "WithLossCell": "with_loss",
    "all_finite": "scalers",
    "auto_mixed_precision": "levels",
    "dtype_table": "levels",
    "to_float": "levels",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from tf_lossscale.amp.levels import auto_mixed_precision as auto_mixed_precision
    from tf_lossscale.amp.levels import dtype_table as dtype_table
    from tf_lossscale.amp.levels import to_float as to_float
    from tf_lossscale.amp.managers import DynamicLossScaleManager as DynamicLossScaleManager
    from tf_lossscale.amp.managers import DynamicLossScaleUpdateCell as DynamicLossScaleUpdateCell
    from tf_lossscale.amp.managers import FixedLossScaleManager as FixedLossScaleManager
    from tf_lossscale.amp.managers import FixedLossScaleUpdateCell as FixedLossScaleUpdateCell
    from tf_lossscale.amp.model import Model as Model
    from tf_lossscale.amp.monitors import LossMonitor as LossMonitor
    from tf_lossscale.amp.monitors import OverflowMonitor as OverflowMonitor
    from tf_lossscale.amp.own_manager import LossScaleManager as LossScaleManager
    from tf_lossscale.amp.scalers import DynamicLossScaler as DynamicLossScaler
    from tf_lossscale.amp.scalers import StaticLossScaler as StaticLossScaler
    from tf_lossscale.amp.scalers import all_finite as all_finite
    from tf_lossscale.amp.train_step import TrainOneStep as TrainOneStep
    from tf_lossscale.amp.train_step import TrainOneStepCell as TrainOneStepCell
    from tf_lossscale.amp.train_step import TrainOneStepWithLossScale as TrainOneStepWithLossScale
    from tf_lossscale.amp.train_step import TrainOneStepWithLossScaleCell as TrainOneStepWithLossScaleCell
    from tf_lossscale.amp.with_loss import WithLoss as WithLoss
    from tf_lossscale.amp.with_loss import WithLossCell as WithLossCell


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tf_lossscale.amp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tf_lossscale.amp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
