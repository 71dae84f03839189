"""Finds an overflow that a training loop hides between `get_unscaled_gradients` and `apply_gradients`.

A loop may replace infinite gradients by zeros, or apply only the signs of gradients. All that it applies is then
finite, although the scale is too high. Without this module, the scale would never fall, and values would be lost in
each step.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import tensorflow as tf

from tf_lossscale.core.finite import all_finite
from tf_lossscale.core.graphs import ancestors, inputs_of
from tf_lossscale.core.origins import called_bodies, marked_by
from tf_lossscale.core.scaling import over_values

# The control flow of TF1 graphs. A tensor of a branch or loop cannot be used outside of it.
_CONTROL_FLOW = ("Enter", "Exit", "Merge", "NextIteration", "Switch")
# Elementwise operations whose results are infinite or NaN wherever an input is. `tf.clip_by_global_norm` and averages
# consist of them.
_KEEPING_OVERFLOWS = re.compile("Add(N|V2)?|Identity(N)?|Mul|Neg|RealDiv|Sub")


class Results(threading.local):
    """The results of this thread's last call to `get_unscaled_gradients` in eager mode, until an update follows."""

    tensors: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[type[Results], tuple[()]]:
        return Results, ()

    def hold(self, tensors: list[Any]) -> None:
        """Replace the results. In a graph there are none, because the graph shows what was computed from them."""
        self.tensors = tuple(tensors) if tf.executing_eagerly() else ()


def with_hidden_overflow(gradients: list[Any], scaled: list[Any], results: Results, loss_scale: Any) -> list[Any]:
    """Return the gradients of an update, and add NaN to one of them if an overflow is hidden.

    `scaled` are the gradients that depend on the loss scale, with None in place of others.
    """
    changed = [i for i, each in enumerate(scaled) if each is not None and not _is_result(each, loss_scale)]
    unscaled = _of_eager(scaled, changed, results) if tf.executing_eagerly() else _in_graph(scaled, changed, loss_scale)
    if not unscaled:
        return gradients
    nan_or_zero = tf.where(all_finite(unscaled), 0.0, float("nan"))
    smallest = min(changed, key=lambda i: _size(gradients[i]))
    with_nan = over_values(lambda values: values + tf.cast(nan_or_zero, values.dtype), gradients[smallest])
    return [*gradients[:smallest], with_nan, *gradients[smallest + 1 :]]


def _size(gradient: Any) -> float:
    # IndexedSlices may have no rows.
    return float("inf") if isinstance(gradient, tf.IndexedSlices) else gradient.shape.num_elements() or float("inf")


def _of_eager(scaled: list[Any], changed: list[int], results: Results) -> list[Any]:
    """Return the remembered unscaled gradients, if they have the number and the shapes of the gradients."""
    if len(results.tensors) != len(scaled):
        return []
    pairs = [(results.tensors[i], scaled[i]) for i in changed]
    fits = all(before is not None and before.shape == after.shape for before, after in pairs)
    return [before for before, _ in pairs] if fits else []


def _in_graph(scaled: list[Any], changed: list[int], loss_scale: Any) -> list[Any]:
    """Return the results of `get_unscaled_gradients` that gradients were computed from, and whose overflow may hide."""

    def origins_of(tensor: tf.Tensor) -> list[tf.Tensor]:
        return [] if _is_result(tensor, loss_scale) or tensor.op.type in _CONTROL_FLOW else inputs_of(tensor)

    def visible_in(tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the inputs whose infinite and NaN values make the same elements of a tensor infinite or NaN."""
        if _is_result(tensor, loss_scale) or not _KEEPING_OVERFLOWS.fullmatch(tensor.op.type):
            return []
        inputs = inputs_of(tensor)[:1] if tensor.op.type == "RealDiv" else inputs_of(tensor)
        return [each for each in inputs if tensor.shape.is_fully_defined() and each.shape == tensor.shape]

    gradients = [scaled[i] for i in changed]
    visible = {id(each) for each in ancestors(scaled, visible_in)}
    results = [each for each in ancestors(gradients, origins_of) if _is_result(each, loss_scale)]
    return [each for each in results if id(each) not in visible]


def _is_result(tensor: Any, loss_scale: Any) -> bool:
    """Return whether `get_unscaled_gradients` returned a tensor, also in a called function or a branch."""
    if marked_by(tensor) == (loss_scale, False):
        return True
    tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    if not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.op.type == "Identity":
        return _is_result(tensor.op.inputs[0], loss_scale)
    return any(_is_result(body.outputs[tensor.value_index], loss_scale) for body, _ in called_bodies(tensor.op))
