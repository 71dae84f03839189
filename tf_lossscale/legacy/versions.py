"""How loss scaling differs between TensorFlow versions, and how the old names in this package behave.

| behavior | TensorFlow 1.15 | 2.0 to 2.3 | compat.v1 of 2.21 | this package |
|---|---|---|---|---|
| IndexedSlices rows with the same index: what is checked | their sum | their sum | each row | their sum |
| IndexedSlices without a dense shape | ValueError | ValueError | accepted | accepted |
| lowering the scale in eager mode | divides by the multiplier | the same | the same | the same |
| lowering the scale in a graph | multiplies by the reciprocal in float32 | the same | the same | the same |
| `increment_period` | converted with `int`, even if it is a string | the same | the same | the same |
| `increment_period` of 0 or less | the scale grows on every step | the same | the same | the same |
| `tf.contrib`: a finite step resets the count of overflows | no | - | - | no |
| `tf.contrib`: a gradient that is None, or an iterator as `grads_and_vars` | errors | - | - | accepted |
| `FixedLossScale`: non-finite gradients | applied | applied | applied | applied |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale.core.rules import Rules


class DividingRules(Rules):
    """TensorFlow's rules for the scale: it is multiplied by `multiplier` to grow, and divided by it after an overflow.

    In a graph, an overflow multiplies the scale by the reciprocal of `multiplier` instead, because TensorFlow's graph
    optimizer replaces the division in the same way. In the last bit, the scale may therefore differ between graphs and
    eager mode.

    >>> rules = DividingRules.of(increment_period=3, multiplier=2.0)
    >>> rules.growth_steps
    3
    """

    @classmethod
    def of(cls, increment_period: int, multiplier: float) -> DividingRules:
        """Create rules from the old arguments. The arguments are not checked, because old code may pass unusual values.

        Args:
            increment_period: the number of consecutive finite steps after which the scale grows. If it is 0 or less,
                the scale grows on every step.
            multiplier: the factor by which the scale is multiplied or divided.

        Returns:
            New rules.
        """
        backoff = 1 / multiplier if multiplier else float("inf")
        return cls(growth_steps=increment_period, growth_factor=multiplier, backoff_factor=backoff)

    def _lowered(self, scale: tf.Tensor) -> tf.Tensor:
        multiplier = tf.constant(self.growth_factor, tf.float32)
        lower = scale / multiplier if tf.executing_eagerly() else scale * (1.0 / multiplier)
        return tf.maximum(lower, self.min_scale)


def values_to_check(gradients: Any) -> Iterator[Any]:
    """Yield the tensors and IndexedSlices to check for overflow in a nested structure of gradients.

    >>> [t.numpy().tolist() for t in values_to_check([None, tf.constant(1.0)])]
    [1.0]

    Args:
        gradients: a nested structure whose leaves are tensors, numbers, arrays, IndexedSlices or None. In a
            cross-replica context, the leaves are per-replica values.

    Yields:
        Tensors and IndexedSlices.
    """
    for gradient in tf.nest.flatten(gradients):
        if gradient is None:
            continue
        for local in tf.distribute.get_strategy().experimental_local_results(gradient):
            yield local if isinstance(local, tf.IndexedSlices) else tf.convert_to_tensor(local)
