"""The state of models and optimizers, which a report restores after it has run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.libraries.models import distinct, is_variable, tensors_of, walk


class Snapshot:
    """The values of all variables inside objects on all replicas, and the plain numbers in their attributes."""

    def __init__(self, roots: Sequence[Any]):
        self._roots = roots
        parts = [part for _, part in walk(roots)]
        #: Pairs of a variable, and of its copies on the replicas with their values.
        self.saved: list[tuple[Any, list[tuple[Any, tf.Tensor]]]] = [
            (variable, _saved(variable)) for variable in distinct(filter(is_variable, parts))
        ]
        # For example, the seed of a Dropout layer in tf_keras is an int that grows with each call. The numbers of a
        # layer that is not built are not restored, because `build` may set them.
        built = [vars(part) for part in parts if hasattr(part, "__dict__") and getattr(part, "built", True)]
        self._numbers = [
            (each, {name: each[name] for name in each if type(each[name]) in (int, float)}) for each in built
        ]

    def variables(self) -> list[Any]:
        """Return the variables that are inside the objects now."""
        return distinct(filter(is_variable, (part for _, part in walk(self._roots))))

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the state at the end of the block. Variables that the block creates get their first values back."""
        try:
            with tf.variable_creator_scope(self._create):
                yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the state."""
        for _, copies in self.saved:
            for copy, value in copies:
                copy.assign(value)
        for attributes, before in self._numbers:
            attributes.update(before)

    def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
        variable = make(**kwargs)
        if tf.executing_eagerly():
            self.saved.append((variable, _saved(variable)))
        return variable


def _saved(variable: Any) -> list[tuple[Any, tf.Tensor]]:
    [tensor] = tensors_of([variable])
    return [(copy, copy.read_value()) for copy in replicas.local_copies_of(tensor)]
