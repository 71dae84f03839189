"""Creates variables that are not trained, in every kind of graph and under every strategy."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import finished
from tf_lossscale.core.twins import has_faster_twin


class Variables(tf.Module):
    """A collection of variables, each of which is created when its name is first used.

    >>> weights = Variables("counts")
    >>> weights._weight("steps", 0, tf.int64).assign_add(1).numpy().item()
    1
    >>> weights._weight("steps", 0, tf.int64).numpy().item()
    1

    Args:
        name: the name of the `tf.Module`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        this = super().__new__(cls)
        # `_weights` maps (graph, name) to a variable. Each TF1 graph has its own variables. Eager mode and
        # tf.functions share one set of variables, for which the graph is None. `__new__` sets the attributes, so that a
        # subclass need not call this class's `__init__`. The attributes are set in `__dict__`, so that TensorFlow does
        # not track them.
        this.__dict__.update(_weights={}, _tracked_names=[])
        return this

    def _weight(
        self,
        name: str,
        initial_value: Any,
        dtype: tf.DType | None,
        tracked: bool = True,
        aggregation: tf.VariableAggregation | None = None,
    ) -> tf.Variable:
        """Return the variable with this name in the current graph. Create the variable on the first call.

        Args:
            name: the variable's name, which is also its name in checkpoints.
            initial_value: a Python number, or a list of Python numbers.
            dtype: the variable's dtype. None means the dtype of `initial_value`.
            tracked: whether checkpoints include the variable.
            aggregation: if given, each replica writes its own value, and a read outside of the replicas combines the
                values with this aggregation. By default the variable has the same value on all replicas.

        Returns:
            A non-trainable variable.
        """
        key = (None if tf.compat.v1.executing_eagerly_outside_functions() else _legacy_graph()), name
        made = self._weights.get(key)
        if made is None or (tf.distribute.has_strategy() and replicas.is_missing_copies(made)):
            with tf.init_scope():
                value = initial_value if made is None else made.numpy()
                variable = _variable(name, value, dtype, tracked, aggregation)
            self._weights[key] = variable
            _announce(variable)
            if tracked:
                self._track_trackable(variable, name, overwrite=True)
                self._handle_deferred_dependencies(name=name, trackable=variable)
                if name not in self._tracked_names:
                    self._tracked_names.append(name)
        return self._weights[key]

    def give_copies(self) -> None:
        """Recreate the variables for which `replicas.is_missing_copies` is true, and keep their values."""
        for name, variable in self._all().items():
            self._weight(name, None, variable.dtype, name in self._tracked_names)

    def move_to_mesh(self, mesh: Any) -> None:
        """Move the variables and their values to a DTensor mesh, where each device has a copy.

        Args:
            mesh: a `tf.experimental.dtensor.Mesh`.
        """
        dtensor = tf.experimental.dtensor
        for (graph, name), variable in list(self._weights.items()):
            layout = dtensor.Layout.replicated(mesh, rank=variable.shape.rank)
            value = dtensor.copy_to_mesh(variable.read_value(), layout)
            self._weights[graph, name] = dtensor.DVariable(value, trainable=False, name=name)
            if name in self._tracked_names:
                self._track_trackable(self._weights[graph, name], name, overwrite=True)

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables in the current graph that checkpoints include."""
        return tuple(self._tracked().values())

    def _tracked(self) -> dict[str, tf.Variable]:
        made = self._all()
        return {name: made[name] for name in self._tracked_names if name in made}

    def _all(self) -> dict[str, tf.Variable]:
        graph = None if tf.compat.v1.executing_eagerly_outside_functions() else _legacy_graph()
        return {name: variable for (where, name), variable in self._weights.items() if where is graph}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # A SavedModel must include all variables that its exported functions write, even if checkpoints do not include
        # them.
        own = self._tracked() if save_type == "checkpoint" else self._all()
        return {**super()._trackable_children(save_type, **kwargs), **own}


class LazyVariable(property):
    """A variable that belongs to a `Variables` object: declared in the class, created when it is first read.

    >>> class Counts(Variables):
    ...     steps = LazyVariable(0, tf.int64)
    >>> Counts().steps.assign_add(1).numpy().item()
    1

    Args:
        initial_value: a Python number, or a list of Python numbers.
        dtype: the variable's dtype.
        **options: `tracked` and `aggregation`, as in `Variables._weight`.
    """

    def __init__(self, initial_value: Any, dtype: tf.DType, **options: Any):
        self._arguments, self._options = (initial_value, dtype), options

    def __set_name__(self, owner: type, name: str) -> None:
        super().__init__(operator.methodcaller("_weight", name, *self._arguments, **self._options))


_in_legacy_graphs: list[weakref.ref[Any]] = []
_listeners: list[Callable[[Any], Any]] = []


def tell_of_new(listener: Callable[[Any], Any]) -> None:
    """Call a function with each variable that `Variables` objects have created or will create in TF1 graphs.

    A library with its own session, such as Keras 2, must know these variables in order to initialize them.

    >>> told = []
    >>> tell_of_new(told.append)
    >>> with tf.Graph().as_default():
    ...     _ = Variables("counts")._weight("steps", 0, tf.int64)
    >>> told[-1].name
    'steps:0'

    Args:
        listener: the function, which takes a variable.
    """
    _listeners.append(listener)
    for variable in [each() for each in _in_legacy_graphs]:
        if variable is not None:
            listener(variable)


def _announce(variable: Any) -> None:
    if tf.compat.v1.executing_eagerly_outside_functions():
        return
    _in_legacy_graphs[:] = [each for each in _in_legacy_graphs if each() is not None] + [weakref.ref(variable)]
    for listener in _listeners:
        listener(variable)


def value_or_zero(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value. If the variable is in a TF1 graph and was not initialized, return zeros.

    >>> value_or_zero(tf.Variable(3)).numpy().item()
    3

    Args:
        variable: a variable that checkpoints do not contain.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tf.convert_to_tensor(variable)
    return tf.cond(variable.is_initialized(), variable.read_value, lambda: tf.zeros(variable.shape, variable.dtype))


def add_one(variable: tf.Variable) -> Any:
    """Add one to a variable. If the variable is in a TF1 graph and was not initialized, start at 0.

    >>> variable = tf.Variable(3)
    >>> _ = add_one(variable)
    >>> variable.numpy().item()
    4

    Args:
        variable: a variable that checkpoints do not contain.

    Returns:
        In a graph, the result of `assign`.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        # In a graph, `read_value=True` also adds the variable to the graph's variables.
        return variable.assign_add(tf.constant(1, variable.dtype), read_value=not tf.executing_eagerly())
    return variable.assign(value_or_zero(variable) + 1)


# A call to this function runs its faster version in core/fast/branching.py.
@has_faster_twin
def unless(fine: tf.Tensor, change: Callable[[], Any]) -> list[tf.Operation]:
    """Change variables unless a condition is true.

    >>> variable = tf.Variable(3)
    >>> unless(tf.constant(False), lambda: variable.assign(4))
    []
    >>> variable.numpy().item()
    4

    Args:
        fine: a bool scalar; `change` runs if it is False.
        change: a function that assigns to variables, and returns the results of `assign`.

    Returns:
        The operations that a session has to run in a TF1 graph.
    """
    if tf.executing_eagerly():
        if not fine:
            change()
        return []
    return [tf.cond(fine, lambda: tf.constant(True), lambda: finished(change())).op]


def readable(variable: Any) -> Any:
    """Let `bool`, `int` and `float` read a variable's value, even if the variable's class does not support them.

    Python treats an object without `__bool__` as true. MirroredStrategy's variables do not define `__bool__`. Without
    this function, `if optimizer.last_step_skipped:` would be true after every step.

    >>> with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
    ...     skipped = tf.Variable(False)
    >>> bool(skipped), bool(readable(skipped))
    (True, False)

    Args:
        variable: any object. A distributed variable's class is replaced by a subclass.

    Returns:
        The same object.
    """
    cls: Any = type(variable)
    if isinstance(variable, tf.Variable) and not hasattr(cls, "__bool__"):
        variable.__class__ = _readable_class(cls)
    return variable


@functools.cache
def _readable_class(cls: Any) -> Any:
    class Readable(cls):
        def __bool__(self) -> bool:
            return bool(tf.convert_to_tensor(self))

        def __int__(self) -> int:
            return int(tf.convert_to_tensor(self))

        def __float__(self) -> float:
            return float(tf.convert_to_tensor(self))

    Readable.__name__ = Readable.__qualname__ = cls.__name__
    return Readable


def as_number(variable: Any) -> Any:
    """Return a variable's value as a Python number, in eager mode.

    >>> as_number(tf.Variable(3))
    3

    Args:
        variable: a scalar variable or tensor.
    """
    return tf.convert_to_tensor(variable).numpy().item()


def _legacy_graph() -> Any:
    """Return the TF1 graph that is being built, not the graph of a branch or loop inside it."""
    graph: Any = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def _variable(
    name: str, value: Any, dtype: tf.DType | None, saved: bool, aggregation: tf.VariableAggregation | None
) -> tf.Variable:
    # A variable without aggregation has the same value on all replicas. An assignment in the cross-replica context
    # writes all copies, and an assignment in a replica context writes only this replica's copy.
    mirrored = aggregation is None
    shared: dict[str, Any] = {
        "trainable": False,
        "name": name,
        "synchronization": tf.VariableSynchronization.AUTO if mirrored else tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.NONE if mirrored else aggregation,
    }
    if not saved and not tf.executing_eagerly():
        # In a TF1 graph a variable that is not saved must be local, because a Saver saves and restores all global
        # variables.
        local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(tf.constant(value, dtype), collections=local, use_resource=True, **shared)
    return readable(tf.Variable(tf.constant(value, dtype), **shared))
