"""Helpers for graphs. They find operations, detect compilation by XLA, and hide values from the graph optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

_Function = TypeVar("_Function", bound=Callable[..., Any])


def do_not_convert(function: _Function) -> _Function:
    """Decorate a function that AutoGraph must not convert when a user's tf.function calls it.

    It keeps its signature.
    """
    return tf.autograph.experimental.do_not_convert(function)


def operations(result: Any) -> list[Any]:
    """Return the operations in a structure that was computed in a graph. In eager mode there are none."""
    collected: list[Any] = []
    for leaf in tf.nest.flatten(result):
        distributed = isinstance(leaf, tf.distribute.DistributedValues)
        parts = tf.distribute.get_strategy().experimental_local_results(leaf) if distributed else [leaf]
        for each in parts:
            operation = getattr(each, "op", each)
            if isinstance(operation, tf.Operation):
                collected.append(operation)
    return collected


def finished(result: Any) -> tf.Tensor:
    """Return a tensor that is True, and is computed after all operations in a structure.

    A branch of `tf.cond` can return it.
    """
    with tf.control_dependencies(operations(result)):
        return tf.constant(True)


def runs_in_order() -> bool:
    """Return whether operations run in program order, as in eager mode and in a tf.function.

    In a TF1 graph a session runs only the fetched operations and their dependencies.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return True
    graph: Any = tf.compat.v1.get_default_graph()
    # The graph of a branch or loop is an instance of a subclass of FuncGraph. Skip such graphs, and stop at the graph
    # of a tf.function.
    while graph is not None and type(graph) is not tf.__internal__.FuncGraph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def in_xla_context() -> bool:
    """Return whether XLA compiles the function that is being traced."""
    if tf.executing_eagerly():
        return False
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        # `_get_control_flow_context` is private, so a test asks for the result in each kind of function.
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def optimization_barrier(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor as a value that is opaque to the graph optimizer, but not to XLA.

    Without the barrier, the graph optimizer would turn `g * scale * (1 / scale)` into `g * (scale * (1 / scale))` in a
    tf.function. An overflow of `g * scale` would then go unnoticed.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def ancestors(tensor: Any, passes: Callable[[tf.Tensor], bool]) -> Iterator[tf.Tensor]:
    """Iterate over a tensor of a graph and the tensors that it was computed from.

    `passes` says whether to go on to the inputs of a tensor's operation. An eager tensor has no known ancestors.
    """
    to_visit, seen = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor], set()
    while to_visit:
        each = to_visit.pop()
        if id(each) in seen or not isinstance(getattr(each, "graph", None), tf.Graph):
            continue
        seen.add(id(each))
        yield each
        if passes(each):
            to_visit.extend(each.op.inputs)
