"""Decides whether the gradients passed to an update are scaled, and raises an error if this is ambiguous.

The methods that scale losses and unscale gradients mark the tensors that they take and return (`marks.py`), and record
that they were called in a place, which is a function that is being traced, or eager mode. If all gradients of an update
are marked, their marks decide. If some are marked, the marks and the calls must agree. If none is marked, the first of
these rules decides that applies:

1. The most recent call in the function being traced, or in the functions around it. After `scale_loss` the gradients
   are scaled, for one update; after `get_scaled_loss` and `get_unscaled_gradients` they are unscaled, for any number.
2. Calls in other functions and threads that no update has followed there, because gradients can be passed between
   functions and threads. In eager mode, this thread's most recent call counts as well. If these calls disagree, the
   update raises an error. A function that was traced on such an answer checks at each call that it still holds.
3. No call: the gradients are unscaled, as the TensorFlow 2 documentation of `apply_gradients` says, and a warning names
   the methods that were not called. If `scale_loss` was called, but an update has used up the call, the update raises.

`apply` takes scaled gradients. It raises an error if marks or calls say that they are unscaled, and warns if they may
be. For a Sonnet optimizer, `apply` accepts both kinds, and the rules decide; without any call they are scaled.

Gradients are divided by the factor that multiplied their loss, if the loss was scaled in the function being traced, or
in eager mode and no other function has scaled a loss since. Otherwise they are divided by the current factor.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.loss_scale import FixedLossScale
from tf_lossscale.wrapper.marks import Mark, have_been_unscaled, is_scaled, marks_of
from tf_lossscale.wrapper.shared import SharedLossScale

_FACTORS = "_factors_of_tf_lossscale"
# Maps each method to whether a following `apply_gradients`, or an `apply` that takes both kinds, gets scaled gradients.
_APPLY_GRADIENTS = {"scale_loss": True, "get_scaled_loss": False, "get_unscaled_gradients": False, "inside": False}
_APPLY = {"scale_loss": True, "get_unscaled_gradients": False, "inside": False}
_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


class _Eager:
    """The place of calls in eager mode. A place is where a call was made: eager mode, or the graph of a function."""


_EAGER = _Eager()


@dataclasses.dataclass(eq=False)
class _Call:
    """A thread's most recent call in a place."""

    method: str
    #: A function that returns the factor of the loss that the thread scaled last in this place, or None.
    factor: Callable[[], Any] = lambda: None
    #: The threads that have updated variables in the same place after the call.
    followed_in: set[threading.Thread] = dataclasses.field(default_factory=set)

    @property
    def unscales(self) -> bool:
        return self.method in ("get_unscaled_gradients", "inside")


class Decision(NamedTuple):
    """Whether the gradients passed to an update are scaled, and where the update takes place."""

    scaled: bool
    #: The functions being traced, innermost first. In eager mode, the list contains only `_EAGER`.
    places: list[Any]
    #: If the answer depends on calls outside of the function being traced: maps methods to whether scaled gradients
    #: follow them. Otherwise None.
    from_elsewhere: dict[str, bool] | None = None


class Contract:
    """Records which methods of an optimizer were called, and decides whether the next update gets scaled gradients."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Maps each place, by a weak reference, to the most recent call of each thread there.
        self._calls: dict[weakref.ref[Any], dict[threading.Thread, _Call]] = {}
        # Methods that were called in deleted functions and finished threads, if no update followed there.
        self._in_the_past: set[str] = set()
        self._ever: set[str] = set()
        self._warned: set[str] = set()

    # The calls. -------------------------------------------------------------------------------------------------

    def called(self, method: str, factor: tf.Tensor | None = None) -> None:
        """Record a call to a method, which multiplied a loss by `factor`.

        The method "inside" stands for `scale_inside`.
        """
        with self._lock:
            self._ever.add(method)
            self._forget_the_past()
            thread = threading.current_thread()
            for place in _places():
                calls = self._calls.setdefault(weakref.ref(place), {})
                # Unscaling gradients does not change the factor of their loss.
                before = calls[thread].factor if thread in calls else _Call.factor
                calls[thread] = _Call(method, before if factor is None else _held(factor, place, self))
                _latest.set(place, self, method)

    def record(self, decision: Decision) -> None:
        """Record an update. A step that raised an error is not recorded, so it can be repeated."""
        with self._lock:
            for call in self._calls_in(decision.places):
                call.followed_in.add(threading.current_thread())
        if decision.places == [_EAGER]:
            _latest.updated(self)
        elif decision.from_elsewhere:
            _check_at_each_call(weakref.ref(self), decision)

    def factor(self, current: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return the factor that multiplied the loss of the gradients. If it is unknown, return `current()`."""
        with self._lock:
            place, thread = _places()[0], threading.current_thread()
            call = self._calls.get(weakref.ref(place), {}).get(thread)
            known = None if call is None else call.factor()
            if call is None or known is None or not _is_visible(known):
                return current()
            # In eager mode, the gradients may come from a function that has scaled its own loss.
            alone = not any(each.factor() is not None for each in self._unused_calls([_EAGER]))
            return known if place is not _EAGER or replicas.workers_step_alone() or alone else current()

    def require_scaled(self, gradients: Iterable[Any], loss_scale: Any) -> None:
        """Raise an error if a gradient was already divided by this loss scale."""
        present = [gradient for gradient in gradients if gradient is not None]
        marks, place = [is_scaled(gradient, loss_scale) for gradient in present], _places()[0]
        with self._lock:
            call = self._calls.get(weakref.ref(place), {}).get(threading.current_thread())
        factor = None
        if place is not _EAGER and call is not None and call.method == "get_unscaled_gradients":
            factor = call.factor()
        if False in marks or have_been_unscaled(present, loss_scale, factor):
            raise RuntimeError(
                "get_unscaled_gradients() got a gradient that is already unscaled, because an earlier call returned "
                "it, or it was computed from the result of an earlier call. Unscale each gradient only once. "
                "minimize(), compute_gradients() and get_gradients() call get_unscaled_gradients() themselves."
            )
        if call is not None and call.method == "inside" and not call.followed_in and not (marks and all(marks)):
            raise RuntimeError(
                "get_unscaled_gradients() got gradients of a loss function from scale_inside(), which has already "
                "unscaled them. Pass them to apply_gradients() as they are."
            )

    def unscaled_inside(self) -> None:
        """Record that a loss function wrapped by `scale_inside` has unscaled its gradients.

        If a loss was scaled first, nothing is recorded: in that case Keras's `fit` has also scaled the loss that the
        wrapped function returned, so the gradients are still multiplied by the factor that `fit` applied.
        """
        with self._lock:
            calls = self._calls_in(_places())
        if not any(call.method in ("scale_loss", "get_scaled_loss") and not call.followed_in for call in calls):
            self._ever |= {"get_scaled_loss", "get_unscaled_gradients"}
            self.called("inside")

    # The decisions. ---------------------------------------------------------------------------------------------

    def decide(self, gradients: Iterable[Any], loss_scale: Any) -> Decision:
        """Decide whether the gradients passed to `apply_gradients` are scaled.

        Raise an error if that is unclear, or if a gradient is scaled by another loss scale.
        """
        marks = marks_of(gradients, loss_scale)
        decision = self._decide(marks, _APPLY_GRADIENTS, otherwise=False)
        # Another optimizer with the same loss scale may have scaled the loss.
        shared = isinstance(loss_scale, SharedLossScale)
        needed = ("get_unscaled_gradients",) if shared else ("get_scaled_loss", "get_unscaled_gradients")
        forgotten = [f"LossScaleOptimizer.{name}()" for name in needed if name not in self._ever]
        if forgotten and "scale_loss" not in self._ever and not _needs_no_calls(marks, loss_scale):
            self._warn(
                f"You forgot to call {' and '.join(forgotten)} before calling LossScaleOptimizer.apply_gradients(). "
                "Small float16 gradients may become zero, or the gradients of every step may have the wrong scale. The "
                "loop should be:\n"
                "    with tf.GradientTape() as tape:\n"
                "        loss = loss_fn()\n"
                "        scaled_loss = opt.get_scaled_loss(loss)\n"
                "    scaled_grads = tape.gradient(scaled_loss, variables)\n"
                "    grads = opt.get_unscaled_gradients(scaled_grads)\n"
                "    opt.apply_gradients(zip(grads, variables))\n"
                "If this loop is part of a library, pass opt.scale_inside(loss_fn) to the library as the loss function."
            )
        return decision

    def decide_for_apply(self, gradients: Iterable[Any], loss_scale: Any, may_be_unscaled: bool) -> Decision:
        """Decide whether the gradients passed to `apply` are scaled.

        Unscaled ones raise an error unless `may_be_unscaled`.
        """
        marks = marks_of(gradients, loss_scale)
        if may_be_unscaled:
            decision = self._decide(marks, _APPLY, otherwise=True)
        else:
            decision = Decision(True, _places())
            self._require_not_unscaled({mark.scaled for mark in marks}, decision.places)
        if decision.scaled and not self._ever & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients()."
            )
        return decision

    def _decide(self, marks: set[Mark], scaled_after: dict[str, bool], otherwise: bool) -> Decision:
        places, scaled = _places(), {mark.scaled for mark in marks}
        answers, here = {each for each in scaled if each is not None}, True
        if None in scaled or not scaled:
            with self._lock:
                by_calls, here = self._answers(places, scaled_after)
            answers |= by_calls
        if scaled >= {True, False}:
            raise RuntimeError(
                "Some of these gradients are results of get_unscaled_gradients(), and others were passed to it. Pass "
                "only its results to apply_gradients()."
            )
        if len(answers) > 1:
            # A trace that failed between scaling and updating must not make later updates fail as well.
            self._in_the_past.clear()
            raise RuntimeError(
                "Cannot tell whether these gradients are scaled. Either more than one update follows a single call to "
                "this optimizer's scale_loss(), or scale_loss() was called in one function, thread or step, and "
                f"get_scaled_loss() or get_unscaled_gradients() in another. {_TWO_WAYS_OUT}"
            )
        if not answers and not self._ever and _latest.is_of_another(places[0], self):
            raise RuntimeError(
                "scale_loss() of another LossScaleOptimizer scaled a loss here, but no method of this optimizer was "
                "called, so it cannot tell by what its gradients are multiplied. Call the other optimizer's "
                "get_unscaled_gradients() on the gradients of that loss, and pass the results to apply_gradients()."
            )
        answer = answers.pop() if answers else otherwise
        return Decision(answer, places, None if here or places == [_EAGER] else scaled_after)

    def _answers(self, places: list[Any], scaled_after: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return what earlier calls imply, and whether they were made in the innermost function being traced.

        The first value is a set that contains True if a call implies scaled gradients, and False if a call implies
        unscaled gradients.
        """
        thread = threading.current_thread()

        def is_used_up(call: _Call) -> bool:
            # A call to `scale_loss` implies scaled gradients for only one update.
            return scaled_after[call.method] and thread in call.followed_in

        own = [call for call in self._calls_in(places) if call.method in scaled_after]
        for place in places:
            calls = [call for call in self._calls_in([place]) if call in own and not is_used_up(call)]
            if calls and place is not _EAGER:
                return {scaled_after[call.method] for call in calls}, place is places[0]
        eager = [call for call in own if places == [_EAGER] and not is_used_up(call)]
        unused = [call for call in self._unused_calls(places) if call.method in scaled_after]
        answers = {scaled_after[call.method] for call in (*eager, *unused)}
        if any(map(is_used_up, own)):
            # After `loss = scale_loss(loss)`, a second update may get gradients of the same loss once more, or of a
            # loss that was not scaled. Without any other call, nothing tells which.
            answers |= {True} if answers else {True, False}
        return answers, False

    def _require_not_unscaled(self, marks: set[bool | None], places: list[Any]) -> None:
        """Raise an error if `apply` got gradients that are already unscaled. Warn once if they may be unscaled."""
        unscaled, may_be_unscaled = False in marks, False
        if not unscaled and (None in marks or not marks):
            thread = threading.current_thread()
            with self._lock:
                own = [call for call in self._calls_in(places) if thread not in call.followed_in]
                innermost = [] if places == [_EAGER] else own[:1]
                calls = innermost or [*own, *self._unused_calls(places)]
                unscaled = bool(calls) and all(call.unscales for call in calls)
                may_be_unscaled = any(call.unscales for call in calls or self._calls_in(places))
        if unscaled:
            raise RuntimeError(
                "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function from "
                f"scale_inside(), has already divided these gradients. {_TWO_WAYS_OUT}"
            )
        if may_be_unscaled and self._ever & {"scale_loss", "get_scaled_loss"}:
            self._warn(
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they may be divided twice. Give unscaled gradients to apply_gradients()."
            )

    def contradicts(self, decision: Decision) -> bool:
        """Return whether calls that no update has followed contradict the decision for a traced function."""
        with self._lock:
            methods = {call.method for call in self._unused_calls([])}
        answers = {scaled for method, scaled in (decision.from_elsewhere or {}).items() if method in methods}
        return answers == {not decision.scaled}

    # Looking up calls. ------------------------------------------------------------------------------------------

    def _calls_in(self, places: list[Any]) -> list[_Call]:
        """Return this thread's most recent call in each of the `places`, innermost first.

        If this thread made no call in a traced function, return the calls that other threads made in it, because each
        replica is traced in its own thread.
        """
        found: list[_Call] = []
        for place in places:
            calls = self._calls.get(weakref.ref(place), {})
            if threading.current_thread() in calls:
                found.append(calls[threading.current_thread()])
            elif place is not _EAGER:
                found += calls.values()
        return found

    def _unused_calls(self, places: list[Any]) -> list[_Call]:
        """Return the calls outside of the `places` that no update has followed there."""
        own = self._calls_in(places)
        calls = [call for each in self._calls.values() for call in each.values()]
        return [call for call in (*calls, *map(_Call, self._in_the_past)) if not call.followed_in and call not in own]

    def _forget_the_past(self) -> None:
        """Forget deleted functions and finished threads. If no update followed a call, keep the name of its method."""
        in_eager_mode = self._calls.get(weakref.ref(_EAGER), {})
        past = [in_eager_mode.pop(thread) for thread in [*in_eager_mode] if not thread.is_alive()]
        for place in [place for place in self._calls if place() is None]:
            past += self._calls.pop(place).values()
        self._in_the_past.update(call.method for call in past if not call.followed_in)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning("%s", message)


class _Latest(threading.local):
    """The optimizer that was called last in each place, of all optimizers."""

    def __init__(self) -> None:
        self._in_functions: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
        self._in_eager_mode: tuple[Any, str] | None = None
        self._updates = 0

    def set(self, place: Any, contract: Contract, method: str) -> None:
        if place is _EAGER:
            self._in_eager_mode, self._updates = (weakref.ref(contract), method), 0
        else:
            self._in_functions[place] = weakref.ref(contract), method

    def updated(self, contract: Contract) -> None:
        # In eager mode, a loss that was scaled for one optimizer concerns no other one after the next update of another
        # optimizer. The first update of its own optimizer may be followed by another optimizer's update with the same
        # gradients.
        self._updates += 1
        if self._updates > 1 or self._in_eager_mode is None or self._in_eager_mode[0]() is not contract:
            self._in_eager_mode = None

    def is_of_another(self, place: Any, contract: Contract) -> bool:
        latest = self._in_eager_mode if place is _EAGER else self._in_functions.get(place)
        return latest is not None and latest[1] == "scale_loss" and latest[0]() not in (None, contract)


_latest = _Latest()


def _needs_no_calls(marks: set[Mark], loss_scale: Any) -> bool:
    """Return whether another loss scale has unscaled the gradients, or the optimizer only skips steps."""
    is_one = isinstance(loss_scale, FixedLossScale) and loss_scale.may_skip and loss_scale.initial_scale == 1
    return is_one or marks == {Mark(False, False)}


def _check_at_each_call(contract: weakref.ref[Contract], decision: Decision) -> None:
    """Make each later call of a traced function raise an error if calls elsewhere contradict its decision."""

    def check() -> tf.Tensor:
        living = contract()
        if living is not None and living.contradicts(decision):
            raise RuntimeError(
                f"A function that has already been traced passes {'un' * (not decision.scaled)}scaled gradients to "
                f"apply_gradients(), but the calls since then were those for {'un' * decision.scaled}scaled gradients. "
                f"{_TWO_WAYS_OUT}"
            )
        return tf.constant(0)

    if tf.compat.v1.executing_eagerly_outside_functions():
        for function in decision.places:
            # TensorFlow has no public method that evaluates `check` each time the traced function is called.
            function.capture_call_time_value(check, tf.TensorSpec([], tf.int32))


def _held(factor: Any, place: Any, contract: Contract) -> Callable[[], Any]:
    """Return a function that returns the factor. A tensor of a graph is kept by the graph, not by the function."""
    if place is _EAGER:
        return lambda: factor
    if not hasattr(place, _FACTORS):
        setattr(place, _FACTORS, {})
    getattr(place, _FACTORS)[id(contract), threading.current_thread()] = factor
    return weakref.ref(factor)


def _is_visible(factor: Any) -> bool:
    """Return whether a tensor can be used here: it is eager, or of the graph being built or one around it."""
    of_factor = getattr(factor, "graph", None)  # None for eager tensors
    if of_factor is None:
        return True
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph is not of_factor:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _places() -> list[Any]:
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
