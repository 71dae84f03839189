"""Loss scaling for float16 training in TensorFlow, with any optimizer.

>>> import tf_lossscale
>>> tf_lossscale.LossScaleOptimizer.__name__
'LossScaleOptimizer'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy as _lazy

__version__ = "1.0.0"

# Subpackages that are accessible after `import tf_lossscale`.
_SUBPACKAGES = ("amp", "diagnosis", "legacy", "migrate", "optimizers")
_HOMES = {
    "DynamicLossScale": "core.dynamic",
    **dict.fromkeys(("FixedLossScale", "LossScale"), "core.loss_scale"),
    "Family": "wrapper.family",
    "LossScaleMonitor": "training.monitor",
    "LossScaleOptimizer": "wrapper.optimizer",
    "SharedLossScale": "wrapper.shared",
    "keep_state": "training.keep_state",
    "register_family": "families.register_family",
    **dict.fromkeys(("install", "wrap_in_compile"), "legacy.install"),
    **dict.fromkeys(_SUBPACKAGES, ""),
}
__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = _lazy.names(__name__, _HOMES)

__all__ = [
    "DynamicLossScale",
    "Family",
    "FixedLossScale",
    "LossScale",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "SharedLossScale",
    "__version__",
    "install",
    "keep_state",
    "register_family",
    "wrap_in_compile",
]

if TYPE_CHECKING:
    from tf_lossscale import amp as amp
    from tf_lossscale import diagnosis as diagnosis
    from tf_lossscale import legacy as legacy
    from tf_lossscale import migrate as migrate
    from tf_lossscale import optimizers as optimizers
    from tf_lossscale.core.dynamic import DynamicLossScale
    from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
    from tf_lossscale.families.register_family import register_family
    from tf_lossscale.legacy.install import install, wrap_in_compile
    from tf_lossscale.training.keep_state import keep_state
    from tf_lossscale.training.monitor import LossScaleMonitor
    from tf_lossscale.wrapper.family import Family
    from tf_lossscale.wrapper.optimizer import LossScaleOptimizer
    from tf_lossscale.wrapper.shared import SharedLossScale

from tf_lossscale.serialization import register_when_imported as _register_when_imported  # noqa: E402

_register_when_imported()
