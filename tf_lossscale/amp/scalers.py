"""Loss scalers for training loops that call `scale`, `unscale` and `adjust` themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.amp import managers
from tf_lossscale.core import finite, scaling
from tf_lossscale.core.graphs import operations, runs_in_order
from tf_lossscale.core.rules import Rules, ScaleState

if TYPE_CHECKING:
    from tf_lossscale.types import Gradients, Same, TensorLike


def all_finite(inputs: Gradients | TensorLike) -> tf.Tensor:
    """Return whether every value of every tensor is finite.

    >>> bool(all_finite((tf.constant([1.0]), tf.constant([float("nan")]))))
    False

    Args:
        inputs: a list, tuple or dict, possibly nested, of tensors or IndexedSlices. Entries that are None are skipped.

    Returns:
        A bool scalar tensor.

    Raises:
        TypeError: `inputs` is a single tensor, or not a structure of tensors.

    Source: MindSpore, `mindspore.amp.all_finite`.
    """
    if tf.is_tensor(inputs) or isinstance(inputs, (tf.Variable, tf.IndexedSlices)):
        raise TypeError("`inputs` must be a list or tuple of tensors, but got a single tensor. Pass [tensor].")
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes)):
        raise TypeError(f"`inputs` must be a list or tuple of tensors, but got: {inputs!r}.")
    structure = inputs if isinstance(inputs, Mapping) else list(inputs)
    tensors = [_as_tensor(t) for t in tf.nest.flatten(structure) if t is not None]
    parts = [part for t in tensors for part in ((tf.math.real(t), tf.math.imag(t)) if t.dtype.is_complex else (t,))]
    return finite.all_finite([part for part in parts if part.dtype.is_floating])


class StaticLossScaler(tf.Module):
    """A loss scaler with a fixed scale.

    >>> scaler = StaticLossScaler(8.0)
    >>> scaler.unscale(scaler.scale(tf.constant(3.0))).numpy().item()
    3.0

    Args:
        scale_value: a finite int or float that is at least 1.

    Raises:
        TypeError: `scale_value` is not an int or float.
        ValueError: `scale_value` is below 1, infinite or NaN.

    Source: MindSpore, `mindspore.amp.StaticLossScaler`.
    """

    def __init__(self, scale_value: float):
        super().__init__()
        value = float(managers.number_of_at_least_1("scale_value", scale_value))
        self.scale_value: tf.Variable = tf.Variable(value, trainable=False, dtype=tf.float32, name="scale_value")

    def scale(self, inputs: Same) -> Same:
        """Return the inputs multiplied by the scale.

        Args:
            inputs: a floating-point tensor or IndexedSlices, or a nested structure of them.

        Returns:
            The same structure; each tensor keeps its dtype.

        Raises:
            TypeError: an input is None, or its dtype is not a floating-point dtype.
        """
        return _each(inputs, lambda values: values * tf.cast(self.scale_value, values.dtype))

    def unscale(self, inputs: Same) -> Same:
        """Return the inputs divided by the scale.

        Args:
            inputs: a floating-point tensor or IndexedSlices, or a nested structure of them.

        Returns:
            The same structure; each tensor keeps its dtype.

        Raises:
            TypeError: an input is None, or its dtype is not a floating-point dtype.
        """
        scale = tf.convert_to_tensor(self.scale_value)
        return _each(inputs, lambda values: scaling.unscale([values], scale)[0])

    def adjust(self, grads_finite: tf.Tensor | bool) -> bool:
        """Return False, because the scale is fixed.

        Args:
            grads_finite: whether all gradients of the step are finite.

        Returns:
            False: the scale has not changed.
        """
        del grads_finite
        return False


class DynamicLossScaler(StaticLossScaler):
    """A loss scaler whose scale is lowered after an overflow, and raised after several finite steps in a row.

    >>> scaler = DynamicLossScaler(scale_value=64, scale_factor=2, scale_window=3)
    >>> scaler.adjust(tf.constant(False))
    True
    >>> scaler.scale_value.numpy().item()
    32.0

    Args:
        scale_value: the scale to start with, a finite int or float that is at least 1.
        scale_factor: the factor that the scale is multiplied or divided by, an int above 0.
        scale_window: the number of finite steps in a row after which the scale grows, an int above 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Source: MindSpore, `mindspore.amp.DynamicLossScaler`.
    """

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int):
        super().__init__(scale_value)
        self.scale_factor: int = managers.whole_above_zero("scale_factor", scale_factor)
        self.scale_window: int = managers.whole_above_zero("scale_window", scale_window)
        self.counter: tf.Variable = tf.Variable(0, trainable=False, dtype=tf.int64, name="counter")

    @property
    def _rules(self) -> Rules:
        return Rules(self.scale_window, self.scale_factor, 1 / self.scale_factor)

    def adjust(self, grads_finite: tf.Tensor | bool) -> bool:
        """Update the scale after a step.

        Args:
            grads_finite: bool scalar, whether all gradients of the step are finite.

        Returns:
            Always True, because the scale may have changed. In a TF1 graph, a tensor with this value, which a session
            has to run.

        Raises:
            TypeError: `grads_finite` is not a bool or a number.
        """
        after = self._rules.next(_flag(grads_finite), ScaleState(self.scale_value, self.counter, 0))
        assigned = [self.scale_value.assign(after.scale), self.counter.assign(after.good)]
        if runs_in_order():
            return True
        with tf.control_dependencies(operations(assigned)):
            return tf.constant(True)


def _each(inputs: Same, function: Callable[[tf.Tensor], tf.Tensor]) -> Same:
    def result(value: Any) -> Any:
        tensor = _as_tensor(value)
        if not tensor.dtype.is_floating:
            raise TypeError(
                f"`inputs` must be floating-point tensors, but got a tensor of dtype {tensor.dtype.name}. Cast it "
                "first."
            )
        return scaling.over_values(function, tensor)

    # `map_structure` passes IndexedSlices to `result` as a whole. `result` scales their values and keeps their indices.
    return tf.nest.map_structure(result, inputs)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"`inputs` must be tensors, but got: {value!r}.")
    return tf.convert_to_tensor(value)


def _flag(value: Any) -> tf.Tensor:
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"`grads_finite` must be a bool scalar, but got: {value!r}.")
    return tf.cast(value, tf.bool)
