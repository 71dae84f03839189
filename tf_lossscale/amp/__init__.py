"""MindSpore's mixed-precision API for Keras models.

>>> from tf_lossscale import amp
>>> amp.DynamicLossScaleManager().get_loss_scale()
16777216
"""

from tf_lossscale.amp.levels import auto_mixed_precision, dtype_table, to_float
from tf_lossscale.amp.managers import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaleManager,
)
from tf_lossscale.amp.model import Model
from tf_lossscale.amp.monitors import LossMonitor, OverflowMonitor
from tf_lossscale.amp.scalers import DynamicLossScaler, StaticLossScaler, all_finite
from tf_lossscale.amp.train_step import (
    TrainOneStep,
    TrainOneStepCell,
    TrainOneStepWithLossScale,
    TrainOneStepWithLossScaleCell,
)
from tf_lossscale.amp.with_loss import WithLoss, WithLossCell

__all__ = [
    "DynamicLossScaleManager",
    "DynamicLossScaleUpdateCell",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "FixedLossScaleUpdateCell",
    "LossMonitor",
    "LossScaleManager",
    "Model",
    "OverflowMonitor",
    "StaticLossScaler",
    "TrainOneStep",
    "TrainOneStepCell",
    "TrainOneStepWithLossScale",
    "TrainOneStepWithLossScaleCell",
    "WithLoss",
    "WithLossCell",
    "all_finite",
    "auto_mixed_precision",
    "dtype_table",
    "to_float",
]


def __dir__() -> list[str]:
    return __all__
