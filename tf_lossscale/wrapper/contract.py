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

# Method -> whether the gradients of the next update are scaled.
APPLY_GRADIENTS = {"scale_loss": True, "get_scaled_loss": False, "get_unscaled_gradients": False}
# Method -> whether the gradients that a place has are scaled after this call.
_LEAVES_SCALED = {"scale_loss": True, "get_scaled_loss": True, "get_unscaled_gradients": False}

_TWO_WAYS_OUT = (
    "Write every step in one of two ways: pass gradients of the scaled loss to apply(gradients, variables), which "
    "always divides them by the loss scale; or call get_unscaled_gradients(gradients) right before apply_gradients() "
    "and pass its result as it is."
)


@dataclasses.dataclass
class _Note:
    """The method that a thread called last in one place, and the threads in which an update followed there."""

    method: str
    followed_in: set[threading.Thread] = dataclasses.field(default_factory=set)


class Contract:
    """Tells whether the gradients of an update are scaled. The answer is known, or the update raises.

    1. Gradients that `get_unscaled_gradients` returned are marked: they are unscaled.
    2. Else the last call in the same place counts. A place is a function that is being traced, with the functions
       around it, or what one thread does in eager mode.
    3. Else, and in eager mode also, calls in all other places count if no update followed there: gradients of a traced
       function, or of another thread, may come from there. If they contradict each other, the update raises.
    4. If there was none, gradients are what the update's documentation says.

    A traced function keeps its answer. If that came from outside of the function, a call that says the opposite raises,
    unless it is in a traced function that updates as well.

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
        self._in_functions: weakref.WeakKeyDictionary[Any, dict[threading.Thread, _Note]] = weakref.WeakKeyDictionary()
        self._in_eager_mode: dict[threading.Thread, _Note] = {}
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
                note = self._in_functions.setdefault(function, {})[thread] = _Note(method)
                if contradicts:
                    _require_an_update(note, function)
            if not functions:
                self._forget_ended_threads()
                self._in_eager_mode[thread] = _Note(method)

    def scaled_by_hand(self) -> None:
        """Record that gradients are scaled and unscaled without our methods: they are unscaled in the next update.

        Unless the loss is scaled as well: Keras 3's `fit` calls `scale_loss` with what a function of `scale_inside`
        returned.
        """
        with self._lock:
            if not any(note.method == "scale_loss" and not note.followed_in for note in self._notes_here(_functions())):
                self.called("get_scaled_loss")
                self.called("get_unscaled_gradients")

    def takes_scaled(
        self, gradients: Iterable[Any], says: dict[str, bool] = APPLY_GRADIENTS, otherwise: bool = False
    ) -> bool:
        """Tell whether the gradients of an update, which is about to be made, are scaled.

        Args:
            gradients: tensors, IndexedSlices or None.
            says: method -> whether the gradients of the next update are scaled.
            otherwise: the answer if no method was called.

        Raises:
            RuntimeError: the calls so far contradict each other.
        """
        with self._lock:
            functions, marks = _functions(), [is_marked(g) for g in gradients if g is not None]
            if marks and all(marks):
                answers, from_outside = {False}, False
            else:
                answers, from_outside = self._answers(functions, says)
            if len(answers) > 1 or (True in answers and any(marks)):
                raise RuntimeError(
                    "Cannot tell whether these gradients are scaled: both scale_loss() and "
                    "get_unscaled_gradients() (or get_scaled_loss()) were called for this optimizer in other "
                    "functions, threads or steps, or more than one update follows one scale_loss(). "
                    f"{_TWO_WAYS_OUT}"
                )
            answer = answers.pop() if answers else otherwise
            if functions and from_outside:
                self._answers_kept.add(answer)
            self.update_follows()
            return answer

    def update_follows(self) -> None:
        """Record that an update uses the calls made in this place."""
        with self._lock:
            thread = threading.current_thread()
            for note in self._notes_here(_functions()):
                note.followed_in.add(thread)

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

    def _answers(self, functions: list[Any], says: dict[str, bool]) -> tuple[set[bool], bool]:
        """Return the answers of the calls so far, and whether these were outside of the function being traced."""
        for function in functions:
            notes = [n for n in self._notes_in(function) if n.method in says and not _used_up(n, says)]
            if notes:
                return {says[note.method] for note in notes}, function is not functions[0]
        here = self._notes_here(functions)
        answers = {says[note.method] for note in self._open_notes_elsewhere(here) if note.method in says}
        for note in here:
            if note.method in says and _used_up(note, says):
                # A second part of the gradients of one scale_loss, or gradients of no scaled loss.
                answers |= {True} if answers else {True, False}
            elif note.method in says:
                answers.add(says[note.method])
        return answers, True

    def _open_notes_elsewhere(self, here: list[_Note]) -> list[_Note]:
        """Return the notes of all other places in which no update followed."""
        notes = [
            *self._in_eager_mode.values(),
            *(note for function, notes in self._in_functions.items() for note in notes.values()),
            *map(_Note, self._in_ended_threads),
        ]
        return [note for note in notes if not note.followed_in and not any(note is each for each in here)]

    def _notes_here(self, functions: list[Any]) -> list[_Note]:
        if functions:
            return [note for function in functions for note in self._notes_in(function)]
        note = self._in_eager_mode.get(threading.current_thread())
        return [note] if note else []

    def _notes_in(self, function: Any) -> list[_Note]:
        """Return this thread's note in a function, else those of all: replicas have threads, and do the same."""
        notes = self._in_functions.get(function, {})
        own = notes.get(threading.current_thread())
        return list(notes.values()) if own is None else [own]

    def _in_whole_step(self) -> bool:
        return getattr(self._whole_steps, "depth", 0) > 0

    def _forget_ended_threads(self) -> None:
        for thread in [thread for thread in self._in_eager_mode if not thread.is_alive()]:
            note = self._in_eager_mode.pop(thread)
            if not note.followed_in:
                self._in_ended_threads.add(note.method)

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
        unscaled, may_be_unscaled = any(map(is_marked, gradients)), False
        if not unscaled and not all(hasattr(gradient, "_scaled_for_tf_lossscale") for gradient in gradients):
            with self._lock:
                notes = self._notes_of_apply(_functions())
                last = notes or self._notes_here(_functions())
            unscaled = bool(notes) and not any(_LEAVES_SCALED[note.method] for note in notes)
            may_be_unscaled = not all(_LEAVES_SCALED[note.method] for note in last)
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

    def _notes_of_apply(self, functions: list[Any]) -> list[_Note]:
        """Return the notes of the places that gradients given to `apply` may come from."""
        thread = threading.current_thread()
        for function in functions:
            notes = [note for note in self._notes_in(function) if thread not in note.followed_in]
            if notes:
                return notes
        here = self._notes_here(functions)
        return [note for note in here if thread not in note.followed_in] + self._open_notes_elsewhere(here)

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


# Marks on tensors. Each is an attribute: the loss scale by which a loss was multiplied, or a gradient divided, and
# whether a gradient was given to `get_unscaled_gradients`.


def mark(gradients: Iterable[Any], loss_scale: Any, scaled: Iterable[Any] = ()) -> None:
    """Mark gradients as unscaled.

    >>> gradient, scale = tf.constant(1.0), tf.Module()
    >>> mark([gradient, None], scale)
    >>> is_marked(gradient), is_marked(tf.constant(1.0))
    (True, False)

    Args:
        gradients: tensors, IndexedSlices or None.
        loss_scale: the object that they were divided by.
        scaled: the gradients before that, which are marked as scaled.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient._unscaled_by_tf_lossscale = weakref.ref(loss_scale)
    for gradient in scaled:
        if isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
            gradient._scaled_for_tf_lossscale = True


def is_marked(gradient: Any) -> bool:
    """Tell whether `mark` marked this gradient as unscaled."""
    return hasattr(gradient, "_unscaled_by_tf_lossscale")


def require_scaled(gradients: Iterable[Any], loss_scale: Any) -> None:
    """Raise if a gradient is marked as divided by this loss scale.

    >>> require_scaled([tf.constant(8.0), None], tf.Module())

    Args:
        gradients: tensors, IndexedSlices or None.
        loss_scale: the object that they would be divided by.
    """
    if any(_marked_with(loss_scale, gradient, "_unscaled_by_tf_lossscale") for gradient in gradients):
        raise RuntimeError(
            "get_unscaled_gradients() was given a gradient that it returned before, and would divide it by the loss "
            "scale again. Call it once for each gradient. minimize(), compute_gradients() and get_gradients() call it "
            "themselves."
        )


def mark_loss(loss: Any, loss_scale: Any) -> None:
    """Mark a loss as scaled.

    >>> loss, scale = tf.constant(1.0), tf.Module()
    >>> mark_loss(loss, scale)
    >>> require_unscaled_loss({"loss": loss}, scale)
    Traceback (most recent call last):
    RuntimeError: This loss is scaled already: get_scaled_loss() or scale_loss() returned it. Scale it once...

    Args:
        loss: a nested structure of tensors.
        loss_scale: the object that they were multiplied by.
    """
    for part in tf.nest.flatten(loss):
        part._loss_scaled_by_tf_lossscale = weakref.ref(loss_scale)


def require_unscaled_loss(loss: Any, loss_scale: Any) -> None:
    """Raise if a part of a loss is marked as multiplied by this loss scale.

    Args:
        loss: a nested structure of tensors; anything else has no mark.
        loss_scale: the object that it would be multiplied by.
    """
    if any(_marked_with(loss_scale, part, "_loss_scaled_by_tf_lossscale") for part in tf.nest.flatten(loss)):
        raise RuntimeError(
            "This loss is scaled already: get_scaled_loss() or scale_loss() returned it. Scale it once. minimize(), "
            "compute_gradients(), get_gradients() and Keras's fit take a loss that is not scaled."
        )


def _marked_with(loss_scale: Any, tensor: Any, attribute: str) -> bool:
    mark = getattr(tensor, attribute, None)
    return mark is not None and mark() is loss_scale


def _used_up(note: _Note, says: dict[str, bool]) -> bool:
    # Unscaled gradients may go to several updates. After an update of scaled ones, the next may be of either kind.
    return says[note.method] and threading.current_thread() in note.followed_in


def _contradiction(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}() was called, but a function that was traced before calls apply_gradients() for gradients that are "
        f"{'un' * APPLY_GRADIENTS[method]}scaled. {_TWO_WAYS_OUT}"
    )


def _require_an_update(note: _Note, function: Any) -> None:
    """Make each call of the function being traced raise, unless an update follows the note in that function."""

    def check() -> tf.Tensor:
        if not note.followed_in:
            raise _contradiction(note.method)
        return tf.constant(0)

    if not hasattr(function, "capture_call_time_value"):
        raise _contradiction(note.method)
    # Private: TensorFlow evaluates the closure at each call of the function.
    function.capture_call_time_value(check, tf.TensorSpec([], tf.int32))


def _functions() -> list[Any]:
    """Return the graphs of the functions being traced, the innermost first, and a legacy graph around them."""
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
