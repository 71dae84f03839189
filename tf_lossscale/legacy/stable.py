"""The class that `tf.keras.mixed_precision.LossScaleOptimizer` refers to while `install()` is in effect."""

from __future__ import annotations

import numbers
from typing import Any

from tf_lossscale.legacy import loss_scale as loss_scale_lib
from tf_lossscale.legacy.isinstance_names import OldLossScaleOptimizer, inner_of
from tf_lossscale.wrapper import optimizer as optimizer_lib
from tf_lossscale.wrapper import registry


class LossScaleOptimizer(OldLossScaleOptimizer):
    """Accepts the arguments of every TensorFlow version, and returns the equivalent `tf_lossscale.LossScaleOptimizer`.

    | call | scale | TensorFlow version |
    |---|---|---|
    | `(opt)` | dynamic | 2.4 and newer |
    | `(opt, True, 1024, 500)`, `dynamic=True, initial_scale=1024, ...` | dynamic | 2.4 and newer |
    | `(opt, False, 1024)`, `dynamic=False, initial_scale=1024` | fixed | 2.4 and newer |
    | `(opt, "dynamic")`, `loss_scale="dynamic"` | dynamic | 2.0 to 2.3 |
    | `loss_scale=1024` | fixed | 2.0 to 2.3 |
    | `(opt, loss_scale)` with a LossScale or a config | as this argument describes | 2.0 to 2.3 |
    | `(opt, 1024, 500)` | dynamic: starts at 1024, grows after 500 steps | 2.16 and newer, with Keras 3 |

    A number as the only argument after the optimizer is an error, because it is a fixed scale in TensorFlow 2.3's
    `experimental` class, `dynamic` in TensorFlow 2.4, and the initial scale in Keras 3.

    >>> import tensorflow as tf
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), False, 1024)
    >>> optimizer.dynamic, optimizer.loss_scale.numpy().item()
    (False, 1024.0)

    Args:
        inner_optimizer: the optimizer that does the update; `opt` and `optimizer` are other names for it.
        *args: the positional arguments of a row of the table.
        **kwargs: the keyword arguments of a row of the table, or of `tf_lossscale.LossScaleOptimizer`.

    Raises:
        TypeError: the call matches no row of the table.
        ValueError: a value is out of range, or the optimizer is already wrapped.
    """

    is_wrapper_name = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        inner, rest, keywords = inner_of(args, kwargs)
        original = _original_for(inner)
        if original is not None:
            return original(inner, *rest, **keywords)
        if cls is LossScaleOptimizer:
            return optimizer_lib.LossScaleOptimizer(inner, **_arguments(rest, keywords))
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any):
        inner, args, kwargs = inner_of(args, kwargs)
        super().__init__(inner, **_arguments(args, kwargs))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate arguments for any TensorFlow version's wrapper into keyword arguments of
    `tf_lossscale.LossScaleOptimizer`."""
    if len(args) == 2 and _is_number(args[0]) and _is_number(args[1]):
        names: tuple[str, ...] = ("initial_scale", "dynamic_growth_steps")
    elif args and not isinstance(args[0], numbers.Real):
        names = ("loss_scale",)
    else:
        # A lone number is ambiguous. As `dynamic`, it raises an error that lists its possible meanings.
        names = ("dynamic", "initial_scale", "dynamic_growth_steps")
    given = dict(zip(names, args))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        raise TypeError(
            f"LossScaleOptimizer() cannot combine the positional arguments {args!r} with the keywords "
            f"{sorted(kwargs)}. Pass each argument once."
        )
    given.update(kwargs)
    if "loss_scale" not in given:
        return given
    loss_scale = given.pop("loss_scale")
    if given.keys() & {"dynamic", "initial_scale", "dynamic_growth_steps"}:
        raise TypeError(
            f"`loss_scale={loss_scale!r}` already describes the loss scale: leave out `dynamic`, `initial_scale` and "
            "`dynamic_growth_steps`."
        )
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return given
    if _is_number(loss_scale):
        return {"dynamic": False, "initial_scale": loss_scale, **given}
    return {"loss_scale": loss_scale_lib.get_for_wrapper(loss_scale), **given}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _original_for(inner: Any) -> Any:
    """Return TensorFlow's private LossScaleOptimizer if no other class can wrap `inner`; otherwise None."""
    if registry.wrapper_class_of(inner) is not None or not type(inner).__module__.startswith(
        "tensorflow.python.keras."
    ):
        return None
    from tensorflow.python.keras.mixed_precision import loss_scale_optimizer

    # The name LossScaleOptimizer may be patched, but the base class of LossScaleOptimizerV1 is always TensorFlow's
    # own class.
    return loss_scale_optimizer.LossScaleOptimizerV1.__bases__[0]
