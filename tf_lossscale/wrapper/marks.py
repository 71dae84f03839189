"""Marks on losses and gradients: which loss scale a tensor belongs to, and whether the tensor is scaled.

A gradient that `get_unscaled_gradients` took is scaled, one that it returned is not. A loss that `get_scaled_loss` or
`scale_loss` returned is scaled. The results of arithmetic on marked tensors have no mark, but in a graph the operations
that computed them can be followed back to marked tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core.graphs import ancestors

_MARK = "_marked_by_tf_lossscale"


def mark(tensors: Any, loss_scale: Any, scaled: bool) -> None:
    """Mark the tensors in a structure, also sparse and ragged ones, as multiplied or as divided by a loss scale."""
    for tensor in tf.nest.flatten(tensors):
        if isinstance(tensor, (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor)):
            setattr(tensor, _MARK, (weakref.ref(loss_scale), scaled))


def is_scaled(tensor: Any, loss_scale: Any = None) -> bool | None:
    """Return whether a tensor is marked as scaled (True) or unscaled (False), or None if it is not marked.

    If a loss scale is passed, marks of other loss scales do not count.
    """
    reference, scaled = getattr(tensor, _MARK, (None, None))
    return scaled if loss_scale is None or (reference and reference() is loss_scale) else None


class Mark(NamedTuple):
    """The mark of a gradient."""

    #: Whether the gradient is scaled, or None if it has no mark.
    scaled: bool | None
    #: Whether the gradient is marked by the optimizer's own loss scale.
    own: bool


def marks_of(gradients: Iterable[Any], loss_scale: Any) -> set[Mark]:
    """Return the different marks of gradients. Raise an error if another loss scale multiplies a gradient."""
    marks = set()
    for gradient in gradients:
        if gradient is not None:
            reference, scaled = getattr(gradient, _MARK, (None, None))
            marks.add(Mark(scaled, reference is not None and reference() is loss_scale))
    if Mark(True, False) in marks:
        raise RuntimeError(
            "A gradient is multiplied by the loss scale of another LossScaleOptimizer, whose get_unscaled_gradients() "
            "took it. Pass the result of that call to apply_gradients() instead."
        )
    return marks


def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise an error if a loss, or a part of it, was already multiplied by this loss scale."""
    if any(_is_of_scaled_loss(part, loss_scale) for part in tf.nest.flatten(loss)):
        raise RuntimeError(
            "This loss is scaled already: get_scaled_loss() or scale_loss() returned it or a part of it. Scale it "
            "once. minimize(), compute_gradients(), get_gradients() and Keras's fit take a loss that is not scaled."
        )


#: Operations whose result is scaled if one of their inputs is. The same is true of the product with a constant.
_KEEPING_THE_SCALE = (
    "Add",
    "AddN",
    "AddV2",
    "Cast",
    "Identity",
    "Mean",
    "Neg",
    "Pack",
    "Reshape",
    "Squeeze",
    "Sub",
    "Sum",
)


def _is_of_scaled_loss(loss: Any, loss_scale: Any) -> bool:
    """Return whether a loss was scaled, or, in a graph, is a sum, mean or multiple of a loss that was scaled."""
    mark = is_scaled(loss, loss_scale)
    if mark is not None or tf.executing_eagerly() or not tf.is_tensor(loss):
        return bool(mark)

    def keeps_the_scale(tensor: tf.Tensor) -> bool:
        if is_scaled(tensor, loss_scale) is not None:
            return False
        by_constant = tensor.op.type == "Mul" and any(factor.op.type == "Const" for factor in tensor.op.inputs)
        return by_constant or tensor.op.type in _KEEPING_THE_SCALE

    return any(is_scaled(tensor, loss_scale) for tensor in ancestors(loss, keeps_the_scale))


def have_been_unscaled(gradients: list[Any], loss_scale: Any, factor: Any) -> bool:
    """Return whether a gradient in a graph was computed from unscaled gradients, and not from a scaled loss since.

    `factor` is the factor that multiplied the loss, or None if it is unknown.
    """

    def has_been_unscaled(gradient: Any) -> bool:
        found = False
        for tensor in ancestors(gradient, lambda tensor: is_scaled(tensor, loss_scale) is not False):
            # The input of a branch or a loop may have been computed from the factor.
            if tensor is factor or (tensor.op.type == "Placeholder" and tensor.dtype != tf.resource):
                return False
            found = found or is_scaled(tensor, loss_scale) is False
        return found

    return factor is not None and any(map(has_been_unscaled, gradients))
