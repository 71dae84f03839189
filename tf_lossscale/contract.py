"""How the loss of the coming step was scaled: what the two contracts differ in."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf
from absl import logging


class Contract:
    """Remembers which of the two contracts a training loop follows.

    `apply_gradients` takes unscaled gradients, except right after `scale_loss`: that is how Keras 3's `fit` calls it.
    "Right after" is told apart per thread, since the replicas of a strategy are traced in threads of their own, and
    per graph: what was called while a tf.function was traced happens again whenever that function runs, unseen.

    >>> contract = Contract()
    >>> contract.loss_scaled("scale_loss")
    >>> contract.takes_scaled_gradients()
    True
    >>> contract.takes_scaled_gradients()
    False
    """

    def __init__(self) -> None:
        self._scaled_in: dict[int, Any] = {}
        self._scaled_by: dict[int, tf.Tensor] = {}
        self._unscaled_in: dict[int, Any] = {}
        self._called: set[str] = set()
        self._warned: set[str] = set()

    def loss_scaled(self, method: str) -> None:
        """Notes that `get_scaled_loss` or `scale_loss` was called."""
        self._called.add(method)
        self._unscaled_in.pop(threading.get_ident(), None)
        if method == "scale_loss":
            self._scaled_in[threading.get_ident()] = _graph()
        else:
            self._scaled_in.pop(threading.get_ident(), None)

    def loss_scaled_by(self, factor: tf.Tensor) -> None:
        """Notes what the loss was multiplied by."""
        self._scaled_by[threading.get_ident()] = factor

    def factor_of_loss(self) -> tf.Tensor | None:
        """What the loss was multiplied by, if that was in the function that is being traced, or in eager mode."""
        factor = self._scaled_by.get(threading.get_ident())
        return factor if factor is not None and getattr(factor, "graph", None) is _graph() else None

    def gradients_unscaled(self) -> None:
        """Notes that `get_unscaled_gradients` was called: whatever comes next is unscaled."""
        self._called.add("get_unscaled_gradients")
        self._scaled_in.pop(threading.get_ident(), None)
        self._unscaled_in[threading.get_ident()] = _graph()

    def takes_scaled_gradients(self) -> bool:
        """Whether the gradients that `apply_gradients` got are scaled ones."""
        return _taken(self._scaled_in)

    def takes_unscaled_gradients(self) -> bool:
        """Whether `get_unscaled_gradients` came right before: Sonnet's `apply` then takes them as they are."""
        return _taken(self._unscaled_in)

    def warn_before_apply_gradients(self) -> None:
        """Warns, once, if the loss or the gradients were never given to us."""
        if "scale_loss" in self._called:
            return
        scaled = "get_scaled_loss" in self._called
        unscaled = "get_unscaled_gradients" in self._called
        if scaled and unscaled:
            return
        forgotten = " and ".join(
            name
            for name, called in (
                ("LossScaleOptimizer.get_scaled_loss()", scaled),
                ("LossScaleOptimizer.get_unscaled_gradients()", unscaled),
            )
            if not called
        )
        self._warn(
            f"You forgot to call {forgotten} before calling LossScaleOptimizer.apply_gradients(). Small float16 "
            "gradients may become zero, or every step may be scaled wrongly. The loop should be:\n"
            "    with tf.GradientTape() as tape:\n"
            "        loss = loss_fn()\n"
            "        scaled_loss = opt.get_scaled_loss(loss)\n"
            "    scaled_grads = tape.gradient(scaled_loss, variables)\n"
            "    grads = opt.get_unscaled_gradients(scaled_grads)\n"
            "    opt.apply_gradients(zip(grads, variables))"
        )

    def warn_before_apply(self) -> None:
        """Warns, once, if `apply` is about to divide by a scale that nobody multiplied in."""
        if not self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients()."
            )
        elif "get_unscaled_gradients" in self._called:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they would be divided twice. Give unscaled gradients to apply_gradients()."
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)


def _taken(noted_in: dict[int, Any]) -> bool:
    """Whether something is noted for this thread; forgets it, unless a traced function will do it again."""
    thread = threading.get_ident()
    if thread not in noted_in:
        return False
    if noted_in[thread] in _graph_and_parents():
        del noted_in[thread]
    return True


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _graph_and_parents() -> list[Any]:
    graphs, graph = [], _graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs or [None]
