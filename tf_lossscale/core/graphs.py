"""Helpers for graphs. They find operations, detect compilation by XLA, and hide values from the graph optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

_Function = TypeVar("_Function", bound=Callable[..., Any])


def do_not_convert(function: _Function) -> _Function:
    """Decorate a function that AutoGraph must not convert when a user's tf.function calls it.

    >>> do_not_convert(abs)(-1)
    1

    Args:
        function: the function. The decorated function has its signature, which editors show.
    """
    return tf.autograph.experimental.do_not_convert(function)


def operations(result: Any) -> list[Any]:
    """Return the operations in a result that was computed in a graph. In eager mode there are none.

    >>> operations(None)
    []

    Args:
        result: a structure of operations, tensors, per-replica values and other objects.

    Returns:
        A list of `tf.Operation`.
    """
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
    """Return a tensor that is always True, and is computed after all operations in `result` have run.

    A branch of `tf.cond` can return this tensor.

    >>> finished(None).numpy().item()
    True

    Args:
        result: a structure of operations, tensors and other objects, as in `operations`.

    Returns:
        A bool scalar tensor.
    """
    with tf.control_dependencies(operations(result)):
        return tf.constant(True)


def runs_in_order() -> bool:
    """Return whether operations run in program order, as in eager mode and in a tf.function.

    In a TF1 graph a session runs only the fetched operations and their dependencies.

    >>> runs_in_order()
    True
    >>> with tf.Graph().as_default():
    ...     runs_in_order()
    False
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
    """Return whether XLA compiles the function that is being traced.

    >>> in_xla_context()
    False
    >>> bool(tf.function(lambda: tf.constant(in_xla_context()), jit_compile=True)())
    True
    """
    if tf.executing_eagerly():
        return False
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        # `_get_control_flow_context` is private. The doctest of `in_xla_context` fails if the method's result changes.
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

    >>> optimization_barrier(tf.constant(1.0)).numpy().item()
    1.0

    Args:
        tensor: any tensor.

    Returns:
        A tensor with the same values. In eager mode, the same object.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def ancestors(tensor: Any, passes: Callable[[tf.Tensor], bool]) -> Iterator[tf.Tensor]:
    """Iterate over a tensor and the tensors that it was computed from, in the graph that contains it.

    >>> with tf.Graph().as_default():
    ...     product = tf.constant(2.0, name="two") * tf.constant(3.0, name="three")
    ...     print([each.op.name for each in ancestors(product, lambda tensor: True)])
    ['mul', 'three', 'two']

    Args:
        tensor: a tensor or IndexedSlices. An eager tensor has no known ancestors.
        passes: a function that returns whether to go on to the inputs of a tensor's operation.
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
