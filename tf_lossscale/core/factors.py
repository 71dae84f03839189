"""Remembers by which factor a loss scale multiplied losses, so that their gradients are divided by the same factor."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core.finite import is_zero
from tf_lossscale.core.graphs import birth, enclosing, functions, notes
from tf_lossscale.core.origins import Origin, Unit, called_bodies, mark_factor, units_of


class _Event(NamedTuple):
    """Something that happened to losses and gradients in eager mode."""

    #: The loss scale's factors, as a weak reference.
    of: Any
    #: Tensors that were created before the event have smaller numbers.
    birth: int
    thread: int
    kind: str
    #: The factor of a loss that was scaled, or whose gradients were computed; the scale before a step.
    factor: Any = None


_MAY_UNSCALE = {"read", "unscaled", "unscaled in a function"}
_Events = collections.deque[_Event]
#: The last events of all loss scales. `_LOCK` protects this list and the one of each loss scale.
_EVENTS: _Events = collections.deque(maxlen=1024)
_LOCK = threading.Lock()


def _latest_first(events: _Events) -> list[_Event]:
    with _LOCK:
        return [*reversed(events)]


class Factors:
    """The factors of one loss scale.

    In a graph, the origin of a gradient shows which factor multiplies it. In eager mode, the time at which a gradient
    was created shows it, because each backward pass of a scaled loss is recorded.
    """

    def __init__(self) -> None:
        self._in_thread = _InThread()
        # The last events of this loss scale. Other loss scales may have had more events since than `_EVENTS` holds.
        self._events: _Events = collections.deque(maxlen=1024)
        # The last event before this loss scale existed, which no gradient of its optimizer can be of.
        self._before = next(iter(_latest_first(_EVENTS)), None)
        # The functions that may return gradients of a scaled loss.
        self._unfinished: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The methods of an optimizer in whose place nothing was called yet.
        self.never_called: set[str] = {"get_scaled_loss", "get_unscaled_gradients"}
        #: The warnings of mistakes with this loss scale that were logged.
        self.warnings: set[str] = set()
        #: Whether a step was traced.
        self.is_traced: bool = False

    def __reduce__(self) -> tuple[type[Factors], tuple[()]]:
        # The copies and pickles of a loss scale have scaled no losses.
        return Factors, ()

    # Units of graphs. -------------------------------------------------------------------------------------------

    def _units(self, owner: Any, function: Any) -> list[Unit]:
        """Return the units of a loss scale in a function. Each of its steps there ends one.

        A function that was traced before takes its steps again when it is called.
        """
        units = notes(function).setdefault(self, [Unit(owner, function)])
        for graph in {function, *(each for each in enclosing() if functions(each)[:1] == [function])}:
            version, seen = notes(graph).get((self, "seen"), (0, 0))
            if version < graph.version:
                operations = graph.get_operations()
                notes(graph)[self, "seen"] = graph.version, len(operations)
                for position, op in enumerate(operations[seen:], seen + 1):
                    if any(self._has_step(body) for body, _ in called_bodies(op)):
                        units[-1].end[graph] = position
                        units.append(Unit(owner, function))
        return units

    def _has_step(self, graph: Any) -> bool:
        """Return whether a function, or one that it calls, takes a step."""
        inner = (body for op in graph.get_operations() for body, _ in called_bodies(op))
        return len(notes(graph).get(self, ())) > 1 or any(map(self._has_step, inner))

    def unit_here(self, owner: Any) -> Unit:
        """Return the unit of the factors that are read now."""
        here = functions()
        return self._units(owner, here[0])[-1] if here else Unit(owner, None)

    def unit_at(self, owner: Any, op: tf.Operation) -> Unit:
        """Return the unit of the factors that were read when an operation was added to its graph."""
        units = self._units(owner, functions(op.graph)[0])
        ended = [unit for unit in units if op.graph in unit.end]
        position = op.graph.get_operations().index(op) if ended else 0
        return next((unit for unit in ended if position < unit.end[op.graph]), units[-1])

    def step(self, owner: Any) -> None:
        """Record a step, which may change the scale."""
        self.is_traced |= not tf.executing_eagerly()
        for function in functions():
            units = self._units(owner, function)
            units[-1].end.update({graph: len(graph.get_operations()) for graph in enclosing()})
            units.append(Unit(owner, function))
        if tf.executing_eagerly() and owner.may_skip:
            scale = owner._current()
            self._record("step", scale, scale)

    # Reading. ---------------------------------------------------------------------------------------------------

    def read(self, loss_scale: Callable[[], Any]) -> Any:
        """Return the current scale, without recording that the user has read it."""
        self._in_thread.is_reading = True
        try:
            return loss_scale()
        finally:
            self._in_thread.is_reading = False

    def mark(self, factor: Any, owner: Any) -> None:
        """Mark a scale that was read in a graph with the unit of the place."""
        if tf.is_symbolic_tensor(factor):
            mark_factor(factor, self.unit_here(owner))

    def note_read(self, scale: Any, owner: Any) -> None:
        """Record that the user has read the scale, and may scale a loss by it."""
        self.mark(scale, owner)
        if not self._in_thread.is_reading:
            self._unfinished.update(functions()[:1])
            self._record("read", scale)

    def _record(self, kind: str, tensors: Any, factor: Any = None) -> None:
        births: list[Any] = [born for born in map(birth, tf.nest.flatten(tensors)) if born is not None]
        if functions():
            # The function may return gradients of a loss that it has scaled.
            with tf.init_scope():
                births, factor = [birth(tf.zeros([]))], None
            kind = "unscaled in a function" if kind == "unscaled" else "trace"
        if births and births[0] is not None:
            self._append(births[0], kind, factor, self._events, _EVENTS)

    def _append(self, born: int, kind: str, factor: Any, *lists: _Events) -> None:
        event = _Event(weakref.ref(self), born, threading.get_ident(), kind, factor)
        with _LOCK:
            for events in lists:
                events.append(event)

    # Losses and gradients. --------------------------------------------------------------------------------------

    def scaled(self, tensors: Any, factor: tf.Tensor, kind: str = "loss") -> None:
        """Record that a loss, or the gradient of a loss or of outputs, was multiplied by a factor."""
        self.never_called = self.never_called - {"get_scaled_loss"}
        self._unfinished.update(functions()[:1])
        self._in_thread.is_pending = True
        self._record(kind, tensors, factor)

    def unscaled(self, tensors: list[Any]) -> None:
        """Record that gradients were divided by their factor."""
        self.never_called = self.never_called - {"get_unscaled_gradients"}
        self._unfinished.difference_update(functions()[:1])
        self._in_thread.is_pending = False
        self._record("unscaled", tensors)

    def has_scaled_a_loss_since(self, outputs: Any) -> bool:
        """Return whether this thread, since outputs were created, has run the backward pass of a scaled loss."""
        births = [birth(each) for each in tf.nest.flatten(outputs)]
        first = min((born for born in births if born is not None), default=0)
        return any(
            event.kind == "backward" and event.birth > first
            for event in _latest_first(self._events)
            if event.thread == threading.get_ident()
        )

    def has_scaled(self, gradients: Iterable[Any]) -> bool:
        """Return whether gradients were created in eager mode after a backward pass of a scaled loss.

        If gradients were unscaled or the scale was read since the last step, they may be unscaled.
        """
        own = [event for event in _latest_first(self._events) if event.thread == threading.get_ident()]
        since = list(itertools.takewhile(lambda event: event.kind != "step", own))
        passes = [event.birth for event in since if event.kind in ("backward", "outputs")]
        if functions() or self._unfinished or not passes or {event.kind for event in since} & _MAY_UNSCALE:
            return False
        births = [birth(each) for each in gradients if each is not None]
        return all(born is not None and born > min(passes) for born in births)

    def has_gradient_of_another(self, gradients: Iterable[Any]) -> bool:
        """Return whether a gradient was created in eager mode right after a backward pass or trace of another one."""
        return self._any_was_born(self._right_after_another, gradients)

    def may_have_gradient_of_another(self, gradients: Iterable[Any]) -> bool:
        """Return whether a gradient was created in eager mode while one of another loss scale waited for its update.

        This loss scale must have computed no gradient since its last step.
        """
        return self._any_was_born(self._while_another_waited, gradients)

    def _any_was_born(self, when: Callable[[Iterable[_Event]], bool], gradients: Iterable[Any]) -> bool:
        if functions() or self._unfinished:
            return False
        events = [event for event in _latest_first(_EVENTS) if event.thread == threading.get_ident()]
        born = [(birth(each), each) for each in gradients if each is not None]
        return any(
            number is not None and when(event for event in events if event.birth < number) and not is_zero(each)
            for number, each in born
        )

    def forget_others(self) -> None:
        """Record that gradients created from now on are of no earlier backward pass of another loss scale."""
        born = birth(tf.zeros([]))
        if born is not None:
            self._append(born, "refused", None, _EVENTS)

    def _right_after_another(self, events: Iterable[_Event]) -> bool:
        # If several loss scales multiply a loss, its backward pass records an event for each of them.
        latest = itertools.takewhile(lambda event: event.kind in ("backward", "outputs", "trace"), events)
        owners = [event.of() for event in latest]
        return bool(owners) and owners[0] is not None and self not in owners

    def _while_another_waited(self, events: Iterable[_Event]) -> bool:
        has_waited, has_stepped, updated = False, False, {self, None}
        for event in events:
            if event.kind == "refused" or event is self._before:
                break
            if event.of() is self:
                if not has_stepped and event.kind in ("loss", "backward", "outputs", "unscaled"):
                    return False
                has_stepped |= event.kind == "step"
            elif event.kind in ("step", "unscaled"):
                updated.add(event.of())
            else:
                has_waited |= event.kind == "backward" and event.of() not in updated
        return has_waited

    def of(self, gradients: list[Any], found: list[Origin], owner: Any) -> tf.Tensor | None:
        """Return the factor of the loss of gradients, whose origins were found. If it is unknown, return None.

        Raise an error if they are multiplied by different factors.
        """
        if functions():
            return self._in_graph(found, owner)
        events = _latest_first(self._events)
        if self._in_thread.is_pending:
            # Another thread may have scaled the loss, unless this thread has scaled one and has unscaled nothing since.
            events = [event for event in events if event.thread == threading.get_ident()]
        each_factor = [(gradient, self._in_eager(gradient, events)) for gradient in gradients]
        known = [(gradient, factor) for gradient, factor in each_factor if factor is not None]
        if _are_several(known):
            known = [(gradient, factor) for gradient, factor in known if not is_zero(gradient)]
        if _are_several(known):
            raise RuntimeError(_SEVERAL)
        return known[0][1] if known else None

    def _in_graph(self, found: list[Origin], owner: Any) -> tf.Tensor | None:
        used = {unit for each in found for unit in units_of(each, owner)}
        if len(used) > 1:
            raise RuntimeError(_SEVERAL)
        # Gradients may come from a variable to which the same function has added them.
        units = [unit for unit in (used or reversed(self._units(owner, functions()[0]))) if unit.factors]
        # A tensor of a branch or a loop cannot be used outside of it.
        usable = [factor for unit in units[:1] for factor in unit.factors if factor.graph in enclosing()]
        if used and not usable and any(unit.end for unit in used):
            raise RuntimeError(_LATE)
        return usable[-1] if usable else None

    def _in_eager(self, gradient: Any, events: list[_Event]) -> tf.Tensor | None:
        born, is_next, is_doubtful, later_step = birth(gradient), True, bool(self._unfinished), None
        for event in events:
            if born is not None and event.birth > born:
                later_step = event if event.kind == "step" else later_step
                continue
            if event.kind in ("loss", "backward", "outputs") and (is_next or not is_doubtful):
                return event.factor
            is_next, is_doubtful = False, is_doubtful or event.kind in ("read", "trace")
            if is_doubtful:
                break
        # A function or the user has scaled the loss, by the scale at the time when the gradient was created.
        return None if later_step is None else later_step.factor


def _are_several(known: list[tuple[Any, Any]]) -> bool:
    factors = {id(factor): factor for _, factor in known}
    return len(factors) > 1 and len({float(factor) for factor in factors.values()}) > 1


class _InThread(threading.local):
    #: Whether no gradients have been unscaled since a loss was scaled in this thread.
    is_pending = False
    #: Whether the package itself reads the scale.
    is_reading = False


_SEVERAL = (
    "These gradients are of several losses, and a step between these losses may have changed the loss scale, so they "
    "may be multiplied by different factors. Unscale the gradients of each loss separately, before adding them up."
)
_LATE = (
    "These gradients are of a loss that was scaled in another function, branch or loop, and a step since then may have "
    "changed the loss scale. Unscale the gradients there, or before that step."
)
