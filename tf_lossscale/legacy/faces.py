"""What the old names of LossScaleOptimizer have in common."""

from __future__ import annotations

from typing import Any

from tf_lossscale import optimizer as optimizer_lib
from tf_lossscale.core.state import LossScale
from tf_lossscale.legacy import loss_scale as loss_scale_lib


class Face(type):
    """The class of a class that is one of several names for the same thing.

    Code of one generation asks `isinstance(optimizer, LossScaleOptimizer)` with the name it knows; what it asks
    about was made by another name, by `compile`, or by Keras itself. All of them are instances of every such name.
    Classes derived from one behave as classes do.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or ("is_face" in vars(cls) and _scales_losses(type(instance)))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or ("is_face" in vars(cls) and _scales_losses(subclass))


def _scales_losses(cls: type) -> bool:
    """Whether a class is one of our wrappers, or a LossScaleOptimizer of a Keras library."""
    return any(
        base is optimizer_lib.LossScaleOptimizer
        or (base.__name__.startswith(_NAMES) and base.__module__.startswith(_LIBRARIES))
        for base in getattr(cls, "__mro__", ())
    )


_NAMES = ("LossScaleOptimizer", "BaseLossScaleOptimizer")
_LIBRARIES = ("keras.", "tf_keras.", "tensorflow.python.keras.")


class OldLossScaleOptimizer(optimizer_lib.LossScaleOptimizer, metaclass=Face):
    """What old code may do with a LossScaleOptimizer, by whichever name: see `experimental` and `stable`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        inner, _, _ = inner_of(args, kwargs)
        return super().__new__(cls, inner)

    def _replace_loss_scale(self, value: Any) -> None:
        if not isinstance(value, LossScale) and callable(value) and hasattr(value, "update"):
            value = _Foreign(value)
        super()._replace_loss_scale(value)

    def _raise_if_strategy_unsupported(self) -> None:
        """Subclasses call or override it: every strategy is supported."""


def inner_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the inner optimizer by any of its names, and the arguments without it.

    >>> inner_of((), {"opt": 1, "loss_scale": 8})
    (1, (), {'loss_scale': 8})

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The inner optimizer, the rest of `args`, the rest of `kwargs`.

    Raises:
        TypeError: there is none.
    """
    if args:
        return args[0], args[1:], kwargs
    for name in ("inner_optimizer", "optimizer", "opt"):
        if name in kwargs:
            return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
    raise TypeError("LossScaleOptimizer() needs the optimizer to wrap, for example LossScaleOptimizer(SGD(0.1)).")


class Given:
    """An argument `loss_scale_manager` that is a loss scale.

    >>> Given("a loss scale").as_loss_scale()
    'a loss scale'
    """

    def __init__(self, loss_scale: Any):
        self._loss_scale = loss_scale

    def as_loss_scale(self) -> Any:
        """Returns the loss scale."""
        return self._loss_scale


class _Foreign(loss_scale_lib.LossScale):
    """A loss scale of a class that is not ours, but has the methods of one: `__call__` and `update`."""

    def __init__(self, loss_scale: Any):
        super().__init__()
        self.loss_scale = loss_scale

    def __call__(self) -> Any:
        return self.loss_scale()

    def update(self, grads: Any) -> tuple[Any, Any]:
        return self.loss_scale.update(grads)

    def get_config(self) -> dict[str, Any]:
        return self.loss_scale.get_config()
