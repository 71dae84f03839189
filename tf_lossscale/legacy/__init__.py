"""The names that TensorFlow 1.15 to 2.3 had for loss scaling, over the one state machine.

>>> from tf_lossscale import legacy
>>> legacy.get(8)
FixedLossScale(8.0)
"""

from __future__ import annotations

import importlib
from typing import Any

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
    "from_loss_scale": "wrap",
    "get": "loss_scale",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tf_lossscale.legacy.{_HOMES[name]}"), name)
    if name in ("contrib", "experimental"):
        return importlib.import_module(f"tf_lossscale.legacy.{name}")
    raise AttributeError(f"module 'tf_lossscale.legacy' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
