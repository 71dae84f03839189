"""The loss scaling names of TensorFlow 1.15 to 2.3, for programs that still use them.

>>> from tf_lossscale import legacy
>>> legacy.get(8)
FixedLossScale(8.0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy

_HOMES = {
    **dict.fromkeys(("DynamicLossScale", "FixedLossScale", "LossScale", "from_loss_scale", "get"), "loss_scale"),
    **dict.fromkeys(("ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager"), "contrib"),
    "MixedPrecisionLossScaleOptimizer": "graph_rewrite",
    "disable_mixed_precision_graph_rewrite": "graph_rewrite",
    "enable_mixed_precision_graph_rewrite": "graph_rewrite",
    **dict.fromkeys(("contrib", "experimental"), ""),
}
__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = lazy.names(__name__, _HOMES)

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "MixedPrecisionLossScaleOptimizer",
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "from_loss_scale",
    "get",
]

if TYPE_CHECKING:
    from tf_lossscale.legacy import contrib as contrib
    from tf_lossscale.legacy import experimental as experimental
    from tf_lossscale.legacy.contrib import ExponentialUpdateLossScaleManager, FixedLossScaleManager, LossScaleManager
    from tf_lossscale.legacy.graph_rewrite import (
        MixedPrecisionLossScaleOptimizer,
        disable_mixed_precision_graph_rewrite,
        enable_mixed_precision_graph_rewrite,
    )
    from tf_lossscale.legacy.loss_scale import DynamicLossScale, FixedLossScale, LossScale, from_loss_scale, get
