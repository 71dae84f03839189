"""Decides whether the gradients passed to an update are scaled, and raises an error if this is unclear.

The origin of a gradient decides: the graph that computed it, or the mark on the tensor, if `get_unscaled_gradients`
took or returned it. The origin may be unknown in eager mode, and if a function gets a gradient as an argument or reads
it from a variable. Then the calls to the optimizer decide: those in the innermost function that has any, otherwise
those in all other places.

1. Gradients are scaled after `scale_loss`, for one update. They are unscaled after `get_scaled_loss` and
   `get_unscaled_gradients`, for any number of updates. The calls since the last update must agree. A function that was
   traced on calls elsewhere cannot decide again, so a later call that contradicts them raises an error, unless an
   update follows in its function.
2. After a backward pass of another optimizer's loss, or in a function after its `scale_loss`, and after an update that
   has used up a call to `scale_loss`, it is unclear whether the gradients are scaled.
3. Without any call the gradients are unscaled, as the TensorFlow 2 documentation of `apply_gradients` says, and a
   warning names the methods that were not called.

`apply` takes scaled gradients. It raises an error if their origin or the calls say that they are unscaled, and warns if
some calls do. For a Sonnet optimizer, `apply` accepts both kinds, and without any evidence they are scaled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import logging

from tf_lossscale.core import misuse
from tf_lossscale.core.graphs import at_end_of_trace, functions, notes
from tf_lossscale.core.origins import Origin, origins
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


_SCALED_BY_ANOTHER = (
    "The loss scale of another LossScaleOptimizer multiplies a gradient, or may do so, because the last scaled loss "
    "was that optimizer's. Pass the gradients to the other optimizer's get_unscaled_gradients(), and its results to "
    "apply_gradients() of the optimizer that trains the variables."
)
_OF_OTHER = (
    "get_unscaled_gradients() got a gradient of a loss that another LossScaleOptimizer scaled. Call "
    "get_unscaled_gradients() of the optimizer that scaled the loss, and pass the result to apply_gradients() of the "
    "optimizer that trains the variables."
)
_SCALES_A_LOSS = ("scale_loss", "get_scaled_loss")
_NUMBERS = itertools.count()


class _Call:
    """A call to a method of an optimizer."""

    def __init__(self, contract: Contract, method: str):
        self.contract, self.method, self.number = weakref.ref(contract), method, next(_NUMBERS)
        #: Whether an update of the same optimizer has followed in the same place.
        self.is_followed = False


class _Place:
    """The calls to one optimizer in eager mode or in a function: the last one of each method, in their order."""

    def __init__(self) -> None:
        self.calls: dict[str, _Call] = {}

    def since_last_loss(self) -> list[_Call]:
        """Return the last call that scaled a loss, and the calls since."""
        calls = list(self.calls.values())
        first = max((i for i, call in enumerate(calls) if call.method in _SCALES_A_LOSS), default=0)
        return calls[first:]

    def since_last_update(self) -> list[_Call]:
        """Return the calls that no update has followed, and those since the first such call to `scale_loss`."""
        calls = list(self.calls.values())
        first = next((i for i, call in enumerate(calls) if call.method == "scale_loss" and not call.is_followed), None)
        return [call for call in calls if not call.is_followed] if first is None else calls[first:]


class _Latest:
    """The last call to `scale_loss` of all optimizers in a function."""

    call: _Call | None = None


class Decision(NamedTuple):
    """Whether the gradients passed to an update are scaled, and where the update takes place."""

    scaled: bool
    places: list[_Place]
    #: The origins of the gradients.
    found: list[Origin]
    #: Whether the origins of the gradients are known, so that no call has decided.
    is_known: bool = False
    #: Whether the answer depends on calls outside of the innermost function.
    from_elsewhere: bool = False


class _Known(NamedTuple):
    """The gradients of an update and their origins, which show whether the gradients are scaled."""

    found: list[Origin]
    #: Whether they are scaled by the optimizer's loss scale. The set contains None if this is unknown of one.
    kinds: set[Any]
    gradients: list[Any]
    loss_scale: Any

    @property
    def is_complete(self) -> bool:
        """Whether there are gradients, and the origins show for each of them whether it is scaled."""
        return bool(self.kinds) and None not in self.kinds


class Contract:
    """Records which methods of an optimizer were called, and decides whether the next update gets scaled gradients."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._eager = _Place()
        # The methods that were ever called, and the places of these calls.
        self._ever: set[str] = set()
        self._called_in: weakref.WeakSet[_Place] = weakref.WeakSet([self._eager])
        # Gradients outlive the functions that computed them, so the last place of each method does as well.
        self._last: dict[str, _Place] = {}
        # What was decided in the functions whose updates depend on calls elsewhere.
        self._decided: weakref.WeakKeyDictionary[_Place, bool] = weakref.WeakKeyDictionary()
        # The messages that were logged. None of them is logged again.
        self._said: set[str] = set()

    def __reduce__(self) -> tuple[type[Contract], tuple[()]]:
        return Contract, ()

    # The calls. -------------------------------------------------------------------------------------------------

    def _places(self) -> list[_Place]:
        """Return the places of the functions being traced, innermost first, or the one of eager mode."""
        return [notes(function).setdefault(self, _Place()) for function in functions()] or [self._eager]

    def called(self, method: str) -> None:
        """Record a call to a method."""
        places, scaled, call = self._places(), _SCALED_IN_APPLY_GRADIENTS[method], _Call(self, method)
        with self._lock:
            self._ever.add(method)
            self._last[method] = places[0]
            for place in places:
                # Another thread may iterate over the calls, so the dict is replaced.
                place.calls = {**{name: each for name, each in place.calls.items() if name != method}, method: call}
                self._called_in.add(place)
            decided = {answer for place, answer in self._decided.items() if place not in places}
        if method == "scale_loss":
            for latest in _latest():
                latest.call = call
        # A function that scales a loss usually unscales its gradients as well, so `get_scaled_loss` decides nothing.
        if (not scaled) in decided and method != "get_scaled_loss":
            self._contradicted(call, scaled)

    def record(self, decision: Decision) -> None:
        """Record an update. A step that raised an error is not recorded, so it can be repeated."""
        with self._lock:
            for place in decision.places:
                # An update whose gradients are known follows their loss, and leaves earlier losses to other updates.
                for call in place.since_last_loss() if decision.is_known else place.calls.values():
                    call.is_followed = True
            if decision.from_elsewhere:
                self._decided.update(dict.fromkeys(decision.places, decision.scaled))

    def unscaled_inside(self) -> None:
        """Record that a loss function wrapped by `scale_inside` has unscaled its gradients.

        If a loss was scaled first, nothing is recorded: in that case Keras's `fit` has also scaled the loss that the
        wrapped function returned, so the gradients are still multiplied by the factor that `fit` applied.
        """
        calls = [call for place in self._places() for call in place.calls.values()]
        if not any(call.method in _SCALES_A_LOSS and not call.is_followed for call in calls):
            self._ever |= {"get_scaled_loss", "get_unscaled_gradients"}
            self.called("inside")

    def require_scaled(self, gradients: list[Any], loss_scale: Any) -> list[Origin]:
        """Raise an error if a gradient was already divided by this loss scale, or is scaled by another one only.

        Return the origins of the gradients.
        """
        found = origins(gradients)
        kinds = {True if kind is misuse.BY_SEVERAL else kind for kind in misuse.kinds_of(gradients, found, loss_scale)}
        inside = self._places()[0].since_last_update()[-1:]
        if inside and inside[0].method == "inside" and (not kinds or kinds - {True}):
            raise RuntimeError(
                "get_unscaled_gradients() got gradients of a loss function from scale_inside(), which has already "
                "unscaled them. Pass them to apply_gradients() as they are."
            )
        misuse.require_scaled(kinds, gradients, loss_scale, "get_unscaled_gradients", _OF_OTHER)
        return found

    # The decisions. ---------------------------------------------------------------------------------------------

    def decide(self, gradients: list[Any], loss_scale: Any) -> Decision:
        """Decide whether the gradients passed to `apply_gradients` are scaled. Raise an error if that is unclear."""
        known = self._known(gradients, loss_scale)
        # TensorFlow 2's apply_gradients applies the gradients of a loss from get_scaled_loss as they are, and warns.
        is_forgotten = (
            not loss_scale._is_one and known.kinds == {True} and set(self._places()[0].calls) == {"get_scaled_loss"}
        )
        known = known._replace(kinds={False}) if is_forgotten else known
        decision = self._decide(known, _SCALED_IN_APPLY_GRADIENTS, otherwise=False)
        forgotten = {"get_unscaled_gradients"} if is_forgotten else _never_called(loss_scale) - self._ever
        if forgotten and (is_forgotten or not ("scale_loss" in self._ever or decision.is_known)):
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

    def decide_for_apply(self, gradients: list[Any], loss_scale: Any, may_be_unscaled: bool) -> Decision:
        """Decide whether the gradients passed to `apply` are scaled. They must be, unless `may_be_unscaled`."""
        known = self._known(gradients, loss_scale)
        if may_be_unscaled:
            decision = self._decide(known, _SCALED_IN_EITHER_APPLY, otherwise=True)
        else:
            decision = Decision(True, self._places(), known.found, known.is_complete)
            self._require_not_unscaled(known, decision.places)
        is_unexplained = decision.scaled and not (decision.is_known or self._ever & {*_SCALES_A_LOSS})
        if is_unexplained and _never_called(loss_scale):
            self._say(
                logging.warning,
                "LossScaleOptimizer.apply() divides the gradients by the loss scale, but scale_loss() was never "
                "called: training will stall. Call loss = opt.scale_loss(loss) before taking gradients, or pass the "
                "results of get_unscaled_gradients() to apply_gradients().",
            )
        return decision

    def _known(self, gradients: list[Any], loss_scale: Any) -> _Known:
        """Return what is known of the gradients of an update. Raise an error if another loss scale multiplies one."""
        found = origins(gradients)
        kinds = misuse.kinds_of(gradients, found, loss_scale)
        if kinds & {misuse.BY_OTHER, misuse.BY_SEVERAL}:
            raise RuntimeError(_SCALED_BY_ANOTHER)
        kinds = {False if kind is misuse.NOT_BY_OTHER else kind for kind in kinds}
        return _Known(found, kinds, gradients, loss_scale)

    def _decide(self, known: _Known, after: dict[str, bool], otherwise: bool) -> Decision:
        if known.kinds >= {True, False}:
            raise RuntimeError(
                "Some of these gradients are results of get_unscaled_gradients(), or were computed from its results, "
                "and others are still scaled. Pass only unscaled gradients to apply_gradients()."
            )
        places, answers, from_elsewhere = self._places(), known.kinds - {None}, False
        if not known.is_complete:
            by_calls, from_elsewhere, _ = self._by_calls(known, places, after)
            answers |= by_calls
        if len(answers) > 1:
            self._last.clear()  # A trace that failed after scaling must not make later updates fail as well.
            raise RuntimeError(
                "Cannot tell whether these gradients are scaled. Either more than one update follows a single call to "
                "this optimizer's scale_loss(), or get_unscaled_gradients(), minimize() or another function was called "
                f"between scale_loss() and this update. {_TWO_WAYS_OUT}"
            )
        scaled = answers.pop() if answers else otherwise
        return Decision(scaled, places, known.found, known.is_complete, from_elsewhere)

    def _by_calls(self, known: _Known, places: list[_Place], after: dict[str, bool]) -> tuple[set[bool], bool, bool]:
        """Return the answers that calls imply, and whether the calls were made outside of the innermost function.

        The last value says whether no update has followed one of the calls. Raise an error if another optimizer scaled
        the loss.
        """
        here = next((place for place in places if any(method in after for method in place.calls)), None)
        since_update = _answers(here.since_last_update(), after) if here else set()
        self._require_own_loss(known, places, since_update)
        in_eager = places == [self._eager]
        with self._lock:
            elsewhere = {*self._called_in, *self._last.values()}.difference(places)
        waiting = [call for place in elsewhere for call in place.calls.values() if not call.is_followed]
        from_elsewhere = not in_eager and here is not places[0]
        used_up = _answers(here.since_last_loss(), after) if here else set()
        answers = since_update | (_answers(waiting, after) if in_eager or not here else set())
        if answers:
            return answers if since_update else answers | (used_up & {True}), from_elsewhere, True
        if here:
            answers = used_up
        elif "scale_loss" in self._ever & {*after}:
            answers = {True}
        # After `loss = scale_loss(loss)`, a second update may get gradients of the same loss once more, or of a loss
        # that was not scaled. Nothing tells which.
        return answers | {False} if True in answers else answers, from_elsewhere, False

    def _require_own_loss(self, known: _Known, places: list[_Place], answers: set[bool]) -> None:
        """Raise an error if another optimizer's loss was scaled here, and no call to this one waits since.

        `answers` are those of the calls to this optimizer that no update has followed.
        """
        if answers == {True}:
            return
        latest = [each.call for each in _latest()[:1] if each.call]
        of_other = [call for call in latest if call.contract() not in (None, self) and not call.is_followed]
        waiting = [call for place in places for call in place.calls.values() if not call.is_followed]
        if any(all(call.number < each.number for call in waiting) for each in of_other):
            raise RuntimeError(_SCALED_BY_ANOTHER)
        # In eager mode, the backward passes tell whose loss it was.
        factors = known.loss_scale._factors
        gradients = known.gradients
        if factors.has_gradient_of_another(gradients) or factors.may_have_gradient_of_another(gradients):
            factors.forget_others()  # A step that was interrupted must not make all later updates of others fail.
            raise RuntimeError(_SCALED_BY_ANOTHER)

    def _require_not_unscaled(self, known: _Known, places: list[_Place]) -> None:
        """Raise an error if `apply` got gradients that are already unscaled. Warn once if they may be unscaled."""
        answers, is_fresh = {True}, False
        if not known.is_complete:
            answers, _, is_fresh = self._by_calls(known, places, _SCALED_IN_APPLY)
        if False in known.kinds or (answers == {False} and is_fresh):
            raise RuntimeError(
                "apply() divides gradients by the loss scale, but get_unscaled_gradients(), or a function from "
                f"scale_inside(), has already divided these gradients. {_TWO_WAYS_OUT}"
            )
        if False in answers and (is_fresh or True not in answers):
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

    def _say(self, log: Callable[..., None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log("%s", message)


def contract_of(loss_scale: Any) -> Contract:
    """Return a new contract, or the one of all optimizers that share a loss scale."""
    if isinstance(loss_scale, SharedLossScale):
        return loss_scale.__dict__.setdefault("_contract", Contract())
    return Contract()


def _never_called(loss_scale: Any) -> set[str]:
    """Return the methods that were not called but should be. A scale of 1 needs none."""
    return set() if loss_scale._is_one else loss_scale._factors.never_called


def _latest() -> list[_Latest]:
    return [notes(function).setdefault(_Latest, _Latest()) for function in functions()]


def _answers(calls: list[_Call], after: dict[str, bool]) -> set[bool]:
    methods = {call.method for call in calls} & {*after}
    if methods & {"get_unscaled_gradients", "inside"}:
        methods.discard("get_scaled_loss")
    return {after[method] for method in methods}
