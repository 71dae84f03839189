"""Stacks small gradients, and unscales each large gradient only right before it is applied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core import replicas, scaling, step
from tf_lossscale.core.fast import tricks
from tf_lossscale.core.graphs import in_xla_context, optimization_barrier
from tf_lossscale.core.notes import note_origin, origin
from tf_lossscale.core.twins import faster

# An operation on up to this many values takes longer to start than to run.
_SMALL = 2**13
# The maximum number of values in a stack, a megabyte in float32.
_TOGETHER = 2**18
# Gradients with at most this many values may stay in memory longer than necessary.
_HELD = 2**22


# Stacks. ------------------------------------------------------------------------------------------------------------


def positions(tensors: Sequence[Any]) -> list[list[int]]:
    """Group the tensors that can be stacked, and return the positions in each group. A group has at least two tensors.

    >>> positions([tf.ones([2]), tf.ones([3]), None, tf.zeros([2]), tf.zeros([2], tf.float16)])
    [[0, 3]]

    Args:
        tensors: tensors of any dtype and shape; other objects are ignored.

    Returns:
        For each stack, the list of the positions of its tensors. The tensors in a stack are small, and have the same
        dtype, shape and device. The result is empty if XLA compiles the function being traced, because XLA fuses
        operations itself.
    """
    if "stacks" not in tricks.in_use or (not tf.executing_eagerly() and in_xla_context()):
        return []
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.Tensor):
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(i)
    groups = []
    for (shape, *_), members in alike.items():
        values = shape.num_elements()
        if len(members) > 1 and values and values <= _SMALL:
            most = _TOGETHER // values
            groups += [members[first : first + most] for first in range(0, len(members) - 1, most)]
    return groups


def stacked(tensors: Sequence[Any], group: list[int]) -> tf.Tensor:
    """Stack the tensors at the given positions.

    >>> stacked([tf.constant([1.0]), None, tf.constant([2.0])], [0, 2]).numpy().tolist()
    [[1.0], [2.0]]

    Args:
        tensors: the tensors that were passed to `positions`.
        group: one of the lists that `positions` returned.

    Returns:
        A tensor with a new first axis.
    """
    return tf.raw_ops.Pack(values=[tensors[i] for i in group], axis=0)


def in_stacks(tensors: Sequence[Any]) -> list[Any]:
    """Stack the tensors that can be stacked. Return the stacks, followed by all other tensors.

    >>> [tensor.shape.as_list() for tensor in in_stacks([tf.ones([2]), tf.ones([3]), tf.ones([2])])]
    [[2, 2], [3]]
    """
    rest, stacks = list(tensors), []
    for group in positions(tensors):
        stacks.append(stacked(tensors, group))
        for i in group:
            rest[i] = None
    return stacks + [tensor for tensor in rest if tensor is not None]


def unstacked(stack: tf.Tensor, scaled: Sequence[Scaled] = ()) -> list[tf.Tensor]:
    """Split a stack into its tensors, and note on each tensor which stack it was in.

    >>> [part.numpy().tolist() for part in unstacked(tf.constant([[1.0], [2.0]]))]
    [[1.0], [2.0]]

    Args:
        stack: a tensor whose first axis has a known size.
        scaled: if the tensors are unscaled gradients, the scaled gradients from which they were computed.
    """
    parts = tf.raw_ops.Unpack(value=stack, num=stack.shape.as_list()[0], axis=0)
    for position, (part, before) in enumerate(itertools.zip_longest(parts, scaled)):
        note_origin(part, StackMember(stack, position, before))
    return parts


def is_small(tensor: tf.Tensor) -> bool:
    """Return whether an operation on a tensor takes longer to start than to run. For unknown shapes, return False.

    >>> is_small(tf.ones([1000])), is_small(tf.ones([10_000]))
    (True, False)
    """
    values = tensor.shape.num_elements()
    return values is not None and values <= _SMALL


def fit_in_a_stack(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether the tensors together are small enough for one `tf.stack`.

    >>> fit_in_a_stack([tf.ones([1000])] * 200), fit_in_a_stack([tf.ones([1000, 1000])])
    (True, False)
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    return None not in sizes and sum(sizes) <= _TOGETHER


def are_small(gradients: Sequence[Any]) -> bool:
    """Return whether the dense gradients are so small in total that a step spends most of its time starting operations.

    >>> are_small([tf.ones([1000])] * 400), are_small([tf.ones([4_000_000])] * 4)
    (True, False)
    """
    return sum(g.shape.num_elements() or 0 for g in gradients if isinstance(g, tf.Tensor)) <= _HELD


# The origins of unscaled gradients, in a graph. ---------------------------------------------------------------------


class Scaled(NamedTuple):
    """A scaled gradient and its loss scale.

    >>> Scaled(tf.constant(8.0), tf.constant(4.0)).unscaled().numpy().item()
    2.0
    """

    values: tf.Tensor
    scale: tf.Tensor

    def unscaled(self, one: tf.Tensor | None = None) -> tf.Tensor:
        """Return the unscaled gradient.

        In a loop that replaces a conditional, `one` keeps XLA from dividing before the loop. The result has the same
        bits as a gradient from `core.scaling.unscale`, which uses the same operations.

        Args:
            one: the scalar 1 that `at_most_once` passes to its function, or None outside of such a function. See
                `kept_inside`.
        """
        return scaling.divide(kept_inside(self.values, one), self.scale)


def kept_inside(values: tf.Tensor, one: tf.Tensor | None) -> tf.Tensor:
    """Multiply values by 1 to keep XLA from moving computations on the values out of a loop.

    XLA does not know that the value of `one` is 1, so it does not remove the multiplication.

    >>> kept_inside(tf.constant(2.0), tf.constant(1.0)).numpy().item()
    2.0

    Args:
        values: a floating-point tensor.
        one: the scalar 1 that `at_most_once` passes to its function, or None outside of such a function.
    """
    return values if one is None else values * tf.cast(one, values.dtype)


class StackMember(NamedTuple):
    """One gradient in a stack: the stack, and the gradient's position in the stack.

    >>> StackMember(tf.constant([[1.0], [2.0]]), 1).position
    1
    """

    stack: tf.Tensor
    position: int
    #: The gradient before unscaling, if the whole stack was unscaled at once; otherwise None.
    scaled: Scaled | None = None


class Packed:
    """Gradients in the form that is cheapest to pass into a function: stacked if possible, and still scaled if large.

    >>> packed = Packed([tf.constant(2.0), None])
    >>> len(packed.tensors), [g is None for g in packed.unpacked()]
    (1, [False, True])

    Args:
        gradients: the gradients to apply: tensors, IndexedSlices or None.
        scaled: whether to pass scaled gradients. This must be False if the gradients have yet to be summed over the
            replicas.
        stacks: whether to pass stacks. This should be False under XLA, which compiles stacks slowly.
    """

    def __init__(self, gradients: Sequence[Any], scaled: bool = True, stacks: bool = True):
        self._count = len(gradients)
        origins = list(map(origin, gradients))
        if not stacks:
            origins = list(map(_alone, origins))
        whole_stacks = _whole_stacks(origins)
        self._stacked = [members for _, members in whole_stacks]
        stacked_positions = {i for members in self._stacked for i in members}
        self._alone = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in stacked_positions]
        #: The stacks, followed by the gradients that are not in a stack. Some of these gradients are `Scaled` objects.
        #: The unpacked gradients are finite if and only if the stacks, the other gradients and the quotients of the
        #: `Scaled` objects are finite.
        self.tensors: list[Any] = [stack for stack, _ in whole_stacks]
        for i in self._alone:
            self.tensors.append(origins[i] if scaled and isinstance(origins[i], Scaled) else gradients[i])

    def unpacked(self, one: tf.Tensor | None = None, tensors: Sequence[Any] | None = None) -> list[Any]:
        """Return the gradients, unpacked in the caller's graph.

        Args:
            one: the scalar 1 that `at_most_once` passes to its function, or None outside of such a function. See
                `kept_inside`.
            tensors: replacements for `self.tensors`, for example their sums over all replicas.
        """
        tensors = self.tensors if tensors is None else tensors
        gradients: list[Any] = [None] * self._count
        for stack, original, members in zip(tensors, self.tensors, self._stacked):
            stack.set_shape(original.shape)
            for i, part in zip(members, unstacked(stack)):
                gradients[i] = part
        for i, tensor in zip(self._alone, tensors[len(self._stacked) :]):
            if isinstance(tensor, Scaled):
                gradients[i] = tensor.unscaled(one)
                note_origin(gradients[i], tensor)
            else:
                gradients[i] = scaling.over_values(lambda values: kept_inside(values, one), tensor)
        return gradients

    def one_at_a_time(self, unpacked: Sequence[Any]) -> None:
        """Unscale each large gradient only after the previous one has been used, to keep only one of them in memory.

        Smaller gradients are not delayed, so that idle cores can unscale them.

        Args:
            unpacked: the gradients that `unpacked` returned. All operations that use them must already exist in the
                graph.
        """
        late = [i for i, tensor in zip(self._alone, self.tensors[len(self._stacked) :]) if isinstance(tensor, Scaled)]
        made = [unpacked[i] for i in late if (unpacked[i].shape.num_elements() or 0) > _HELD]
        for before, after in itertools.pairwise(made):
            users = before.consumers()
            if any(_depends_on(user, after.op) for user in users):
                # The gradients cannot be unscaled one at a time if each update depends on all of them, for example
                # through clipping by the global norm.
                return
            # `_add_control_inputs` is private. A test of the peak memory fails if the method stops working.
            after.op._add_control_inputs(users)


def _alone(made_from: Any) -> Any:
    """If `made_from` is a stack member with its own `Scaled` gradient, return that. Otherwise return `made_from`."""
    return made_from.scaled or made_from if isinstance(made_from, StackMember) else made_from


def _whole_stacks(origins: Sequence[Any]) -> list[tuple[tf.Tensor, list[int]]]:
    """Return the stacks whose gradients are all in `origins`, each with its gradients' positions in `origins`."""
    stacks: dict[int, tuple[tf.Tensor, list[tuple[int, int]]]] = {}
    for i, made_from in enumerate(origins):
        if isinstance(made_from, StackMember):
            stacks.setdefault(id(made_from.stack), (made_from.stack, []))[1].append((made_from.position, i))
    return [
        (stack, [i for _, i in sorted(members)])
        for stack, members in stacks.values()
        if sorted(position for position, _ in members) == list(range(stack.shape[0]))
    ]


def _depends_on(operation: Any, other: Any) -> bool:
    waiting, seen = [operation], set()
    while waiting:
        earlier = waiting.pop()
        if earlier is other:
            return True
        if earlier.name not in seen:
            seen.add(earlier.name)
            waiting += [tensor.op for tensor in earlier.inputs] + list(earlier.control_inputs)
    return False


# The twins. ---------------------------------------------------------------------------------------------------------


@faster(scaling.unscale)
def unscale(gradients: Iterable[Any], scale: tf.Tensor) -> list[Any]:
    """Unscale gradients, small ones in stacks. Record the scaled values of large ones; see `core.scaling.unscale`."""
    converted = scaling.floating(gradients)
    # Without a barrier, the graph optimizer would replace division by a constant scale with multiplication by the
    # scale's reciprocal.
    scale = optimization_barrier(tf.convert_to_tensor(scale), for_xla=True)
    result: list[Any] = [None] * len(converted)
    for group in positions(converted):
        # A stack needs no optimization barrier, because the graph optimizer does not merge operations across a stack.
        stack = scaling.divide(stacked(converted, group), scale)
        for i, part in zip(group, unstacked(stack, [Scaled(converted[i], scale) for i in group])):
            result[i] = part
    compiled_by_xla, late = in_xla_context(), "late unscaling" in tricks.in_use

    def unscaled_alone(values: tf.Tensor) -> tf.Tensor:
        values = optimization_barrier(values)
        quotient = scaling.divide(values, scale)
        # Unscaling is not delayed for float16 gradients. Otherwise the check would sum the scaled gradients, and their
        # sum often overflows.
        if late and values.dtype != tf.float16 and (compiled_by_xla or not is_small(values)):
            note_origin(quotient, Scaled(values, scale))
        return quotient

    return [scaling.over_values(unscaled_alone, g) if part is None else part for g, part in zip(converted, result)]


@faster(step.as_arguments)
def as_arguments(
    gradients: list[Any], to_compile: bool
) -> tuple[list[tf.Tensor], Callable[[list[tf.Tensor]], list[Any]]]:
    """Return stacks and scaled gradients to pass to a function; see `core.step.as_arguments`."""
    # In eager mode no gradients are packed, because `note_origin` does nothing in eager mode.
    if tf.executing_eagerly():
        return step.as_arguments.plain(gradients, to_compile)  # type: ignore[attr-defined]
    packed = Packed(gradients, stacks=not to_compile)
    flat = tf.nest.flatten(packed.tensors)
    # Several gradients share one scale tensor, which is passed only once.
    each = {id(tensor): tensor for tensor in flat}

    def back(tensors: list[tf.Tensor]) -> list[Any]:
        given = dict(zip(each, tensors))
        return packed.unpacked(tensors=tf.nest.pack_sequence_as(packed.tensors, [given[id(t)] for t in flat]))

    return list(each.values()), back


@faster(replicas.sum_over_replicas)
def sum_over_replicas(gradients: list[Any]) -> list[Any]:
    """Stack small gradients, and sum the stacks over the replicas; see `core.replicas.sum_over_replicas`."""
    plain = replicas.sum_over_replicas.plain  # type: ignore[attr-defined]
    if "stacked sums" not in tricks.in_use or not tf.distribute.has_strategy():
        return plain(gradients)
    packed = Packed(gradients, scaled=False)
    return packed.unpacked(tensors=plain(packed.tensors))
