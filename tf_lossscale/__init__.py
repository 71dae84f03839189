"""Loss scaling for float16 training in TensorFlow, with any optimizer.

>>> import tf_lossscale
>>> tf_lossscale.LossScaleOptimizer.__name__
'LossScaleOptimizer'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Maps each public name to the module that defines it. The module is imported when the name is first used, so importing
# this package is cheap.
_HOMES = {
    "DynamicLossScale": "tf_lossscale.core.loss_scale",
    "Family": "tf_lossscale.families.family",
    "FixedLossScale": "tf_lossscale.core.loss_scale",
    "LossScale": "tf_lossscale.core.loss_scale",
    "LossScaleOptimizer": "tf_lossscale.wrapper.optimizer",
    "LossScaleMonitor": "tf_lossscale.diagnosis.monitor",
    "Rules": "tf_lossscale.core.rules",
    "SharedLossScale": "tf_lossscale.core.shared",
    "install": "tf_lossscale.legacy.install",
    "keep_state": "tf_lossscale.model_state",
    "register_family": "tf_lossscale.families.register",
    "wrap_in_compile": "tf_lossscale.legacy.install",
}

# Subpackages that are accessible after `import tf_lossscale`.
_SUBPACKAGES = ("amp", "diagnosis", "legacy", "migrate", "optimizers")

__all__ = [
    "DynamicLossScale",
    "Family",
    "FixedLossScale",
    "LossScale",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "Rules",
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
    from tf_lossscale.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
    from tf_lossscale.core.rules import Rules
    from tf_lossscale.core.shared import SharedLossScale
    from tf_lossscale.diagnosis.monitor import LossScaleMonitor
    from tf_lossscale.families.family import Family
    from tf_lossscale.families.register import register_family
    from tf_lossscale.legacy.install import install, wrap_in_compile
    from tf_lossscale.model_state import keep_state
    from tf_lossscale.wrapper.optimizer import LossScaleOptimizer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"tf_lossscale.{name}")
    raise AttributeError(f"module 'tf_lossscale' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES])


from tf_lossscale.serialization import register_when_imported as _register_when_imported  # noqa: E402

_register_when_imported()
