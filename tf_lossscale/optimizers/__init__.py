"""This package's own optimizers, for use with or without LossScaleOptimizer.

`Adafactor` is the class for the library that `tf.keras` uses: Keras 3, or tf_keras if `TF_USE_LEGACY_KERAS=1` is set.
To choose the library yourself, use `optimizers.keras3.Adafactor` or `optimizers.tf_keras.Adafactor`.

>>> import tf_lossscale
>>> tf_lossscale.optimizers.Adafactor.__module__
'tf_lossscale.optimizers.keras3'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy

__all__ = ["Adafactor", "register_optimizer_step_post_hook", "register_optimizer_step_pre_hook"]

_HOMES = {**dict.fromkeys(__all__[1:], "hooks"), **dict.fromkeys(("keras3", "tf_keras"), "")}
__dir__: Callable[[], list[str]]
_lazy, __dir__ = lazy.names(__name__, _HOMES)

if TYPE_CHECKING:
    from tf_lossscale.optimizers.hooks import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from tf_lossscale.optimizers.keras3 import Adafactor


def __getattr__(name: str) -> Any:
    if name != "Adafactor":
        return _lazy(name)
    from tf_lossscale.libraries import keras_versions

    return _lazy(keras_versions.MODULES[keras_versions.keras_of_tensorflow()]).Adafactor
