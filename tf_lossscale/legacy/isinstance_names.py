"""The base class of the old LossScaleOptimizer classes. It makes `isinstance` accept every loss scale optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tf_lossscale.wrapper import optimizer as optimizer_lib
from tf_lossscale.wrapper import registry

if TYPE_CHECKING:
    from typing_extensions import Self

_Made = TypeVar("_Made")


class WrapperName(type):
    """Metaclass of the old wrapper classes. Every loss scale optimizer passes an `isinstance` check against them.

    Old code calls `isinstance(optimizer, LossScaleOptimizer)` with the class of the TensorFlow version it was written
    for. The optimizer, however, may be an instance of another version's class or of Keras's class. Subclasses of the
    old wrapper classes accept only their own instances, as usual.
    """

    def __call__(cls: type[_Made], *args: Any, **kwargs: Any) -> _Made:
        # Bypass tf_keras's metaclass, which requires a positional argument. Old code may use only keywords.
        return type.__call__(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or ("is_wrapper_name" in vars(cls) and registry.is_scaling(subclass))


class OldLossScaleOptimizer(optimizer_lib.LossScaleOptimizer, metaclass=WrapperName):
    """Base class of the `LossScaleOptimizer` classes in `experimental` and `stable`, which accept the old arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        inner, _, _ = inner_of(args, kwargs)
        made: Any = super().__new__(cls, inner)
        return made

    def _raise_if_strategy_unsupported(self) -> None:
        """Do nothing, because every strategy is supported. Subclasses of TensorFlow's class call this method."""


def inner_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Separate the inner optimizer from the other arguments. Its keyword depends on the TensorFlow version."""
    if args:
        return args[0], args[1:], kwargs
    for name in ("inner_optimizer", "optimizer", "opt"):
        if name in kwargs:
            return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
    raise TypeError("LossScaleOptimizer() needs the optimizer to wrap, for example LossScaleOptimizer(SGD(0.1)).")
