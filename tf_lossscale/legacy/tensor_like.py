"""Objects that can be called to get a tensor, or used as if they were that tensor."""

from __future__ import annotations

import dataclasses
import numbers
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# `==` compares values if the other operand has one of these types. Otherwise it compares identities.
_COMPARABLE = (numbers.Real, np.ndarray, tf.Tensor, tf.Variable)


class TensorLike:
    """Base class of objects that can be called to get a tensor, or used as if they were that tensor.

    Code for TensorFlow 2.3 and older calls `optimizer.loss_scale()`. Newer code uses `optimizer.loss_scale` as a
    tensor. Both work if the attribute is such an object.

    >>> class Seven(TensorLike):
    ...     def __call__(self):
    ...         return tf.constant(7.0)
    >>> seven = Seven()
    >>> (2 * seven).numpy().item(), float(seven), f"{seven:.1f}", tf.sqrt(seven).dtype.name
    (14.0, 7.0, '7.0', 'float32')
    """

    def __call__(self) -> Any:
        """Return the value, a scalar tensor."""
        raise NotImplementedError

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        """Return the tensor that TensorFlow's functions use."""
        return tf.convert_to_tensor(self(), dtype, name=name)

    def _as_graph_element(self) -> tf.Tensor:
        """Return the tensor that `Session.run` fetches for this object."""
        return tf.convert_to_tensor(self())

    def __getattr__(self, name: str) -> Any:
        # The object has the tensor's attributes, such as `numpy`, `dtype`, `shape` and `eval`.
        if not name.startswith("_") and (name == "numpy" or hasattr(tf.Tensor, name)):
            return getattr(tf.convert_to_tensor(self()), name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Return the trace type. A tf.function distinguishes such objects by identity, not by their current values."""
        return _SameObject(weakref.ref(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # `copy` is ignored, because each conversion computes a new array.
        return np.asarray(self().numpy(), dtype)

    def __float__(self) -> float:
        return float(self())

    def __int__(self) -> int:
        return int(self())

    def __format__(self, spec: str) -> str:
        return format(self().numpy(), spec) if tf.executing_eagerly() else format(str(self), spec)


@dataclasses.dataclass(frozen=True)
class _SameObject(tf.types.experimental.TraceType):
    """The trace type of one Python object. A tf.function is traced again if it is called with a different object."""

    value: weakref.ref[Any]

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> _SameObject | None:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self.value()

    def cast(self, value: Any, cast_context: Any) -> Any:
        return value


def _operator_of_tensors(name: str) -> Any:
    operator = getattr(tf.Tensor, name)

    def apply(self: TensorLike, *other: Any) -> Any:
        if name in ("__eq__", "__ne__") and not isinstance(other[0], _COMPARABLE):
            return NotImplemented
        return operator(tf.convert_to_tensor(self()), *other)

    return apply


for _name in tf.Tensor.OVERLOADABLE_OPERATORS:
    setattr(TensorLike, _name, _operator_of_tensors(_name))
