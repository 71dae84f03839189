"""Notes on tensors: which loss scale multiplied a loss or divided a gradient.

Each note is an attribute of the tensor. No other module reads or writes these attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

_LOSS_SCALED_BY = "_loss_scaled_by_tf_lossscale"
_UNSCALED_BY = "_unscaled_by_tf_lossscale"
_SCALED = "_scaled_for_tf_lossscale"


def note_scaled_loss(loss: Any, loss_scale: Any) -> None:
    """Mark a loss as multiplied by a loss scale.

    >>> loss, scale = tf.constant(1.0), tf.Module()
    >>> note_scaled_loss(loss, scale)
    >>> loss_is_scaled_by(loss, scale), loss_is_scaled_by(loss, tf.Module())
    (True, False)

    Args:
        loss: a nested structure of tensors.
        loss_scale: the loss scale.
    """
    for part in tf.nest.flatten(loss):
        setattr(part, _LOSS_SCALED_BY, weakref.ref(loss_scale))


def loss_is_scaled_by(loss: Any, loss_scale: Any) -> bool:
    """Return whether any part of a loss is marked as multiplied by this loss scale.

    Args:
        loss: a nested structure of tensors. Other objects in it count as not marked.
        loss_scale: the loss scale.
    """
    return any(_refers_to(loss_scale, part, _LOSS_SCALED_BY) for part in tf.nest.flatten(loss))


def note_unscaled(gradients: Iterable[Any], loss_scale: Any, scaled: Iterable[Any] = ()) -> None:
    """Mark gradients as divided by a loss scale.

    >>> gradient, scale = tf.constant(1.0), tf.Module()
    >>> note_unscaled([gradient, None], scale)
    >>> any_and_all_unscaled([gradient, None]), any_and_all_unscaled([gradient, tf.constant(1.0)])
    ((True, True), (True, False))

    Args:
        gradients: tensors, IndexedSlices or None.
        loss_scale: the loss scale.
        scaled: the gradients before the division. This function marks them as scaled.
    """
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _UNSCALED_BY, weakref.ref(loss_scale))
    for gradient in scaled:
        if isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
            setattr(gradient, _SCALED, True)


def any_and_all_unscaled(gradients: Iterable[Any]) -> tuple[bool, bool]:
    """Return whether any of the gradients is marked as divided by a loss scale, and whether all of them are.

    Args:
        gradients: tensors, IndexedSlices or None. None is ignored.

    Returns:
        Two bools; both are False if there is no gradient.
    """
    noted = [hasattr(gradient, _UNSCALED_BY) for gradient in gradients if gradient is not None]
    return any(noted), bool(noted) and all(noted)


def any_is_unscaled_by(gradients: Iterable[Any], loss_scale: Any) -> bool:
    """Return whether any of the gradients is marked as divided by this loss scale."""
    return any(_refers_to(loss_scale, gradient, _UNSCALED_BY) for gradient in gradients)


def is_scaled(gradient: Any) -> bool:
    """Return whether a gradient is marked as scaled. `get_unscaled_gradients` marks the gradients that it receives."""
    return hasattr(gradient, _SCALED)


def _refers_to(loss_scale: Any, tensor: Any, note: str) -> bool:
    reference = getattr(tensor, note, None)
    return reference is not None and reference() is loss_scale
