"""Notes on tensors: which loss scale multiplied a loss or divided a gradient, and what a gradient was computed from.

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
_DIVIDEND = "_dividend_of_in_tf_lossscale"
_ORIGIN = "_origin_in_tf_lossscale"


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


def note_dividends(unscaled: Iterable[Any], scaled: Iterable[Any]) -> None:
    """Note which scaled gradient each unscaled gradient was computed from.

    In eager mode the note keeps the scaled gradient in memory.

    >>> scaled, unscaled = tf.constant(8.0), tf.constant(1.0)
    >>> note_dividends([unscaled, None], [scaled, None])
    >>> dividend_of(unscaled) is scaled, dividend_of(scaled) is None
    (True, True)

    Args:
        unscaled: tensors, IndexedSlices or None.
        scaled: the gradients before the division.
    """
    for quotient, gradient in zip(unscaled, scaled):
        if quotient is not None:
            setattr(quotient, _DIVIDEND, gradient)


def dividend_of(gradient: Any) -> Any:
    """Return the scaled gradient that was divided to compute `gradient`. If it was not noted, return None."""
    return getattr(gradient, _DIVIDEND, None)


def note_origin(tensor: Any, origin: Any) -> None:
    """Note what a tensor in a graph was computed from. In eager mode, do nothing.

    Args:
        tensor: an unscaled gradient.
        origin: an instance of `Scaled` or `StackMember`, two classes in `core.fast.packing`.
    """
    if not tf.executing_eagerly():
        setattr(tensor, _ORIGIN, origin)


def origin(tensor: Any) -> Any:
    """Return what `note_origin` noted for a tensor. Without a note, return None.

    >>> origin(tf.constant(2.0)) is None
    True

    Args:
        tensor: any object.
    """
    return getattr(tensor, _ORIGIN, None)


def _refers_to(loss_scale: Any, tensor: Any, note: str) -> bool:
    reference = getattr(tensor, note, None)
    return reference is not None and reference() is loss_scale
