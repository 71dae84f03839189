"""What an unscaled gradient in a graph was made from: the branch that applies it can take in that instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core import groups


class Unscaling(NamedTuple):
    """How gradients are unscaled: by which scale, and what is done to each.

    >>> by = Unscaling(tf.constant(4.0), tf.divide)
    >>> by(tf.constant(8.0)).numpy().item()
    2.0
    """

    scale: tf.Tensor
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        return self.function(values, self.scale)


class Scaled(NamedTuple):
    """A gradient of the scaled loss, and how to unscale it.

    >>> Scaled(tf.constant(8.0), Unscaling(tf.constant(4.0), tf.divide)).unscaled().numpy().item()
    2.0
    """

    values: tf.Tensor
    by: Unscaling

    def unscaled(self, one: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the gradient: the same operations as the first time, and so the same bits.

        Args:
            one: what `branches.at_most_once` gives, so that a compiler does not unscale before it is known whether to.
        """
        return self.by(self.values if one is None else self.values * tf.cast(one, self.values.dtype))


class Share(NamedTuple):
    """One of the gradients that were unscaled in a stack.

    >>> Share(tf.constant([[1.0], [2.0]]), 1).position
    1
    """

    stack: tf.Tensor
    position: int


def note(tensor: tf.Tensor, origin: Scaled | Share) -> None:
    """Notes what a tensor of a graph was made from; in eager mode it is made already, and nothing is noted.

    >>> note(tf.constant(2.0), Share(tf.constant([2.0]), 0))

    Args:
        tensor: an unscaled gradient.
        origin: what it was made from.
    """
    if not tf.executing_eagerly():
        tensor._origin_in_tf_lossscale = origin


def of(tensor: Any) -> Scaled | Share | None:
    """Returns what `note` noted.

    >>> of(tf.constant(2.0)) is None
    True

    Args:
        tensor: anything.
    """
    return getattr(tensor, "_origin_in_tf_lossscale", None)


def shares(stack: tf.Tensor) -> list[tf.Tensor]:
    """Returns the gradients in a stack, each with the note that it is a share of it.

    >>> [part.numpy().tolist() for part in shares(tf.constant([[1.0], [2.0]]))]
    [[1.0], [2.0]]

    Args:
        stack: unscaled gradients; its first axis is of a known size.
    """
    parts = groups.unstacked(stack)
    for position, part in enumerate(parts):
        note(part, Share(stack, position))
    return parts


class Packed:
    """Gradients as a branch best takes them in: a stack for its members, a scaled gradient for what unscales it.

    >>> packed = Packed([tf.constant(2.0), None])
    >>> len(packed.tensors), [g is None for g in packed.unpacked()]
    (1, [False, True])

    Args:
        gradients: tensors, IndexedSlices or None, as they are to be applied.
        scaled: whether to go back to scaled gradients: not where the gradients are yet to be summed.
    """

    def __init__(self, gradients: Sequence[Any], scaled: bool = True):
        self._count = len(gradients)
        stacks = _whole_stacks(gradients)
        self._stacked = [members for _, members in stacks]
        done = {i for members in self._stacked for i in members}
        self._alone = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in done]
        alone = [gradients[i] for i in self._alone]
        #: What to judge: finite where the gradients are; stacks, `Scaled`, and what is neither.
        self.tensors = [*(stack for stack, _ in stacks), *(map(_before_unscaling, alone) if scaled else alone)]

    def unpacked(self, one: tf.Tensor | None = None, tensors: Sequence[Any] | None = None) -> list[Any]:
        """Returns the gradients, made anew where the caller is.

        Args:
            one: as in `Scaled.unscaled`.
            tensors: what is in the place of `tensors` there, if anything: the sums over all replicas, for one.
        """
        tensors = self.tensors if tensors is None else tensors
        gradients: list[Any] = [None] * self._count
        for stack, known, members in zip(tensors, self.tensors, self._stacked):
            stack.set_shape(known.shape)
            for i, part in zip(members, shares(stack)):
                gradients[i] = part
        for i, tensor in zip(self._alone, tensors[len(self._stacked) :]):
            gradients[i] = tensor.unscaled(one) if isinstance(tensor, Scaled) else tensor
        return gradients

    def one_by_one(self, unpacked: Sequence[Any]) -> None:
        """Has each large gradient unscaled only when the one before was used: one at a time takes up memory.

        Not those of a few megabytes: they are better unscaled right before they are used, by whichever core is free.

        Args:
            unpacked: what `unpacked` returned, once something was built that uses it.
        """
        late = [i for i, tensor in zip(self._alone, self.tensors[len(self._stacked) :]) if isinstance(tensor, Scaled)]
        made = [unpacked[i] for i in late if groups.is_large(unpacked[i])]
        for before, after in itertools.pairwise(made):
            users = before.consumers()
            if any(_depends_on(user, after.op) for user in users):
                return  # on a norm of all of them, for one
            _wait(after.op, users)


def _before_unscaling(gradient: Any) -> Any:
    """The `Scaled` that a gradient is made from, if it is, else the gradient."""
    origin = of(gradient)
    return origin if isinstance(origin, Scaled) else gradient


def _whole_stacks(gradients: Sequence[Any]) -> list[tuple[tf.Tensor, list[int]]]:
    """The stacks whose members are all among the gradients, once each, with the members' positions there."""
    found: dict[int, tuple[tf.Tensor, list[tuple[int, int]]]] = {}
    for i, gradient in enumerate(gradients):
        origin = of(gradient)
        if isinstance(origin, Share):
            found.setdefault(id(origin.stack), (origin.stack, []))[1].append((origin.position, i))
    return [
        (stack, [i for _, i in sorted(members)])
        for stack, members in found.values()
        if sorted(position for position, _ in members) == list(range(stack.shape[0]))
    ]


def _depends_on(operation: Any, other: Any) -> bool:
    """Whether an operation of a graph can only run after another."""
    waiting, seen = [operation], set()
    while waiting:
        one = waiting.pop()
        if one is other:
            return True
        if one.name not in seen:
            seen.add(one.name)
            waiting += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
    return False


def _wait(operation: Any, for_these: list[Any]) -> None:
    operation._add_control_inputs(for_these)  # private: a test sees the memory of two gradients where it is gone
