"""Old names of LossScaleOptimizer that pass one another's `isinstance` checks."""

from __future__ import annotations

from typing import Any

from tf_lossscale.wrapper import families
from tf_lossscale.wrapper import optimizer as optimizer_lib


class WrapperName(type):
    """Metaclass that makes every legacy wrapper name pass the others' `isinstance` checks.

    Old code calls `isinstance(optimizer, LossScaleOptimizer)` with the class of its TensorFlow version, but another
    version's class, `compile` or Keras may have created the optimizer. Therefore every loss scale optimizer is an
    instance of each of these classes. Classes derived from them behave normally.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # tf_keras's metaclass requires a positional first argument. Old code may pass the optimizer by keyword.
        return type.__call__(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            "is_wrapper_name" in vars(cls) and families.scales_losses(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or ("is_wrapper_name" in vars(cls) and families.is_scaling(subclass))


class OldLossScaleOptimizer(optimizer_lib.LossScaleOptimizer, metaclass=WrapperName):
    """Base of the LossScaleOptimizers in `experimental` and `stable`, with the old arguments and methods."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        inner, _, _ = inner_of(args, kwargs)
        return super().__new__(cls, inner)

    def _raise_if_strategy_unsupported(self) -> None:
        """Do nothing: every strategy is supported. Subclasses of the original call or override this method."""


def inner_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the inner optimizer, passed under any of its names, and the remaining arguments.

    >>> inner_of((), {"opt": 1, "loss_scale": 8})
    (1, (), {'loss_scale': 8})

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The inner optimizer, the rest of `args`, the rest of `kwargs`.

    Raises:
        TypeError: there is no inner optimizer.
    """
    if args:
        return args[0], args[1:], kwargs
    for name in ("inner_optimizer", "optimizer", "opt"):
        if name in kwargs:
            return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
    raise TypeError("LossScaleOptimizer() needs the optimizer to wrap, for example LossScaleOptimizer(SGD(0.1)).")
