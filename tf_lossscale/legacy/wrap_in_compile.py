"""The wrapper class that `compile` uses while `wrap_in_compile()` or `install()` is in effect."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from tf_lossscale.legacy import experimental
from tf_lossscale.legacy.changes import Change, Changes
from tf_lossscale.legacy.isinstance_names import WrapperName
from tf_lossscale.legacy.policy import policies_of
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import optimizer as optimizer_lib
from tf_lossscale.wrapper import registry

# The optimizers that `compile` has wrapped. Another `compile` with one of them wraps it anew, as in Keras.
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def stand_in_for(library: str) -> Any:
    """Return a replacement for the class in which a Keras library's `compile` wraps optimizers."""

    class LossScaleOptimizer(metaclass=WrapperName):
        is_wrapper_name = True

        def __new__(cls, inner_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            return _wrap(inner_optimizer, policies_of(library).old_policy())

    return LossScaleOptimizer


def _wrap(inner_optimizer: Any, old_policy: Any) -> Any:
    """Wrap an optimizer of a model whose policy is "mixed_float16". The global policy may have a loss scale."""
    loss_scale = "dynamic"
    if old_policy is not None and old_policy.name == "mixed_float16" and not old_policy.has_default_loss_scale:
        loss_scale = old_policy.loss_scale
    if loss_scale is None:
        return inner_optimizer
    if inner_optimizer in _wrapped:
        registry.release(inner_optimizer)
    _wrapped.add(inner_optimizer)
    if old_policy is None:
        return optimizer_lib.LossScaleOptimizer(inner_optimizer)
    return experimental.LossScaleOptimizer(inner_optimizer, loss_scale)


def _change(library: str, name: str, changes: Changes, trainer: types.ModuleType) -> None:
    """Change a module in which `name` refers to the wrapper class, or in Keras 2 to the module of this class."""
    if keras_versions.library_in(trainer.__name__) != library:
        return
    stand_in = stand_in_for(library)
    both = dict.fromkeys(("BaseLossScaleOptimizer", "LossScaleOptimizer"), stand_in)

    def changed(old: Any) -> Any:
        return stand_in if isinstance(old, type) else types.SimpleNamespace(**{**vars(old), **both})

    changes.change(trainer, name, changed)


# Maps each module that wraps optimizers to its library, and to its name for the wrapper class or the class's module.
_TRAINERS = {
    "keras.src.trainers.trainer": ("keras", "LossScaleOptimizer"),
    "tf_keras.src.engine.training": ("tf_keras", "lso"),
    "tf_keras.src.engine.training_v1": ("tf_keras", "loss_scale_optimizer"),
    "tf_keras.src.engine.training_eager_v1": ("tf_keras", "loss_scale_optimizer"),
}


def places() -> dict[str, Change]:
    """Map each module that wraps optimizers to the function that changes it after its import."""
    changed = {module: functools.partial(_change, *row) for module, row in _TRAINERS.items()}
    # Up to TensorFlow 2.15, Keras 2 is the package "keras".
    return {**changed, **{module.removeprefix("tf_"): change for module, change in changed.items()}}
