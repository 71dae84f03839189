"""Where the tensors of a traced function are on a machine with a GPU, by the kernels that TensorFlow registers for it.

The CUDA build registers its GPU kernels on every machine. A step is traced on a virtual CPU, `GPU`, in place of a GPU;
an operation that is placed on the first CPU was asked to run on the host.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import tensorflow as tf

GPU = "cpu:1"
_HOST = "CPU:0"
# The device of the kernels that XLA compiles for a GPU.
_COMPILED = "XLA_GPU_JIT"
# TensorFlow inlines calls and lowers conditionals and loops: these operations have no kernels of their own. The input
# that selects a branch is read on the host. Every other tensor is passed on, as the arguments of a function are: only
# int32, strings and handles of variables are in host memory then. So is a `Placeholder`, which is such an argument. The
# bodies are looked at like the graph that calls them.
_SELECTING = {"If": "cond", "StatelessIf": "cond", "Case": "branch_index", "StatelessCase": "branch_index"}
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")


class Use(NamedTuple):
    """An operation's tensor that is in host memory."""

    operation: str
    argument: str
    dtype: str
    within: tuple[str, ...] = ()  # the branches of conditionals around the operation, outermost first


def why_not():
    """Why this build of TensorFlow tells nothing about a GPU, or None."""
    return None if kernels("MatMul", "GPU") else "this build of TensorFlow registers no GPU kernels"


@functools.cache
def kernels(operation, device):
    """The kernels of an operation's type: [({attribute: types it may have}, names of arguments in host memory)].

    The device "DEFAULT" stands for every device that has no kernel of its own for these types.
    """
    from tensorflow.python.framework import kernels as registry  # private: a test looks at what it says

    if device == _COMPILED:
        _have_xla_register_its_kernels()
    return [
        ({each.name: set(each.allowed_values.list.type) for each in kernel.constraint}, set(kernel.host_memory_arg))
        for kernel in registry.get_registered_kernels_for_op(operation).kernel
        if kernel.device_type == device and not kernel.label
    ]


@functools.cache
def _have_xla_register_its_kernels():
    with tf.device(_HOST):
        tf.function(lambda: tf.constant(0), jit_compile=True)()


@contextlib.contextmanager
def as_if_there_were_a_gpu():
    """Traces on `GPU`, and lists a GPU to code that asks for the devices. What is traced so is not to be run."""

    def listing(kind):
        return lambda only=None: [kind(f"/device:{of}:0", of) for of in ("CPU", "GPU") if only in (None, of)]

    with contextlib.ExitStack() as stack:
        for config in (tf.config, tf.compat.v2.config):
            stack.enter_context(mock.patch.object(config, "list_physical_devices", listing(tf.config.PhysicalDevice)))
            stack.enter_context(mock.patch.object(config, "list_logical_devices", listing(tf.config.LogicalDevice)))
        stack.enter_context(tf.device(GPU))
        yield


def off_the_gpu(graph, compiled=False):
    """Returns a `Use` for each floating tensor, other than a scalar, that an operation has in host memory.

    Args:
        graph: of a concrete function.
        compiled: whether XLA compiles it.
    """
    return [
        Use(operation.type, name, tensor.dtype.name, within)
        for operation, within, inside in _operations(graph, compiled)
        for tensor, name, on_host in _tensors(operation, inside)
        if on_host and tensor.dtype.is_floating and tensor.shape.rank != 0
    ]


def read_by_the_host(graph):
    """Returns a `Use` for each tensor that is made on the GPU and read on the host, one for all that read it there.

    Args:
        graph: of a concrete function.
    """
    found, on_the_gpu = {}, set()
    for operation, within, compiled in _operations(graph):
        tensors = _tensors(operation, compiled)
        inputs, outputs = tensors[: len(operation.inputs)], tensors[len(operation.inputs) :]
        on_the_gpu.update(tensor.ref() for tensor, _, on_host in outputs if not on_host)
        if operation.type in _LOOPS:  # each round reads what the condition returns
            condition = operation.graph._get_function(operation.get_attr("cond").name).graph.outputs[0]
            found[condition.ref()] = Use(operation.type, "cond", condition.dtype.name, within)
        for tensor, name, on_host in inputs:
            if on_host and tensor.ref() in on_the_gpu:
                found.setdefault(tensor.ref(), Use(operation.type, name, tensor.dtype.name, within))
    return list(found.values())


def _operations(graph, compiled=False, within=()):
    """(operation, branches around it, whether XLA compiles it), also of the functions that a graph calls."""
    for operation in graph.get_operations():  # in the order in which they were made: what makes a tensor comes first
        yield operation, within, compiled
        inside = compiled or operation.node_def.attr["_XlaMustCompile"].b
        for attribute in operation.op_def.attr:
            if attribute.type in ("func", "list(func)"):
                around = (*within, attribute.name) if operation.type in _SELECTING else within
                for function in tf.nest.flatten(operation.get_attr(attribute.name)):
                    yield from _operations(graph._get_function(function.name).graph, inside, around)


def _tensors(operation, compiled):
    """(tensor, its argument's name, whether it is in host memory) of each input, then of each output."""
    tensors = [*operation.inputs, *operation.outputs]
    names = [*_names(operation, operation.op_def.input_arg), *_names(operation, operation.op_def.output_arg)]
    assert len(names) == len(tensors), operation
    on_host = _on_host(operation, compiled)
    return [(tensor, name, on_host(tensor, name)) for tensor, name in zip(tensors, names)]


def _on_host(operation, compiled):
    """Returns a function that tells whether a tensor, as the argument of this name, is in host memory."""
    if operation.type in ("Placeholder", *_SELECTING, *_CALLS, *_LOOPS):
        selecting = None if compiled else _SELECTING.get(operation.type)
        return lambda tensor, name: name == selecting or _is_passed_on_the_host(tensor)
    types = {name: {value.type, *value.list.type} - {0} for name, value in operation.node_def.attr.items()}
    if compiled:
        on_host = _host_arguments(operation.type, types, _COMPILED)
    elif operation.device.endswith(_HOST) or not _variables_can_be_on_a_gpu(operation, types):
        on_host = None
    else:
        on_host = _host_arguments(operation.type, types, "GPU", "DEFAULT")
    return lambda tensor, name: on_host is None or name in on_host


def _names(operation, arguments):
    """The argument's name for each tensor, of which an argument that is a list has several."""
    for argument in arguments:
        if argument.number_attr:
            number = operation.get_attr(argument.number_attr)
        else:
            number = len(operation.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1
        yield from [argument.name] * number


def _host_arguments(operation, types, *devices):
    """What the first kernel for these types has in host memory; None if there is no such kernel."""
    for device in devices:
        for constraints, on_host in kernels(operation, device):
            if all(types[name] <= allowed for name, allowed in constraints.items()):
                return on_host
    return None


def _is_passed_on_the_host(tensor):
    return _host_arguments("_Arg", {"T": {tensor.dtype.as_datatype_enum}}, "GPU", "DEFAULT") != set()


def _variables_can_be_on_a_gpu(operation, types):
    """Whether the variables that an operation takes can be on a GPU. One of int32 cannot: it has no kernel there."""
    dtype = types.get("dtype") or types.get("T")
    if dtype is None or all(tensor.dtype != tf.resource for tensor in operation.inputs):
        return True
    return _host_arguments("VarHandleOp", {"dtype": dtype}, "GPU", "DEFAULT") is not None
