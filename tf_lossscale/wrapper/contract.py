"""Decides whether the gradients passed to an update are scaled, and raises an error if this is ambiguous.

An optimizer records each call to `scale_loss`, `get_scaled_loss` and `get_unscaled_gradients`. For `apply_gradients`,
the first of these rules that applies decides:

1. Marks. Gradients that `get_unscaled_gradients` returned are marked as unscaled, and the gradients that were passed to
   it are marked as scaled. The mark as scaled decides only if `scale_loss` was called before `get_unscaled_gradients`
   in the same step. The results of arithmetic on marked gradients have no mark.
2. In a function being traced: the most recent call that was recorded in this function. If there is none, the functions
   that enclose it are searched. After `scale_loss` the gradients are scaled; after `get_scaled_loss` or
   `get_unscaled_gradients` they are unscaled.
3. Calls in other functions and threads, because gradients can be passed between functions and threads. A call counts
   only if no update has followed it yet. For an update in eager mode, this thread's most recent call in eager mode
   counts as well. If the calls disagree, the update raises an error.
4. If no call was recorded, the gradients are unscaled, as the TensorFlow 2 documentation of `apply_gradients` says. A
   warning names the methods that were not called.

A call to `scale_loss` allows only one update. A second update raises an error, because its gradients may be scaled or
unscaled. Unscaled gradients may be passed to several updates. A traced function keeps the decision made during tracing.
If that decision came from a call outside the function, a later call that implies the opposite raises an error, unless
the later call is in a traced function that contains its own update.

`apply` takes scaled gradients. It raises an error if rules 1 to 3 imply that the gradients are unscaled, and warns if
they may be unscaled. For a Sonnet optimizer, `apply` accepts both scaled and unscaled gradients. Rules 1 to 3 then
decide, except that a call to `get_scaled_loss` implies neither. If no rule decides, the gradients are scaled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_lossscale.core import notes

# Maps the most recently called method to whether the next `apply_gradients` gets scaled gradients.
_APPLY_GRADIENTS = {"scale_loss": True, "get_scaled_loss": False, "get_unscaled_gradients": False}
# Maps the most recently called method to whether the next `apply` gets scaled gradients. Used for optimizers whose
# `apply` accepts both scaled and unscaled gradients. `get_scaled_loss` has no entry, because an `apply` after it may
# get either kind of gradients.
_APPLY = {"scale_loss": True, "get_unscaled_gradients": False}

_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


class _EagerMode:
    """The key for calls made in eager mode. The key for calls made in a traced function is the function's graph."""


_EAGER = _EagerMode()


@dataclasses.dataclass(eq=False)
class _Call:
    """A thread's most recent call to a method of the optimizer in one traced function, or in eager mode.

    `followed_in` contains the threads that have applied gradients in the same function after this call.
    `after_scale_loss` is True if `scale_loss` was called before, and no update was made in between.
    """

    method: str
    after_scale_loss: bool = False
    followed_in: set[threading.Thread] = dataclasses.field(default_factory=set)

    @property
    def leaves_scaled(self) -> bool:
        """Whether gradients of the result of `scale_loss` may still be passed to an update."""
        return (self.method == "scale_loss" or self.after_scale_loss) and not self.followed_in

    @property
    def unscales(self) -> bool:
        return self.method == "get_unscaled_gradients"


class _Thread(threading.local):
    #: The number of nested calls to methods that take a whole step, such as `minimize`, that the thread is executing.
    whole_steps = 0


class Decision(NamedTuple):
    """Whether the gradients passed to an update are scaled, and where the update takes place."""

    scaled: bool
    #: The functions being traced, innermost first. In eager mode, the list contains only `_EAGER`.
    places: list[Any]
    #: True if the update is in a function being traced, and `scaled` depends on calls made outside this function.
    depends_on_other_functions: bool = False


class Contract:
    """Records which methods of an optimizer were called, and decides whether the next update gets scaled gradients.

    >>> contract = Contract()
    >>> contract.called("scale_loss")
    >>> decision = contract.decide([tf.constant(8.0)])
    >>> decision.scaled
    True
    >>> contract.record(decision)
    >>> contract.called("get_unscaled_gradients")
    >>> contract.decide([tf.constant(2.0)]).scaled
    False
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Each thread's most recent call to a method such as `scale_loss`, in each traced function and in eager mode.
        # The keys are weak references to the graphs of the traced functions, and to `_EAGER` for eager mode.
        self._calls: dict[weakref.ref[Any], dict[threading.Thread, _Call]] = {}
        # The names of methods that were called in deleted functions or finished threads, if no update followed the
        # call. Gradients from these functions and threads may still exist.
        self._unused_in_the_past: set[str] = set()
        self._answers_kept: set[bool] = set()
        self._thread = _Thread()
        self._called: set[str] = set()
        self._warned: set[str] = set()

    def called(self, method: str) -> None:
        """Record a call to `scale_loss`, `get_scaled_loss` or `get_unscaled_gradients`.

        Args:
            method: the method's name.

        Raises:
            RuntimeError: the call is made in eager mode, and it contradicts a traced function: either the call implies
                scaled gradients and the function assumes unscaled gradients, or vice versa.
        """
        with self._lock:
            places = _enclosing_functions()
            opposite = not _APPLY_GRADIENTS[method]
            may_contradict = method != "get_scaled_loss" and not self._thread.whole_steps
            contradicts = may_contradict and opposite in self._answers_kept
            if contradicts and places == [_EAGER]:
                raise _contradiction(method)
            self._called.add(method)
            self._forget_the_past()
            for place in places:
                calls, thread = self._calls.setdefault(weakref.ref(place), {}), threading.current_thread()
                earlier = calls.get(thread)
                call = calls[thread] = _Call(method, earlier is not None and earlier.leaves_scaled)
                if contradicts:
                    _require_an_update(call, place)

    def unscaled_inside(self) -> None:
        """Record that a loss function wrapped by `scale_inside` has unscaled its gradients.

        The next update then gets unscaled gradients. If `scale_loss` was called first, nothing is recorded: in that
        case Keras 3's `fit` has also scaled the loss that the wrapped function returned, so the gradients are still
        multiplied by the factor that `fit` applied.
        """
        with self._lock:
            if not any(
                call.method == "scale_loss" and not call.followed_in for call in self._calls_in(_enclosing_functions())
            ):
                self.called("get_scaled_loss")
                self.called("get_unscaled_gradients")

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Return a context manager for a complete step. Calls inside it are not checked against earlier decisions."""
        self._thread.whole_steps += 1
        try:
            yield
        finally:
            self._thread.whole_steps -= 1

    # The decisions. ---------------------------------------------------------------------------------------------

    def decide(self, gradients: Iterable[Any]) -> Decision:
        """Decide whether the gradients passed to `apply_gradients` are scaled.

        Args:
            gradients: tensors, IndexedSlices or None.

        Raises:
            RuntimeError: the calls so far do not determine whether the gradients are scaled.
        """
        decision = self._decide(gradients, _APPLY_GRADIENTS, otherwise=False)
        self._warn_of_forgotten_calls()
        return decision

    def decide_for_apply(self, gradients: Iterable[Any], may_be_unscaled: bool) -> Decision:
        """Decide whether the gradients passed to `apply` are scaled.

        Args:
            gradients: tensors, IndexedSlices or None.
            may_be_unscaled: whether this optimizer family's `apply` also accepts unscaled gradients.

        Raises:
            RuntimeError: `may_be_unscaled` is False and the gradients are unscaled, or it is True and the calls so far
                do not determine whether the gradients are scaled.
        """
        if may_be_unscaled:
            decision = self._decide(gradients, _APPLY, otherwise=True)
        else:
            decision = Decision(True, _enclosing_functions())
            self._require_not_unscaled(gradients, decision.places)
        if decision.scaled and not self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients()."
            )
        return decision

    def record(self, decision: Decision) -> None:
        """Record an update. A step that raised an error is not recorded, so it can be repeated.

        Args:
            decision: the decision for the update.
        """
        with self._lock:
            if decision.depends_on_other_functions:
                self._answers_kept.add(decision.scaled)
            for call in self._calls_in(decision.places):
                call.followed_in.add(threading.current_thread())

    def _decide(self, gradients: Iterable[Any], scaled_after: dict[str, bool], otherwise: bool) -> Decision:
        gradients, places = list(gradients), _enclosing_functions()
        with self._lock:
            some_unscaled, all_unscaled = notes.any_and_all_unscaled(gradients)
            if all_unscaled:
                answers, in_same_function = {False}, True
            elif self._are_of_scale_loss(gradients, places):
                answers, in_same_function = {True}, True
            else:
                answers, in_same_function = self._answers(places, scaled_after)
        if len(answers) > 1 or (True in answers and some_unscaled):
            raise RuntimeError(
                "Cannot tell whether these gradients are scaled. Either more than one update follows a single call to "
                "this optimizer's scale_loss(), or scale_loss() was called in one function, thread or step, and "
                f"get_scaled_loss() or get_unscaled_gradients() in another. {_TWO_WAYS_OUT}"
            )
        answer = answers.pop() if answers else otherwise
        return Decision(answer, places, not in_same_function and places != [_EAGER])

    def _are_of_scale_loss(self, gradients: list[Any], places: list[Any]) -> bool:
        """Return whether gradients of the result of `scale_loss` were only read by `get_unscaled_gradients`."""
        calls = self._calls_in(places[:1])
        if not any(call.unscales and call.leaves_scaled for call in calls):
            return False
        given = [gradient for gradient in gradients if gradient is not None]
        return bool(given) and all(map(notes.is_scaled, given))

    def _answers(self, places: list[Any], scaled_after: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return what earlier method calls imply, and whether they were made in the innermost function being traced.

        The first value is a set that contains True if a call implies scaled gradients, and False if a call implies
        unscaled gradients.
        """

        def is_used_up(call: _Call) -> bool:
            # A call to `scale_loss` implies scaled gradients for only one update. Unscaled gradients may be passed to
            # several updates.
            return scaled_after[call.method] and threading.current_thread() in call.followed_in

        calls, place = self._deciding_calls(places, lambda call: call.method in scaled_after and not is_used_up(call))
        answers = {scaled_after[call.method] for call in calls}
        own_calls = [call for call in self._calls_in(places) if call.method in scaled_after]
        if place is None and any(map(is_used_up, own_calls)):
            # The second update after one call to `scale_loss` is ambiguous. Its gradients may come from the same
            # scaled loss or from an unscaled loss.
            answers |= {True} if answers else {True, False}
        return answers, place is places[0]

    def _require_not_unscaled(self, gradients: Iterable[Any], places: list[Any]) -> None:
        """Raise an error if `apply` got gradients that are already unscaled. Warn once if they may be unscaled.

        `get_unscaled_gradients` marks its input gradients as scaled and its output gradients as unscaled. For gradients
        without a mark, the most recent call in each function and thread that they may come from decides. If all of
        these calls are to `get_unscaled_gradients`, the gradients are unscaled. If only some of them are, the gradients
        may be unscaled.
        """
        gradients = [gradient for gradient in gradients if gradient is not None]
        unscaled, _ = notes.any_and_all_unscaled(gradients)
        may_be_unscaled = False
        thread = threading.current_thread()
        if not unscaled and not all(notes.is_scaled(gradient) for gradient in gradients):
            with self._lock:
                calls, _ = self._deciding_calls(places, lambda call: thread not in call.followed_in)
                unscaled = bool(calls) and all(call.unscales for call in calls)
                may_be_unscaled = any(call.unscales for call in calls or self._calls_in(places))
        if unscaled:
            raise RuntimeError(
                "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function from "
                f"scale_inside(), has already divided these gradients. {_TWO_WAYS_OUT}"
            )
        if may_be_unscaled and self._called & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they may be divided twice. Give unscaled gradients to apply_gradients()."
            )

    # The calls. -------------------------------------------------------------------------------------------------

    def _deciding_calls(self, places: list[Any], counts: Callable[[_Call], bool]) -> tuple[list[_Call], Any]:
        """Return the calls that determine whether an update gets scaled gradients, and the traced function they are in.

        The function is None if the calls were made in eager mode or outside the functions being traced.
        """
        for place in places:
            calls = [call for call in self._calls_in([place]) if counts(call)]
            if calls and place is not _EAGER:
                return calls, place
        in_this_thread = self._calls_in([_EAGER]) if places == [_EAGER] else []
        all_calls = [call for calls in self._calls.values() for call in calls.values()]
        all_calls += map(_Call, self._unused_in_the_past)
        unused = [call for call in all_calls if not call.followed_in and call not in in_this_thread]
        return [call for call in (*in_this_thread, *unused) if counts(call)], None

    def _calls_in(self, places: list[Any]) -> list[_Call]:
        """Return this thread's most recent call in each of the `places`, which are traced functions or `_EAGER`.

        If this thread made no call in a traced function, return the calls that other threads made in it, because each
        replica is traced in its own thread.
        """
        found_calls: list[_Call] = []
        for place in places:
            calls = self._calls.get(weakref.ref(place), {})
            if threading.current_thread() in calls:
                found_calls.append(calls[threading.current_thread()])
            elif place is not _EAGER:
                found_calls += calls.values()
        return found_calls

    def _forget_the_past(self) -> None:
        """Forget deleted functions and finished threads. If no update followed a call, keep the name of its method."""
        in_eager_mode = self._calls.get(weakref.ref(_EAGER), {})
        past = [in_eager_mode.pop(thread) for thread in [*in_eager_mode] if not thread.is_alive()]
        for place in [place for place in self._calls if place() is None]:
            past += self._calls.pop(place).values()
        self._unused_in_the_past.update(call.method for call in past if not call.followed_in)

    # Warnings. --------------------------------------------------------------------------------------------------

    def _warn_of_forgotten_calls(self) -> None:
        """Warn once if the loss was never scaled, or if the gradients were never unscaled."""
        needed = ("get_scaled_loss", "get_unscaled_gradients")
        if "scale_loss" not in self._called and not self._called.issuperset(needed):
            forgotten = " and ".join(f"LossScaleOptimizer.{name}()" for name in needed if name not in self._called)
            self._warn(
                f"You forgot to call {forgotten} before calling LossScaleOptimizer.apply_gradients(). Small float16 "
                "gradients may become zero, or the gradients of every step may have the wrong scale. The loop should "
                "be:\n"
                "    with tf.GradientTape() as tape:\n"
                "        loss = loss_fn()\n"
                "        scaled_loss = opt.get_scaled_loss(loss)\n"
                "    scaled_grads = tape.gradient(scaled_loss, variables)\n"
                "    grads = opt.get_unscaled_gradients(scaled_grads)\n"
                "    opt.apply_gradients(zip(grads, variables))\n"
                "If this loop is part of a library, pass opt.scale_inside(loss_fn) to the library as the loss function."
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)


def require_scaled(gradients: Iterable[Any], loss_scale: Any) -> None:
    """Raise an error if a gradient was already divided by this loss scale.

    >>> require_scaled([tf.constant(8.0), None], tf.Module())

    Args:
        gradients: tensors, IndexedSlices or None.
        loss_scale: the loss scale by which the gradients are about to be divided.

    Raises:
        RuntimeError: `get_unscaled_gradients` returned one of the gradients.
    """
    if notes.any_is_unscaled_by(gradients, loss_scale):
        raise RuntimeError(
            "get_unscaled_gradients() got a gradient that is already unscaled, because an earlier call returned it. "
            "Unscale each gradient only once. minimize(), compute_gradients() and get_gradients() call "
            "get_unscaled_gradients() themselves."
        )


def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise an error if a loss, or a part of it, was already multiplied by this loss scale.

    Args:
        loss: a nested structure of tensors, or a function.
        loss_scale: the loss scale by which the loss is about to be multiplied.

    Raises:
        RuntimeError: `get_scaled_loss` or `scale_loss` returned the loss.
    """
    if notes.loss_is_scaled_by(loss, loss_scale):
        raise RuntimeError(
            "This loss is scaled already: get_scaled_loss() or scale_loss() returned it. Scale it once. minimize(), "
            "compute_gradients(), get_gradients() and Keras's fit take a loss that is not scaled."
        )


def _contradiction(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}() was called, but a function that has already been traced passes "
        f"{'un' * _APPLY_GRADIENTS[method]}scaled gradients to apply_gradients(). {_TWO_WAYS_OUT}"
    )


def _require_an_update(call: _Call, function: Any) -> None:
    """Make every later run of a traced function raise an error, unless an update follows `call` in that function."""

    def check() -> tf.Tensor:
        if not call.followed_in:
            raise _contradiction(call.method)
        return tf.constant(0)

    if not hasattr(function, "capture_call_time_value"):
        raise _contradiction(call.method)
    # TensorFlow has no public method that evaluates `check` each time the traced function is called.
    function.capture_call_time_value(check, tf.TensorSpec([], tf.int32))


def _enclosing_functions() -> list[Any]:
    """Return the functions being traced, innermost first, then the enclosing TF1 graph if there is one.

    In eager mode the list has one element, which represents eager mode.
    """
    if tf.executing_eagerly():
        return [_EAGER]
    functions: list[Any] = []
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, tf.__internal__.FuncGraph):
            # Subclasses of FuncGraph represent branches and loops inside a function, not functions.
            if type(graph) is tf.__internal__.FuncGraph:
                functions.append(graph)
        elif not tf.compat.v1.executing_eagerly_outside_functions():
            functions.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return functions or [_EAGER]
