"""The wrapper class that `compile` uses while `wrap_in_compile()` or `install()` is in effect."""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tf_lossscale.legacy import experimental
from tf_lossscale.legacy.changes import Change, Changes
from tf_lossscale.legacy.isinstance_names import WrapperName
from tf_lossscale.legacy.policy import policies_of
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import optimizer as optimizer_lib
from tf_lossscale.wrapper import registry

# The wrapper of each inner optimizer, and the loss scale of the policy when the wrapper was made. A model that is
# compiled again with the same inner optimizer gets the same wrapper, unless the policy's loss scale has changed.
_made: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], Any]] = weakref.WeakKeyDictionary()

# The policy of the model that is being compiled.
_policy: contextvars.ContextVar[Any] = contextvars.ContextVar("policy", default=None)


@functools.cache
def stand_in_for(library: str) -> Any:
    """Return a replacement for the class in which a Keras library's `compile` wraps optimizers."""

    class LossScaleOptimizer(metaclass=WrapperName):
        is_wrapper_name = True

        def __new__(cls, inner_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            return _wrapped(inner_optimizer, library)

    return LossScaleOptimizer


def _policy_in(library: str) -> Any:
    return _policy.get() or policies_of(library).global_policy()


def _wrapped(inner_optimizer: Any, library: str) -> Any:
    policies, policy = policies_of(library), _policy_in(library)
    loss_scale = policies.loss_scale_of(policy)
    if loss_scale is None:
        return inner_optimizer
    if inner_optimizer in _made:
        made, made_with = _made[inner_optimizer]
        before = made()
        if before is not None:
            if made_with is loss_scale:
                return before
            registry.release(inner_optimizer)
    if policies.is_old(policy):
        wrapper: Any = experimental.LossScaleOptimizer(inner_optimizer, _own(loss_scale))
    else:
        wrapper = optimizer_lib.LossScaleOptimizer(inner_optimizer)
    _made[inner_optimizer] = weakref.ref(wrapper), loss_scale
    return wrapper


def _own(loss_scale: Any) -> Any:
    """Return a policy's loss scale, or a new one with its arguments if another optimizer has it."""
    is_taken = any(wrapper.scaler is loss_scale for wrapper in registry.wrappers())
    return loss_scale.from_config(loss_scale.get_config()) if is_taken else loss_scale


def optimizers_for(library: str, optimizers: types.ModuleType) -> types.SimpleNamespace:
    """Return a copy of a Keras library's `optimizers` module with a new `get` function, which `compile` calls.

    Keras's `compile` wraps an optimizer only if the model's policy is "mixed_float16". Up to TensorFlow 2.8, any policy
    could have a loss scale. The new `get` wraps the optimizer if the policy is not "mixed_float16" but has a loss
    scale.
    """

    @functools.wraps(optimizers.get)
    def get(*args: Any, **kwargs: Any) -> Any:
        optimizer = optimizers.get(*args, **kwargs)
        is_left_alone = (
            optimizer is None or registry.scales_losses(optimizer) or _policy_in(library).name == "mixed_float16"
        )
        return optimizer if is_left_alone else _wrapped(optimizer, library)

    return _copy(optimizers, {"get": get})


def _with_policy(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `compile` method that wraps the optimizer according to the model's own policy."""

    @functools.wraps(compile)
    def compile_with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _policy.set(getattr(self, "dtype_policy", None))
        try:
            return compile(self, *args, **kwargs)
        finally:
            _policy.reset(token)

    return compile_with_policy


def _change(library: str, wrapper: str, compiles: bool, changes: Changes, trainer: Any) -> None:
    """Change a module in which the name `wrapper` refers to the wrapper class, or in Keras 2 to this class's module."""
    if keras_versions.library_in(trainer.__name__) != library:
        return
    stand_in = stand_in_for(library)
    both = dict.fromkeys(("BaseLossScaleOptimizer", "LossScaleOptimizer"), stand_in)
    changes.change(trainer, wrapper, lambda old: stand_in if isinstance(old, type) else _copy(old, both))
    if compiles:
        changes.change(trainer, "optimizers", functools.partial(optimizers_for, library))
        # The class with the `compile` method is called BaseTrainer in Keras 3.16 and newer.
        base = next(getattr(trainer, name) for name in ("BaseTrainer", "Trainer", "Model") if hasattr(trainer, name))
        changes.change(base, "compile", _with_policy)


def _copy(module: types.ModuleType, names: Mapping[str, Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**vars(module), **names})


# Maps each module with a class that trains to its library, its name for the wrapper class or for the module of this
# class, and whether it defines a `compile` method.
_TRAINERS = {
    "keras.src.trainers.trainer": ("keras", "LossScaleOptimizer", True),
    "tf_keras.src.engine.training": ("tf_keras", "lso", True),
    "tf_keras.src.engine.training_v1": ("tf_keras", "loss_scale_optimizer", True),
    "tf_keras.src.engine.training_eager_v1": ("tf_keras", "loss_scale_optimizer", False),
}


def places() -> dict[str, Change]:
    """Map each module that defines a `compile` method to the function that changes it after its import."""
    changed = {module: functools.partial(_change, *row) for module, row in _TRAINERS.items()}
    # Up to TensorFlow 2.15, Keras 2 is the package "keras".
    return {**changed, **{module.removeprefix("tf_"): change for module, change in changed.items()}}
