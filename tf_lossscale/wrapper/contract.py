"""Which of the two contracts an update follows: whether its gradients are scaled. An ambiguous update raises.

For `apply_gradients`, the first of these rules that applies decides:

1. Marks. Gradients that `get_unscaled_gradients` returned are marked as unscaled. Arithmetic loses the mark.
2. The last call in the same place: after `scale_loss` the gradients are scaled, after `get_scaled_loss` and
   `get_unscaled_gradients` they are unscaled. A place is a function being traced, or a thread in eager mode; a function
   without a call asks the functions around it.
3. The calls in other places that no update has followed, because gradients are passed between functions and threads. In
   eager mode these always count as well. If they disagree, the update raises.
4. Without any call the gradients are unscaled, as TensorFlow 2 documents `apply_gradients`, and a warning says what is
   missing.

The gradients of one `scale_loss` go to one update: the next one raises, because its gradients may be of either kind.
Unscaled gradients may go to several updates. A traced function keeps its answer. If the answer came from another place,
a later call that says the opposite raises, unless it is made in a traced function that updates as well.

`apply` takes scaled gradients. It raises for gradients that are known to be unscaled by rules 1 to 3, and warns if they
may be. Sonnet's `apply` also takes unscaled ones, by the rules of `apply_gradients`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import notes

# Method -> whether the gradients of the next `apply_gradients` are scaled.
_APPLY_GRADIENTS = {"scale_loss": True, "get_scaled_loss": False, "get_unscaled_gradients": False}
# The same for an `apply` that also takes unscaled gradients. After `get_scaled_loss` either kind may follow.
_APPLY = {"scale_loss": True, "get_unscaled_gradients": False}
# Method -> whether the gradients in the same place are scaled after the call.
_LEAVES_SCALED = {"scale_loss": True, "get_scaled_loss": True, "get_unscaled_gradients": False}

_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


class _EagerMode:
    """The place of all calls in eager mode."""


_EAGER = _EagerMode()


@dataclasses.dataclass(eq=False)
class _Call:
    """A thread's last call of a method in one function or in eager mode.

    `followed_in` has the threads in which an update followed the call in the same function, or in eager mode.
    """

    method: str
    followed_in: set[threading.Thread] = dataclasses.field(default_factory=set)


class Contract:
    """The calls of one optimizer's methods, and what they imply for the gradients of the next update.

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
        # Place -> thread -> its last call there. A place is the graph of a function, or eager mode.
        self._calls: weakref.WeakKeyDictionary[Any, dict[threading.Thread, _Call]] = weakref.WeakKeyDictionary()
        self._unused_in_ended_threads: set[str] = set()
        self._answers_kept: set[bool] = set()
        self._whole_steps = threading.local()
        self._factors: dict[int, tf.Tensor] = {}  # by thread
        self._called: set[str] = set()
        self._warned: set[str] = set()

    def called(self, method: str) -> None:
        """Record a call of `scale_loss`, `get_scaled_loss` or `get_unscaled_gradients`.

        Args:
            method: the method's name.

        Raises:
            RuntimeError: in eager mode, if a function was traced under the opposite assumption.
        """
        with self._lock:
            places = _places()
            opposite = method != "get_scaled_loss" and (not _APPLY_GRADIENTS[method]) in self._answers_kept
            contradicts = opposite and not self._in_whole_step()
            if contradicts and places == [_EAGER]:
                raise _contradiction(method)
            self._called.add(method)
            self._forget_ended_threads()
            for place in places:
                call = self._calls.setdefault(place, {})[threading.current_thread()] = _Call(method)
                if contradicts:
                    _require_an_update(call, place)

    def scaled_by_hand(self) -> None:
        """Record that gradients are scaled and unscaled without our methods: they are unscaled in the next update.

        The exception is a loss that is scaled, too: Keras 3's `fit` passes the result of a `scale_inside` function to
        `scale_loss`.
        """
        with self._lock:
            if not any(call.method == "scale_loss" and not call.followed_in for call in self._calls_in(_places())):
                self.called("get_scaled_loss")
                self.called("get_unscaled_gradients")

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Declare that an update of marked gradients follows inside, so that no call contradicts another."""
        self._whole_steps.depth = getattr(self._whole_steps, "depth", 0) + 1
        try:
            yield
        finally:
            self._whole_steps.depth -= 1

    def _in_whole_step(self) -> bool:
        return getattr(self._whole_steps, "depth", 0) > 0

    # The answers. -----------------------------------------------------------------------------------------------

    def takes_scaled(self, gradients: Iterable[Any]) -> bool:
        """Tell whether the gradients passed to `apply_gradients` are scaled; called once for each update.

        Args:
            gradients: tensors, IndexedSlices or None.

        Raises:
            RuntimeError: the calls so far contradict each other.
        """
        scaled = self._takes_scaled(gradients, _APPLY_GRADIENTS, otherwise=False)
        self._warn_of_forgotten_calls()
        return scaled

    def apply_takes_scaled(self, gradients: Iterable[Any], may_be_unscaled: bool) -> bool:
        """Tell whether the gradients passed to `apply` are scaled; called once for each update.

        Args:
            gradients: tensors, IndexedSlices or None.
            may_be_unscaled: whether the family's `apply` also takes what `get_unscaled_gradients` returned.

        Raises:
            RuntimeError: the gradients were unscaled, or the calls so far contradict each other.
        """
        if may_be_unscaled:
            scaled = self._takes_scaled(gradients, _APPLY, otherwise=True)
        else:
            scaled = True
            self._require_not_unscaled(gradients)
        if scaled and not self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients()."
            )
        return scaled

    def _takes_scaled(self, gradients: Iterable[Any], scaled_after: dict[str, bool], otherwise: bool) -> bool:
        with self._lock:
            places = _places()
            some_unscaled, all_unscaled = notes.any_and_all_unscaled(gradients)
            answers, in_same_function = ({False}, True) if all_unscaled else self._answers(places, scaled_after)
            if len(answers) > 1 or (True in answers and some_unscaled):
                raise RuntimeError(
                    "Cannot tell whether these gradients are scaled: both scale_loss() and "
                    "get_unscaled_gradients() (or get_scaled_loss()) were called for this optimizer in other "
                    "functions, threads or steps, or more than one update follows one scale_loss(). "
                    f"{_TWO_WAYS_OUT}"
                )
            answer = answers.pop() if answers else otherwise
            if not in_same_function and places != [_EAGER]:
                self._answers_kept.add(answer)
            self._use_calls(places)
            return answer

    def _answers(self, places: list[Any], scaled_after: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return the answers of the calls so far, and whether they were made in the function being traced."""

        def is_used_up(call: _Call) -> bool:
            # Unscaled gradients may go to several updates. After an update of scaled ones, the next may be of either
            # kind.
            return scaled_after[call.method] and threading.current_thread() in call.followed_in

        calls, place = self._calls_before(places, lambda call: call.method in scaled_after and not is_used_up(call))
        answers = {scaled_after[call.method] for call in calls}
        here = [call for call in self._calls_in(places) if call.method in scaled_after]
        if place is None and any(map(is_used_up, here)):
            # These may be more gradients of the same scale_loss, or gradients of an unscaled loss.
            answers |= {True} if answers else {True, False}
        return answers, place is places[0]

    def _require_not_unscaled(self, gradients: Iterable[Any]) -> None:
        """Raise if `apply` got unscaled gradients, which it would divide again; warn, once, if they may be unscaled.

        Gradients that `get_unscaled_gradients` returned or received are known. For others the calls decide: they are
        unscaled if it was the last call in every place that they may come from, and may be if it was the last call in
        one.
        """
        gradients = [gradient for gradient in gradients if gradient is not None]
        unscaled, _ = notes.any_and_all_unscaled(gradients)
        may_be_unscaled = False
        thread, places = threading.current_thread(), _places()
        with self._lock:
            if not unscaled and not all(notes.is_scaled(gradient) for gradient in gradients):
                calls, _ = self._calls_before(places, lambda call: thread not in call.followed_in)
                unscaled = bool(calls) and not any(_LEAVES_SCALED[call.method] for call in calls)
                may_be_unscaled = not all(_LEAVES_SCALED[call.method] for call in calls or self._calls_in(places))
            if unscaled:
                raise RuntimeError(
                    "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function of "
                    f"scale_inside(), has done so with these. {_TWO_WAYS_OUT}"
                )
            self._use_calls(places)
        if may_be_unscaled and self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they may be divided twice. Give unscaled gradients to apply_gradients()."
            )

    # The calls. -------------------------------------------------------------------------------------------------

    def _calls_before(self, places: list[Any], counts: Callable[[_Call], bool]) -> tuple[list[_Call], Any]:
        """Return the calls that decide about an update, and their function; None for calls in several places."""
        for place in places:
            calls = [call for call in self._calls_in([place]) if counts(call)]
            if calls and place is not _EAGER:
                return calls, place
        here = self._calls_in(places)
        everywhere = [call for calls in self._calls.values() for call in calls.values()]
        everywhere += map(_Call, self._unused_in_ended_threads)
        unused = [call for call in everywhere if not call.followed_in and call not in here]
        return [call for call in (*here, *unused) if counts(call)], None

    def _calls_in(self, places: list[Any]) -> list[_Call]:
        """Return this thread's calls, or else, in a function, all threads' calls: replicas are such threads."""
        found: list[_Call] = []
        for place in places:
            calls = self._calls.get(place, {})
            own = calls.get(threading.current_thread())
            if own is not None:
                found.append(own)
            elif places != [_EAGER]:
                found += calls.values()
        return found

    def _use_calls(self, places: list[Any]) -> None:
        for call in self._calls_in(places):
            call.followed_in.add(threading.current_thread())

    def _forget_ended_threads(self) -> None:
        calls = self._calls.get(_EAGER, {})
        for thread in [thread for thread in calls if not thread.is_alive()]:
            call = calls.pop(thread)
            if not call.followed_in:
                self._unused_in_ended_threads.add(call.method)

    # The factor of the loss, where another worker may move the scale in the middle of a step. -------------------

    def remember_factor(self, factor: tf.Tensor) -> None:
        """Remember the factor that the loss was multiplied by."""
        self._factors[threading.get_ident()] = factor

    def remembered_factor(self) -> tf.Tensor | None:
        """Return the factor of the loss if this thread scaled it in the function being traced, or in eager mode."""
        factor = self._factors.get(threading.get_ident())
        return factor if factor is not None and getattr(factor, "graph", None) is _graph() else None

    # Warnings. --------------------------------------------------------------------------------------------------

    def _warn_of_forgotten_calls(self) -> None:
        """Warn once if the loss was never scaled, or the gradients were never unscaled."""
        needed = ("get_scaled_loss", "get_unscaled_gradients")
        if "scale_loss" not in self._called and not self._called.issuperset(needed):
            forgotten = " and ".join(f"LossScaleOptimizer.{name}()" for name in needed if name not in self._called)
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
    if notes.any_is_unscaled_by(gradients, loss_scale):
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


def _contradiction(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}() was called, but a function that was traced before calls apply_gradients() for gradients that are "
        f"{'un' * _APPLY_GRADIENTS[method]}scaled. {_TWO_WAYS_OUT}"
    )


def _require_an_update(call: _Call, function: Any) -> None:
    """Make each later call of the function being traced raise, unless an update follows in that function."""

    def check() -> tf.Tensor:
        if not call.followed_in:
            raise _contradiction(call.method)
        return tf.constant(0)

    if not hasattr(function, "capture_call_time_value"):
        raise _contradiction(call.method)
    # Private: TensorFlow evaluates the closure at each call of the function.
    function.capture_call_time_value(check, tf.TensorSpec([], tf.int32))


def _places() -> list[Any]:
    """Return the functions being traced, innermost first, and a legacy graph around them; else eager mode."""
    if tf.executing_eagerly():
        return [_EAGER]
    found: list[Any] = []
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, tf.__internal__.FuncGraph):
            if type(graph) is tf.__internal__.FuncGraph:  # subclasses are branches and loops of a function
                found.append(graph)
        elif not tf.compat.v1.executing_eagerly_outside_functions():
            found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found or [_EAGER]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
