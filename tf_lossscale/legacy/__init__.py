"""The loss scaling names of TensorFlow 1.15 to 2.3, for programs that still use them.

>>> from tf_lossscale import legacy
>>> legacy.get(8)
FixedLossScale(8.0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "DynamicLossScale": "loss_scale",
    "ExponentialUpdateLossScaleManager": "contrib",
    "FixedLossScale": "loss_scale",
    "FixedLossScaleManager": "contrib",
    "LossScale": "loss_scale",
    "LossScaleManager": "contrib",
    "MixedPrecisionLossScaleOptimizer": "graph_rewrite",
    "disable_mixed_precision_graph_rewrite": "graph_rewrite",
    "enable_mixed_precision_graph_rewrite": "graph_rewrite",
    "from_loss_scale": "loss_scale",
    "get": "loss_scale",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from tf_lossscale.legacy import contrib as contrib
    from tf_lossscale.legacy import experimental as experimental
    from tf_lossscale.legacy.contrib import ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager
    from tf_lossscale.legacy.contrib import FixedLossScaleManager as FixedLossScaleManager
    from tf_lossscale.legacy.contrib import LossScaleManager as LossScaleManager
    from tf_lossscale.legacy.graph_rewrite import MixedPrecisionLossScaleOptimizer as MixedPrecisionLossScaleOptimizer
    from tf_lossscale.legacy.graph_rewrite import (
        disable_mixed_precision_graph_rewrite as disable_mixed_precision_graph_rewrite,
    )
    from tf_lossscale.legacy.graph_rewrite import (
        enable_mixed_precision_graph_rewrite as enable_mixed_precision_graph_rewrite,
    )
    from tf_lossscale.legacy.loss_scale import DynamicLossScale as DynamicLossScale
    from tf_lossscale.legacy.loss_scale import FixedLossScale as FixedLossScale
    from tf_lossscale.legacy.loss_scale import LossScale as LossScale
    from tf_lossscale.legacy.loss_scale import from_loss_scale as from_loss_scale
    from tf_lossscale.legacy.loss_scale import get as get


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tf_lossscale.legacy.{_HOMES[name]}"), name)
    if name in ("contrib", "experimental"):
        return importlib.import_module(f"tf_lossscale.legacy.{name}")
    raise AttributeError(f"module 'tf_lossscale.legacy' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
