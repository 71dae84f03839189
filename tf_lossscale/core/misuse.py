"""Finds losses and gradients that are scaled or unscaled twice or in the wrong place, and reports them.

A loss is scaled once and its gradients are unscaled once, before anything that is not linear changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core.finite import is_zero
from tf_lossscale.core.graphs import do_not_convert
from tf_lossscale.core.origins import Origin, origins

# What is known of a gradient: True if the loss scale multiplies it, False if not, None if nothing is known, or:
BY_OTHER, NOT_BY_OTHER, BY_SEVERAL = "by another", "not by another", "by several"
_TWICE, _CHANGED = "twice", "changed"

SCALED_TWICE = (
    "These gradients were multiplied by the loss scale twice. Scale a loss once: minimize(), compute_gradients(), "
    "get_gradients() and Keras's fit take a loss that is not scaled, and a loss of outputs from scale_gradient() must "
    "not be scaled."
)
_SCALED_LOSS = (
    "This loss is scaled already: get_scaled_loss(), scale_loss() or a LossScale's scale() returned it or a part of "
    "it, or it contains a product with loss_scale that is not divided again, such as the inner gradient of a penalty. "
    "Scale a loss once. minimize(), compute_gradients(), get_gradients() and Keras's fit take a loss that is not "
    "scaled."
)
_CHANGED_WHILE_SCALED = (
    "A gradient was clipped, normalized, compared with a number or added to an unscaled one while the loss scale "
    "multiplied it, or was divided by the loss scale twice, so the result depends on the loss scale. Unscale gradients "
    "once, with get_unscaled_gradients() or a LossScale's unscale(), and pass the results to what changes them. If a "
    "library changes them, use the inner optimizer's clipnorm or global_clipnorm."
)
_UNSCALED = (
    "{}() got a gradient that is already unscaled, because an earlier call returned it, it was computed from the "
    "result of an earlier call, or it was divided by the loss scale or by its own norm. Unscale each gradient only "
    "once, and before you normalize it. minimize(), compute_gradients() and get_gradients() unscale gradients "
    "themselves."
)
_OF_OTHER = "unscale() got a gradient of a loss that another loss scale multiplied. Call unscale() of that loss scale."
_STILL_SCALED = (
    "step() of a loss scale applies gradients as they are, but a loss scale still multiplies these gradients. Pass it "
    "the results of unscale()."
)


def _kind(found: Origin, loss_scale: Any) -> Any:
    if found is None:
        return None
    own: list[float] = []
    others: list[float] = []
    for unit, power in found.items():
        (own if unit.owner is loss_scale else others).append(power)
    if any(own):
        total, is_own = sum(own), not any(others)
        if total == -1 and is_own:
            return False  # An argument or a variable was divided by the loss scale.
        once = True if is_own else BY_SEVERAL
        return _TWICE if total > 1 else once if total == 1 else _CHANGED
    if any(others):
        return BY_OTHER
    return False if own else NOT_BY_OTHER


def warn_once(loss_scale: Any, text: str) -> None:
    """Log a warning, once for each loss scale."""
    if text not in loss_scale._factors.warnings:
        loss_scale._factors.warnings.add(text)
        logging.warning("%s", text)


def kinds_of(gradients: Iterable[Any], found: list[Origin], loss_scale: Any) -> set[Any]:
    """Return what is known of gradients, whose origins were found.

    Raise an error if one is scaled twice. Warn if one was changed while it was scaled, so that nothing is known.
    """
    of_each = [(_kind(each, loss_scale), gradient) for each, gradient in zip(found, gradients) if gradient is not None]
    kinds = {kind for kind, _ in of_each}
    if kinds & {BY_OTHER, BY_SEVERAL, _TWICE} or kinds >= {True, False}:
        kinds = {kind for kind, gradient in of_each if not is_zero(gradient)}
    if _TWICE in kinds:
        raise RuntimeError(SCALED_TWICE)
    if _CHANGED in kinds and not loss_scale._is_one:
        warn_once(loss_scale, _CHANGED_WHILE_SCALED)
    return {None if kind is _CHANGED else kind for kind in kinds}


@do_not_convert
def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise an error if a loss, or a term of it in a graph, was already multiplied by this scale."""
    for found in origins(tf.nest.flatten(loss)):
        if any(unit.owner is loss_scale and power > 0 for unit, power in (found or {}).items()):
            raise RuntimeError(_SCALED_LOSS)


def require_scaled(
    kinds: set[Any], gradients: Iterable[Any], loss_scale: Any, method: str = "unscale", of_other: str = _OF_OTHER
) -> None:
    """Raise an error if a gradient passed to `method` is unscaled, or only another loss scale multiplies it."""
    if False in kinds:
        raise RuntimeError(_UNSCALED.format(method))
    if BY_OTHER in kinds or (None in kinds and loss_scale._factors.has_gradient_of_another(gradients)):
        raise RuntimeError(of_other)


def warn_of_scaled(gradients: list[Any], loss_scale: Any) -> None:
    """Warn if a loss scale multiplies the gradients of a step."""
    if loss_scale._is_one:
        return
    kinds = kinds_of(gradients, origins(gradients), loss_scale)
    if kinds & {True, BY_OTHER, BY_SEVERAL} or (kinds == {None} and loss_scale._factors.has_scaled(gradients)):
        warn_once(loss_scale, _STILL_SCALED)
