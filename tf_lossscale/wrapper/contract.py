"""Whether the gradients of an update are scaled: the difference between the two contracts."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import notes

# Method -> whether the gradients of the next update are scaled.
APPLY_GRADIENTS = {"scale_loss": True, "get_scaled_loss": False, "get_unscaled_gradients": False}
APPLY = {"scale_loss": True, "get_unscaled_gradients": False}
# Method -> whether the gradients that a place has are scaled after this call.
_LEAVES_SCALED = {"scale_loss": True, "get_scaled_loss": True, "get_unscaled_gradients": False}

_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


@dataclasses.dataclass
class _Call:
    """The last call of a thread in one place, and the threads in which an update followed there."""

    method: str
    followed_in: set[threading.Thread] = dataclasses.field(default_factory=set)


class Contract:
    """Tells whether the gradients of an update are scaled. The answer is known, or the update raises.

    1. Gradients that `get_unscaled_gradients` returned are marked: they are unscaled.
    2. Otherwise the last call in the same place decides. A place is a function that is being traced, together with the
       functions around it, or a thread in eager mode.
    3. If that place has no call, and always in eager mode, the calls in other places that no update followed are
       considered too: the gradients may come from a traced function or another thread. If these calls contradict each
       other, the update raises.
    4. Without any call, the gradients are what the documentation of the update says.

    A traced function keeps its answer. If the answer came from outside of the function, a later call that says the
    opposite raises, unless that call is in a traced function that updates as well.

    >>> contract = Contract()
    >>> contract.called("scale_loss")
    >>> contract.takes_scaled([tf.constant(8.0)])
    True
    >>> contract.called("get_unscaled_gradients")
    >>> contract.takes_scaled([tf.constant(2.0)])
    False
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._in_functions: weakref.WeakKeyDictionary[Any, dict[threading.Thread, _Call]] = weakref.WeakKeyDictionary()
        self._in_eager_mode: dict[threading.Thread, _Call] = {}
        self._in_ended_threads: set[str] = set()
        self._answers_kept: set[bool] = set()
        self._whole_steps = threading.local()
        self._scaled_by: dict[int, tf.Tensor] = {}
        self._called: set[str] = set()
        self._warned: set[str] = set()

    def called(self, method: str) -> None:
        """Record a call of `scale_loss`, `get_scaled_loss` or `get_unscaled_gradients`.

        Args:
            method: its name.

        Raises:
            RuntimeError: in eager mode, if a function that was traced before takes gradients to be the opposite.
        """
        with self._lock:
            functions, thread = _functions(), threading.current_thread()
            contradicts = method != "get_scaled_loss" and (not APPLY_GRADIENTS[method]) in self._answers_kept
            contradicts = contradicts and not self._in_whole_step()
            if contradicts and not functions:
                raise _contradiction(method)
            self._called.add(method)
            for function in functions:
                call = self._in_functions.setdefault(function, {})[thread] = _Call(method)
                if contradicts:
                    _require_an_update(call, function)
            if not functions:
                self._forget_ended_threads()
                self._in_eager_mode[thread] = _Call(method)

    def scaled_by_hand(self) -> None:
        """Record that gradients are scaled and unscaled without our methods: they are unscaled in the next update.

        Unless the loss is scaled as well: Keras 3's `fit` calls `scale_loss` with what a function of `scale_inside`
        returned.
        """
        with self._lock:
            if not any(call.method == "scale_loss" and not call.followed_in for call in self._calls_here(_functions())):
                self.called("get_scaled_loss")
                self.called("get_unscaled_gradients")

    def takes_scaled(
        self, gradients: Iterable[Any], scaled_after: dict[str, bool] = APPLY_GRADIENTS, otherwise: bool = False
    ) -> bool:
        """Tell whether the gradients of an update, which is about to be made, are scaled.

        Args:
            gradients: tensors, IndexedSlices or None.
            scaled_after: method -> whether the gradients of the next update are scaled.
            otherwise: the answer if no method was called.

        Raises:
            RuntimeError: the calls so far contradict each other.
        """
        with self._lock:
            functions = _functions()
            some_unscaled, all_unscaled = notes.are_unscaled(gradients)
            if all_unscaled:
                answers, from_outside = {False}, False
            else:
                answers, from_outside = self._answers(functions, scaled_after)
            if len(answers) > 1 or (True in answers and some_unscaled):
                raise RuntimeError(
                    "Cannot tell whether these gradients are scaled: both scale_loss() and "
                    "get_unscaled_gradients() (or get_scaled_loss()) were called for this optimizer in other "
                    "functions, threads or steps, or more than one update follows one scale_loss(). "
                    f"{_TWO_WAYS_OUT}"
                )
            answer = answers.pop() if answers else otherwise
            if functions and from_outside:
                self._answers_kept.add(answer)
            self._use_calls(functions)
            return answer

    def apply_takes_scaled(self, gradients: Iterable[Any], may_be_unscaled: bool) -> bool:
        """Tell whether the gradients passed to `apply` are scaled; called once for each call of `apply`.

        Args:
            gradients: tensors, IndexedSlices or None.
            may_be_unscaled: whether the family's `apply` also takes what `get_unscaled_gradients` returned.

        Raises:
            RuntimeError: the gradients were unscaled, or the calls so far contradict each other.
        """
        scaled = True
        if may_be_unscaled:
            scaled = self.takes_scaled(gradients, APPLY, otherwise=True)
        else:
            self.require_not_unscaled(gradients)
        if scaled:
            self.warn_before_apply()
        if not may_be_unscaled:
            self.update_follows()
        return scaled

    def update_follows(self) -> None:
        """Record that an update uses the calls made in this place."""
        with self._lock:
            self._use_calls(_functions())

    def _use_calls(self, functions: list[Any]) -> None:
        thread = threading.current_thread()
        for call in self._calls_here(functions):
            call.followed_in.add(thread)

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Declare that an update of marked gradients follows inside, so that no call contradicts another."""
        self._whole_steps.depth = getattr(self._whole_steps, "depth", 0) + 1
        try:
            yield
        finally:
            self._whole_steps.depth -= 1

    def loss_scaled_by(self, factor: tf.Tensor) -> None:
        """Record the factor that the loss was multiplied by."""
        self._scaled_by[threading.get_ident()] = factor

    def factor_of_loss(self) -> tf.Tensor | None:
        """Return the factor of the loss, if the loss was scaled in the function being traced, or in eager mode."""
        factor = self._scaled_by.get(threading.get_ident())
        return factor if factor is not None and getattr(factor, "graph", None) is _graph() else None

    def _answers(self, functions: list[Any], scaled_after: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return the answers of the calls so far, and whether these were outside of the function being traced."""
        for function in functions:
            calls = [c for c in self._calls_in(function) if c.method in scaled_after and not _used_up(c, scaled_after)]
            if calls:
                return {scaled_after[call.method] for call in calls}, function is not functions[0]
        here = self._calls_here(functions)
        answers = {
            scaled_after[call.method] for call in self._unused_calls_elsewhere(here) if call.method in scaled_after
        }
        for call in here:
            if call.method in scaled_after and _used_up(call, scaled_after):
                # A second part of the gradients of one scale_loss, or gradients of no scaled loss.
                answers |= {True} if answers else {True, False}
            elif call.method in scaled_after:
                answers.add(scaled_after[call.method])
        return answers, True

    def _unused_calls_elsewhere(self, here: list[_Call]) -> list[_Call]:
        """Return the calls in all other places, if no update followed them."""
        calls = [
            *self._in_eager_mode.values(),
            *(call for function, calls in self._in_functions.items() for call in calls.values()),
            *map(_Call, self._in_ended_threads),
        ]
        return [call for call in calls if not call.followed_in and not any(call is each for each in here)]

    def _calls_here(self, functions: list[Any]) -> list[_Call]:
        if functions:
            return [call for function in functions for call in self._calls_in(function)]
        call = self._in_eager_mode.get(threading.current_thread())
        return [call] if call else []

    def _calls_in(self, function: Any) -> list[_Call]:
        """Return this thread's call in a function, else those of all: replicas have threads, and do the same."""
        calls = self._in_functions.get(function, {})
        own = calls.get(threading.current_thread())
        return list(calls.values()) if own is None else [own]

    def _in_whole_step(self) -> bool:
        return getattr(self._whole_steps, "depth", 0) > 0

    def _forget_ended_threads(self) -> None:
        for thread in [thread for thread in self._in_eager_mode if not thread.is_alive()]:
            call = self._in_eager_mode.pop(thread)
            if not call.followed_in:
                self._in_ended_threads.add(call.method)

    def warn_before_apply_gradients(self) -> None:
        """Warn, once, if the loss or the gradients were never given to us."""
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
            "    opt.apply_gradients(zip(grads, variables))\n"
            "If a library has this loop, give it a loss function that scales by itself: opt.scale_inside(loss_fn)."
        )

    def require_not_unscaled(self, gradients: Iterable[Any]) -> None:
        """Raise if `apply` got unscaled gradients, which it would divide again; warn, once, if they may be unscaled.

        Known are gradients that `get_unscaled_gradients` returned or was given. For others the calls tell: they are
        unscaled if every place that they may come from has called it last, and may be if one has.
        """
        gradients = [gradient for gradient in gradients if gradient is not None]
        unscaled, _ = notes.are_unscaled(gradients)
        may_be_unscaled = False
        if not unscaled and not all(notes.is_scaled(gradient) for gradient in gradients):
            with self._lock:
                calls = self._calls_before_apply(_functions())
                last = calls or self._calls_here(_functions())
            unscaled = bool(calls) and not any(_LEAVES_SCALED[call.method] for call in calls)
            may_be_unscaled = not all(_LEAVES_SCALED[call.method] for call in last)
        if unscaled:
            raise RuntimeError(
                "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function of "
                f"scale_inside(), has done so with these. {_TWO_WAYS_OUT}"
            )
        if may_be_unscaled and self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they may be divided twice. Give unscaled gradients to apply_gradients()."
            )

    def _calls_before_apply(self, functions: list[Any]) -> list[_Call]:
        """Return the calls of the places that gradients given to `apply` may come from."""
        thread = threading.current_thread()
        for function in functions:
            calls = [call for call in self._calls_in(function) if thread not in call.followed_in]
            if calls:
                return calls
        here = self._calls_here(functions)
        return [call for call in here if thread not in call.followed_in] + self._unused_calls_elsewhere(here)

    def warn_before_apply(self) -> None:
        """Warn, once, if `apply` is about to divide by a scale that nobody multiplied in."""
        if not self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients()."
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)


def require_scaled(gradients: Iterable[Any], loss_scale: Any) -> None:
    """Raise if a gradient is known to be divided by this loss scale.

    >>> require_scaled([tf.constant(8.0), None], tf.Module())

    Args:
        gradients: tensors, IndexedSlices or None.
        loss_scale: the object that they would be divided by.

    Raises:
        RuntimeError: `get_unscaled_gradients` returned one of them.
    """
    if any(notes.is_unscaled_by(gradient, loss_scale) for gradient in gradients):
        raise RuntimeError(
            "get_unscaled_gradients() was given a gradient that it returned before, and would divide it by the loss "
            "scale again. Call it once for each gradient. minimize(), compute_gradients() and get_gradients() call it "
            "themselves."
        )


def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise if a part of a loss is known to be multiplied by this loss scale.

    Args:
        loss: a nested structure of tensors, or a function.
        loss_scale: the object that it would be multiplied by.

    Raises:
        RuntimeError: `get_scaled_loss` or `scale_loss` returned it.
    """
    if notes.loss_is_scaled_by(loss, loss_scale):
        raise RuntimeError(
            "This loss is scaled already: get_scaled_loss() or scale_loss() returned it. Scale it once. minimize(), "
            "compute_gradients(), get_gradients() and Keras's fit take a loss that is not scaled."
        )


def _used_up(call: _Call, scaled_after: dict[str, bool]) -> bool:
    # Unscaled gradients may go to several updates. After an update of scaled ones, the next may be of either kind.
    return scaled_after[call.method] and threading.current_thread() in call.followed_in


def _contradiction(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}() was called, but a function that was traced before calls apply_gradients() for gradients that are "
        f"{'un' * APPLY_GRADIENTS[method]}scaled. {_TWO_WAYS_OUT}"
    )


def _require_an_update(call: _Call, function: Any) -> None:
    """Make each call of the function being traced raise, unless an update follows the call in that function."""

    def check() -> tf.Tensor:
        if not call.followed_in:
            raise _contradiction(call.method)
        return tf.constant(0)

    if not hasattr(function, "capture_call_time_value"):
        raise _contradiction(call.method)
    # Private: TensorFlow evaluates the closure at each call of the function.
    function.capture_call_time_value(check, tf.TensorSpec([], tf.int32))


def _functions() -> list[Any]:
    """Return the graphs of the functions being traced, the innermost first, and a legacy graph around them."""
    if tf.executing_eagerly():
        return []
    found, graph = [], _graph()
    while graph is not None:
        if isinstance(graph, tf.__internal__.FuncGraph):
            if type(graph) is tf.__internal__.FuncGraph:  # derived ones are branches and loops of a function
                found.append(graph)
        elif not tf.compat.v1.executing_eagerly_outside_functions():
            found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
