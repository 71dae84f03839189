"""Small tensors of one shape are worked on together: one operation in place of one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Up to this many values an operation costs more than what it does; copies of more than a megabyte are not made.
_SMALL = 2**13
_TOGETHER = 2**18
# Up to this many values, memory is no matter: what is held longer than it has to be, or at the same time as another.
_HELD = 2**22


def positions(tensors: Sequence[Any]) -> list[list[int]]:
    """Returns the positions of tensors that one `tf.stack` can take together, in groups of at least two.

    >>> positions([tf.ones([2]), tf.ones([3]), None, tf.zeros([2]), tf.zeros([2], tf.float16)])
    [[0, 3]]

    Args:
        tensors: of any dtype and shape; what is no tensor is left out.

    Returns:
        Lists of positions: each of tensors of one dtype, shape and device, small ones, a megabyte in all. None of them
        where XLA compiles: it fuses what it is given by itself.
    """
    if compiled():
        return []
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.Tensor):
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(i)
    return [group for (shape, *_), found in alike.items() for group in _small_enough(found, shape) if len(group) > 1]


def _small_enough(found: list[int], shape: tf.TensorShape) -> list[list[int]]:
    """The positions of tensors of a shape, as many in each list as may be put together."""
    values = shape.num_elements()
    if not values or values > _SMALL:
        return []
    most = _TOGETHER // values
    return [found[first : first + most] for first in range(0, len(found), most)]


def is_small(tensor: tf.Tensor) -> bool:
    """Returns whether an operation costs more than what it does to a tensor.

    >>> is_small(tf.ones([1000])), is_small(tf.ones([10_000]))
    (True, False)

    Args:
        tensor: of any shape; one that is not known is not small.
    """
    values = tensor.shape.num_elements()
    return values is not None and values <= _SMALL


def fit_in_a_stack(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether tensors are together no larger than what is put together.

    >>> fit_in_a_stack([tf.ones([1000])] * 200), fit_in_a_stack([tf.ones([1000, 1000])])
    (True, False)

    Args:
        tensors: of any shape; one that is not known does not fit.
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    return None not in sizes and sum(sizes) <= _TOGETHER


def is_large(tensor: tf.Tensor) -> bool:
    """Returns whether it matters that two tensors of this size are held at the same time.

    >>> is_large(tf.ones([1000, 1000]))
    False

    Args:
        tensor: of any shape; one that is not known is not large.
    """
    values = tensor.shape.num_elements()
    return values is not None and values > _HELD


def are_small(tensors: Sequence[Any]) -> bool:
    """Returns whether operations, rather than values, are what a step of these gradients spends its time on.

    >>> are_small([tf.ones([1000])] * 400), are_small([tf.ones([4_000_000])] * 4)
    (True, False)

    Args:
        tensors: gradients; only dense ones of a known shape count.
    """
    sizes = [t.shape.num_elements() or 0 for t in tensors if isinstance(t, tf.Tensor)]
    return sum(sizes) <= _HELD


def compiled() -> bool:
    """Returns whether XLA compiles the function that is being traced.

    >>> compiled()
    False
    >>> bool(tf.function(lambda: tf.constant(compiled()), jit_compile=True)())
    True
    """
    if tf.executing_eagerly():
        return False
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()  # private: the doctest above fails where it says something else
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def stacked(tensors: Sequence[Any], group: list[int]) -> tf.Tensor:
    """Returns the tensors at some positions as one.

    >>> stacked([tf.constant([1.0]), None, tf.constant([2.0])], [0, 2]).numpy().tolist()
    [[1.0], [2.0]]

    Args:
        tensors: those of `positions`.
        group: one of the lists that `positions` returned.

    Returns:
        A tensor with one more axis, the first.
    """
    return tf.raw_ops.Pack(values=[tensors[i] for i in group], axis=0)


def unstacked(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that `stacked` put together.

    >>> [part.numpy().tolist() for part in unstacked(tf.constant([[1.0], [2.0]]))]
    [[1.0], [2.0]]

    Args:
        tensor: its first axis is of a known size.

    Returns:
        As many tensors.
    """
    return tf.raw_ops.Unpack(value=tensor, num=tensor.shape.as_list()[0], axis=0)
