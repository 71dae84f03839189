"""Decides whether the gradients passed to an update are scaled, and raises an error if this is ambiguous.

Two kinds of evidence decide. *Marks* on tensors: a gradient that `get_unscaled_gradients` took is scaled, one that it
returned is unscaled. *Calls*: each place, which is eager mode or a function that is being traced, has the last call of
each optimizer in it. If all gradients of an update are marked, the marks decide. If some are marked, the marks and the
calls must agree. If none is marked, the first of these rules decides that applies:

1. The call in the innermost function being traced that has one. After `scale_loss` the gradients are scaled, for one
   update. After `get_scaled_loss` and `get_unscaled_gradients` they are unscaled, for any number of updates.
2. The calls in all other places that no update has followed there, because gradients can be passed between functions.
   In eager mode, the call in eager mode is one of them. They must agree. A function that was traced on such an answer
   cannot decide again, so a later call that contradicts it raises an error, unless an update follows in its function.
3. No call: the gradients are unscaled, as the TensorFlow 2 documentation of `apply_gradients` says, and a warning names
   the methods that were not called. If `scale_loss` was called, but an update has used up the call, the update raises.

`apply` takes scaled gradients. It raises an error if marks or calls say that they are unscaled, and warns if some calls
do. For a Sonnet optimizer, `apply` accepts both kinds, and the rules decide; without any call they are scaled.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_lossscale.core.graphs import ancestors, at_end_of_trace, do_not_convert, functions, notes
from tf_lossscale.core.loss_scale import FixedLossScale
from tf_lossscale.wrapper.shared import SharedLossScale

# Maps each method to whether scaled gradients follow it in `apply_gradients`, in `apply`, and in an `apply` that takes
# both kinds. "inside" stands for `scale_inside`.
_SCALED_IN_APPLY_GRADIENTS = {
    "scale_loss": True,
    "get_scaled_loss": False,
    "get_unscaled_gradients": False,
    "inside": False,
}
_SCALED_IN_APPLY = {**_SCALED_IN_APPLY_GRADIENTS, "get_scaled_loss": True}
_SCALED_IN_EITHER_APPLY = {method: scaled for method, scaled in _SCALED_IN_APPLY.items() if method != "get_scaled_loss"}
_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


class _Call:
    def __init__(self, method: str):
        self.method = method
        #: Whether an update of the same optimizer has followed in the same place.
        self.is_followed = False


class _Place:
    """Eager mode or a function: the last call of each optimizer there, the latest of them at the end."""

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[Contract, _Call] = weakref.WeakKeyDictionary()


_EAGER = _Place()


def _places() -> list[_Place]:
    """Return the places of the functions being traced, innermost first, or the one of eager mode."""
    if tf.executing_eagerly():
        return [_EAGER]
    return [notes(function).setdefault(_Place, _Place()) for function in functions()] or [_EAGER]


class Decision(NamedTuple):
    """Whether the gradients passed to an update are scaled, and where the update takes place."""

    scaled: bool
    places: list[_Place]
    #: Whether the answer depends on calls outside of the innermost function.
    from_elsewhere: bool = False


class Contract:
    """Records which methods of an optimizer were called, and decides whether the next update gets scaled gradients."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # The methods that were ever called, and the places of these calls.
        self._ever: set[str] = set()
        self._called_in: weakref.WeakSet[_Place] = weakref.WeakSet()
        # Gradients outlive the functions that computed them, so the last place of each method does as well.
        self._last: dict[str, _Place] = {}
        # What was decided in the functions whose updates depend on calls elsewhere.
        self._decided: weakref.WeakKeyDictionary[_Place, bool] = weakref.WeakKeyDictionary()
        # The messages that were logged. None of them is logged again.
        self._said: set[str] = set()

    # The calls. -------------------------------------------------------------------------------------------------

    def called(self, method: str) -> None:
        """Record a call to a method."""
        places, scaled = _places(), _SCALED_IN_APPLY_GRADIENTS[method]
        call = _Call(method)
        with self._lock:
            self._ever.add(method)
            self._last[method] = places[0]
            for place in places:
                place.calls.pop(self, None)
                place.calls[self] = call
                self._called_in.add(place)
            decided = {answer for place, answer in self._decided.items() if place not in places}
        # A function that scales a loss usually unscales its gradients as well, so `get_scaled_loss` decides nothing.
        if (not scaled) in decided and method != "get_scaled_loss":
            self._contradicted(call, scaled)

    def record(self, decision: Decision) -> None:
        """Record an update. A step that raised an error is not recorded, so it can be repeated."""
        with self._lock:
            for place in decision.places:
                if self in place.calls:
                    place.calls[self].is_followed = True
            if decision.from_elsewhere:
                self._decided.update(dict.fromkeys(decision.places, decision.scaled))

    def unscaled_inside(self) -> None:
        """Record that a loss function wrapped by `scale_inside` has unscaled its gradients.

        If a loss was scaled first, nothing is recorded: in that case Keras's `fit` has also scaled the loss that the
        wrapped function returned, so the gradients are still multiplied by the factor that `fit` applied.
        """
        calls = self._calls_in(_places())
        if not any(call.method in ("scale_loss", "get_scaled_loss") and not call.is_followed for call in calls):
            self._ever |= {"get_scaled_loss", "get_unscaled_gradients"}
            self.called("inside")

    def require_scaled(self, gradients: Iterable[Any], loss_scale: Any) -> None:
        """Raise an error if a gradient was already divided by this loss scale, or is scaled by another one only."""
        present = [gradient for gradient in gradients if gradient is not None]
        marks, call = [is_scaled(gradient, loss_scale) for gradient in present], _places()[0].calls.get(self)
        again = call is not None and call.method == "get_unscaled_gradients"
        if False in marks or (again and any(_was_unscaled(gradient, loss_scale) for gradient in present)):
            raise RuntimeError(
                "get_unscaled_gradients() got a gradient that is already unscaled, because an earlier call returned "
                "it, or it was computed from the result of an earlier call. Unscale each gradient only once. "
                "minimize(), compute_gradients() and get_gradients() call get_unscaled_gradients() themselves."
            )
        if call is not None and call.method == "inside" and not call.is_followed and not (marks and all(marks)):
            raise RuntimeError(
                "get_unscaled_gradients() got gradients of a loss function from scale_inside(), which has already "
                "unscaled them. Pass them to apply_gradients() as they are."
            )
        if _are_of_another(present, loss_scale):
            raise RuntimeError(
                "get_unscaled_gradients() got a gradient of a loss that another LossScaleOptimizer scaled. Call "
                "get_unscaled_gradients() of the optimizer that scaled the loss, and pass the result to "
                "apply_gradients() of the optimizer that trains the variables."
            )

    # The decisions. ---------------------------------------------------------------------------------------------

    def decide(self, gradients: Iterable[Any], loss_scale: Any) -> Decision:
        """Decide whether the gradients passed to `apply_gradients` are scaled. Raise an error if that is unclear."""
        marks = _marks_of(gradients, loss_scale)
        decision = self._decide(marks, _SCALED_IN_APPLY_GRADIENTS, otherwise=False)
        # Another optimizer with the same loss scale may have scaled the loss.
        shared = isinstance(loss_scale, SharedLossScale)
        forgotten = {"get_unscaled_gradients"} if shared else {"get_scaled_loss", "get_unscaled_gradients"}
        forgotten -= self._ever
        only_skips = isinstance(loss_scale, FixedLossScale) and loss_scale.may_skip and loss_scale.initial_scale == 1
        if forgotten and "scale_loss" not in self._ever and not only_skips and marks != {_UNSCALED_BY_ANOTHER}:
            names = " and ".join(f"LossScaleOptimizer.{name}()" for name in sorted(forgotten))
            self._say(
                logging.warning,
                f"You forgot to call {names} before calling LossScaleOptimizer.apply_gradients(). "
                "Small float16 gradients may become zero, or the gradients of every step may have the wrong scale. The "
                "loop should be:\n"
                "    with tf.GradientTape() as tape:\n"
                "        loss = loss_fn()\n"
                "        scaled_loss = opt.get_scaled_loss(loss)\n"
                "    scaled_grads = tape.gradient(scaled_loss, variables)\n"
                "    grads = opt.get_unscaled_gradients(scaled_grads)\n"
                "    opt.apply_gradients(zip(grads, variables))\n"
                "If this loop is part of a library, pass opt.scale_inside(loss_fn) to it as the loss function.",
            )
        return decision

    def decide_for_apply(self, gradients: Iterable[Any], loss_scale: Any, may_be_unscaled: bool) -> Decision:
        """Decide whether the gradients passed to `apply` are scaled. They must be, unless `may_be_unscaled`."""
        marks = _marks_of(gradients, loss_scale)
        if may_be_unscaled:
            decision = self._decide(marks, _SCALED_IN_EITHER_APPLY, otherwise=True)
        else:
            decision = Decision(True, _places())
            self._require_not_unscaled({scaled for scaled, _ in marks}, decision.places)
        if decision.scaled and not self._ever & {"scale_loss", "get_scaled_loss"}:
            self._say(
                logging.warning,
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or, for "
                "gradients that are not scaled, use apply_gradients().",
            )
        return decision

    def _decide(self, marks: set[tuple[bool | None, bool]], after: dict[str, bool], otherwise: bool) -> Decision:
        places, scaled = _places(), {scaled for scaled, _ in marks}
        if scaled >= {True, False}:
            raise RuntimeError(
                "Some of these gradients are results of get_unscaled_gradients(), and others were passed to it. Pass "
                "only its results to apply_gradients()."
            )
        answers, from_elsewhere = {answer for answer in scaled if answer is not None}, False
        if None in scaled or not scaled:
            by_calls, from_elsewhere = self._by_calls(places, after)
            answers |= by_calls
        if len(answers) > 1:
            self._last.clear()  # A trace that failed after scaling must not make later updates fail as well.
            raise RuntimeError(
                "Cannot tell whether these gradients are scaled. Either more than one update follows a single call to "
                "this optimizer's scale_loss(), or scale_loss() was called in one function or step, and "
                f"get_scaled_loss() or get_unscaled_gradients() in another. {_TWO_WAYS_OUT}"
            )
        latest = [call.method for call in places[0].calls.values()][-1:]
        if not answers and not self._ever and latest == ["scale_loss"]:
            raise RuntimeError(
                "scale_loss() of another LossScaleOptimizer scaled a loss here, but no method of this optimizer was "
                "called, so it cannot tell by what its gradients are multiplied. Call the other optimizer's "
                "get_unscaled_gradients() on the gradients of that loss, and pass the results to apply_gradients()."
            )
        return Decision(answers.pop() if answers else otherwise, places, from_elsewhere)

    def _by_calls(self, places: list[_Place], after: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return the answers that calls imply, and whether the calls were made outside of the innermost function."""
        calls = [call for call in self._calls_in(places) if call.method in after]
        # An update uses up a call after which gradients are scaled, and no other call.
        fresh = [call for call in calls if not (call.is_followed and after[call.method])]
        if fresh and places != [_EAGER]:
            return {after[fresh[0].method]}, fresh[0] is not places[0].calls.get(self)
        answers = {after[call.method] for call in [*fresh, *self._waiting(places)] if call.method in after}
        if len(fresh) < len(calls):
            # After `loss = scale_loss(loss)`, a second update may get gradients of the same loss once more, or of a
            # loss that was not scaled. Without any other call, nothing tells which.
            answers |= {True} if answers else {True, False}
        return answers, places != [_EAGER]

    def _require_not_unscaled(self, marks: set[bool | None], places: list[_Place]) -> None:
        """Raise an error if `apply` got gradients that are already unscaled. Warn once if they may be unscaled."""
        answers = {True}
        if None in marks or not marks:
            earlier = self._calls_in(places)
            fresh = [call for call in earlier if not call.is_followed]
            calls = fresh[:1] if fresh and places != [_EAGER] else [*fresh, *self._waiting(places)]
            # Without such a call the gradients are taken to be scaled. The other calls can then cause only a warning.
            answers = {_SCALED_IN_APPLY[call.method] for call in calls or [_Call("scale_loss"), *earlier]}
        if False in marks or answers == {False}:
            raise RuntimeError(
                "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function from "
                f"scale_inside(), has already divided these gradients. {_TWO_WAYS_OUT}"
            )
        if False in answers:
            self._say(
                logging.warning,
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but get_unscaled_gradients() was "
                "called before: they may be divided twice. Give unscaled gradients to apply_gradients().",
            )

    def _contradicted(self, call: _Call, scaled: bool) -> None:
        """Raise an error at the end of the trace, unless an update follows the call. In eager mode, log it."""
        message = (
            f"After {call.method}(), gradients are {'un' * (not scaled)}scaled, but a function that was traced before "
            f"passes {'un' * scaled}scaled ones to apply_gradients(). If it gets these, it applies them wrongly. "
            f"{_TWO_WAYS_OUT}"
        )

        def require_update() -> None:
            if not call.is_followed:
                raise RuntimeError(message)

        if not at_end_of_trace(require_update):
            self._say(logging.error, message)

    def _calls_in(self, places: Iterable[_Place]) -> list[_Call]:
        return [place.calls[self] for place in places if self in place.calls]

    def _waiting(self, places: list[_Place]) -> list[_Call]:
        """Return the calls in other places that no update has followed there."""
        with self._lock:
            others = {*self._called_in, *self._last.values()}.difference(places)
        return [call for call in self._calls_in(others) if not call.is_followed]

    def _say(self, log: Callable[..., None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log("%s", message)


# Marks. The results of arithmetic on marked tensors have no mark, but in a graph the operations that computed them can
# be followed back to marked tensors.

_MARK = "_marked_by_tf_lossscale"
# What stands for the mark of a tensor that has none: a reference to no loss scale, and neither scaled nor unscaled.
_NO_MARK = ((lambda: None), None)
_UNSCALED_BY_ANOTHER = (False, False)
#: Operations whose result is scaled if one of their inputs is. The same is true of the product with a constant.
_KEEPING_THE_SCALE = re.compile("Add(N|V2)?|Cast|Identity|Mean|Neg|Pack|Reshape|Squeeze|Sub|Sum")


def mark(tensors: Any, loss_scale: Any, scaled: bool) -> None:
    """Mark the tensors in a structure, also sparse and ragged ones, as multiplied or as divided by a loss scale."""
    for tensor in tf.nest.flatten(tensors):
        if isinstance(tensor, (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor)):
            setattr(tensor, _MARK, (weakref.ref(loss_scale), scaled))


def is_scaled(tensor: Any, loss_scale: Any = None) -> bool | None:
    """Return whether a tensor is marked as scaled or unscaled, by this loss scale if one is passed, or None."""
    reference, scaled = getattr(tensor, _MARK, _NO_MARK)
    return scaled if loss_scale is None or reference() is loss_scale else None


def _marks_of(gradients: Iterable[Any], loss_scale: Any) -> set[tuple[bool | None, bool]]:
    """Return the marks of gradients, and whether each mark is of this loss scale.

    Raise an error if another loss scale multiplies a gradient.
    """
    marks = set()
    for gradient in gradients:
        if gradient is not None:
            reference, scaled = getattr(gradient, _MARK, _NO_MARK)
            marks.add((scaled, reference() is loss_scale))
    if (True, False) in marks:
        raise RuntimeError(
            "A gradient is multiplied by the loss scale of another LossScaleOptimizer, whose get_unscaled_gradients() "
            "took it. Pass the result of that call to apply_gradients() instead."
        )
    return marks


@do_not_convert
def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise an error if a loss, or in a graph a sum, mean or multiple of one, was already multiplied by this scale."""

    def keeps_the_scale(tensor: tf.Tensor) -> bool:
        by_constant = tensor.op.type == "Mul" and any(factor.op.type == "Const" for factor in tensor.op.inputs)
        return bool(by_constant or _KEEPING_THE_SCALE.fullmatch(tensor.op.type))

    for part in tf.nest.flatten(loss):
        if any(is_scaled(tensor, loss_scale) for tensor in [part, *ancestors(part, keeps_the_scale)]):
            raise RuntimeError(
                "This loss is scaled already: get_scaled_loss() or scale_loss() returned it or a part of it. Scale it "
                "once. minimize(), compute_gradients(), get_gradients() and Keras's fit take a loss that is not scaled."
            )


def _was_unscaled(gradient: Any, loss_scale: Any) -> bool:
    """Return whether a gradient in a graph was computed from unscaled gradients, and not from a scaled loss since."""
    found = False
    for tensor in ancestors(gradient, lambda tensor: is_scaled(tensor, loss_scale) is not False):
        # The input of a branch or a loop may have been computed from the factor, which is marked as scaled.
        if is_scaled(tensor, loss_scale) or (tensor.op.type == "Placeholder" and tensor.dtype != tf.resource):
            return False
        found = found or is_scaled(tensor, loss_scale) is False
    return found


def _are_of_another(gradients: list[Any], loss_scale: Any) -> bool:
    """Return whether gradients in a graph were computed from losses that only other loss scales have scaled."""
    before = ancestors(gradients, lambda tensor: is_scaled(tensor) is not False)
    scaled = [tensor for tensor in before if is_scaled(tensor)]
    return bool(scaled) and not any(is_scaled(tensor, loss_scale) for tensor in scaled)
