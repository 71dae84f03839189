"""Helpers for graphs. They find operations, detect compilation by XLA, and hide values from the graph optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

_FuncGraph: Any = tf.__internal__.FuncGraph
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
        for part in parts:
            operation = getattr(part, "op", part)
            if isinstance(operation, tf.Operation):
                collected.append(operation)
    return collected


def finished(result: Any) -> tf.Tensor:
    """Return a tensor that is True, and is computed after all operations in a structure.

    A branch of `tf.cond` can return it.
    """
    with tf.control_dependencies(operations(result)):
        return tf.constant(True)


def enclosing(graph: Any = None) -> list[Any]:
    """Return a graph and the graphs around it, innermost first. By default start from the graph being built, if any."""
    graphs: list[Any] = []
    if graph is None and not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def functions(graph: Any = None) -> list[Any]:
    """Return the functions among `enclosing(graph)`, and the TF1 graph around them if any."""
    if graph is None and tf.executing_eagerly():
        return []
    # The graphs of branches and loops are instances of subclasses of FuncGraph.
    has_session = not tf.compat.v1.executing_eagerly_outside_functions()
    return [
        graph
        for graph in enclosing(graph)
        if type(graph) is _FuncGraph or (has_session and not isinstance(graph, _FuncGraph))
    ]


def runs_in_order() -> bool:
    """Return whether operations run in program order, as in eager mode and in a tf.function.

    In a TF1 graph a session runs only the fetched operations and their dependencies.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return True
    return any(type(graph) is _FuncGraph for graph in enclosing())


def in_xla_context() -> bool:
    """Return whether XLA compiles the function that is being traced."""
    for graph in enclosing():
        # `_get_control_flow_context` is private, so a test asks for the result in each kind of function.
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
    return False


def outside_xla(act: Callable[[], Any]) -> tf.Tensor:
    """Call `act` in a branch of the graph that XLA does not run. Return a tensor that depends on the branch.

    A function may be compiled by XLA after it was traced. Under XLA, the `DeviceIndex` operation always returns the
    length of its list of devices. That index selects the default branch, which does nothing.
    """
    nothing = lambda: tf.constant(True)  # noqa: E731
    with tf.device("cpu:0"):
        on_cpu = tf.raw_ops.DeviceIndex(device_names=["CPU"])
        return tf.switch_case(on_cpu, [lambda: finished(act())], default=nothing)


def optimization_barrier(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor as a value that is opaque to the graph optimizer, but not to XLA.

    Without the barrier, the graph optimizer would turn `g * scale * (1 / scale)` into `g * (scale * (1 / scale))` in a
    tf.function. An overflow of `g * scale` would then go unnoticed.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def either(condition: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Return `one()` if a scalar condition is True, and otherwise `other()`, as tensors or structures of tensors.

    In eager mode only the result is computed. In a graph both are computed, and the result is selected.
    """
    if tf.executing_eagerly():
        return one() if condition else other()
    select = lambda first, second: first if first is second else tf.where(condition, first, second)  # noqa: E731
    return tf.nest.map_structure(select, one(), other())


def through_conditional(flag: tf.Tensor) -> tf.Tensor:
    """Return a bool scalar tensor unchanged, through a conditional that does nothing.

    If a branch of a `tf.cond` returns the result, XLA keeps the `tf.cond` as a conditional. Otherwise, if the branches
    contain only cheap operations, XLA runs both in every step and selects each variable's value.
    """
    return tf.cond(flag, lambda: flag, lambda: flag)


def notes(graph: Any) -> dict[Any, Any]:
    """Return a dict that belongs to a graph and is deleted with it. Its values may refer to the graph."""
    if not hasattr(graph, "_notes_of_tf_lossscale"):
        graph._notes_of_tf_lossscale = {}
    return graph._notes_of_tf_lossscale


def at_end_of_trace(act: Callable[[], None]) -> bool:
    """Call `act` at the end of the trace of the outermost function, unless an exception ends the trace.

    Without a trace, return False and do nothing.
    """
    # TensorFlow has no public method for this. A test fails if the private one is missing.
    add = next((graph._add_scope_exit_callback for graph in functions()[-1:] if isinstance(graph, _FuncGraph)), None)
    handled = sys.exc_info()[1]
    if add is not None:
        add(lambda: act() if sys.exc_info()[1] is handled else None)
    return add is not None


def ancestors(tensors: Any, origins_of: Callable[[tf.Tensor], Iterable[tf.Tensor]]) -> Iterator[tf.Tensor]:
    """Iterate over the tensors in a structure that belong to graphs, and the tensors that they were computed from.

    `origins_of` returns the tensors to go on to, which are some of `inputs_of` a tensor. An eager tensor has no known
    ancestors.
    """
    to_visit, seen = [each for each in tf.nest.flatten(tensors, expand_composites=True)], set()
    while to_visit:
        each = to_visit.pop()
        if id(each) in seen or not tf.is_symbolic_tensor(each):
            continue
        seen.add(id(each))
        yield each
        to_visit.extend(origins_of(each))


def inputs_of(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors that a tensor was computed from. For the input of a function, it is the tensor outside."""
    if tensor.op.type == "Placeholder":
        outer = captured(tensor)
        return [] if outer is None else [outer]
    # tf.custom_gradient passes the results of a function and its arguments through one IdentityN.
    return [tensor.op.inputs[tensor.value_index]] if tensor.op.type == "IdentityN" else [*tensor.op.inputs]


def captured(tensor: tf.Tensor) -> Any:
    """Return the tensor outside of a function, branch or loop that an input of it stands for. An argument has none."""
    return next((outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor), None)


def called_functions(op: tf.Operation, attribute: str) -> list[Any]:
    """Return the graphs of the functions that an attribute of an operation names, as far as they are known."""
    if attribute not in op.node_def.attr:
        return []
    value = op.node_def.attr[attribute]
    names = [each.name for each in value.list.func] or [value.func.name]
    # `_get_function` is private, so a test asks for the functions of each kind of operation.
    found = [op.graph._get_function(name) for name in names]
    return [each.graph for each in found if hasattr(each, "graph")]


def birth(tensor: Any) -> int | None:
    """Return a number that is larger for eager tensors that were created later. A tensor of a graph has none."""
    values = tensor.values if isinstance(tensor, (tf.IndexedSlices, tf.RaggedTensor)) else tensor
    return values._id if isinstance(values, tf.Tensor) and not tf.is_symbolic_tensor(values) else None
