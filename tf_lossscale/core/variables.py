"""Creates variables that are not trained, in every kind of graph and under every strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import enclosing, finished

if TYPE_CHECKING:
    from typing_extensions import Self


class Variables(tf.Module):
    """A collection of variables. Each variable is created when its name is first used."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        del args, kwargs
        this: Any = super().__new__(cls)
        # `_variables_by_name` maps (graph, name) to a variable. Each TF1 graph has its own variables. Eager mode and
        # tf.functions share one set of variables, for which the graph is None. `__new__` sets the attributes, so that a
        # subclass need not call this class's `__init__`. The attributes are set in `__dict__`, so that TensorFlow does
        # not track them.
        this.__dict__.update(_variables_by_name={}, _tracked_names=[])
        return this

    def _variable_named(
        self,
        name: str,
        initial_value: Any,
        dtype: tf.DType | None,
        tracked: bool = True,
        aggregation: tf.VariableAggregation | None = None,
    ) -> tf.Variable:
        """Return the variable with this name in the current graph.

        Create the variable if it is missing, or if it lacks copies for the replicas. Checkpoints contain it under its
        name if `tracked` is True. With an `aggregation`, each replica writes its own value, and a read outside of the
        replicas combines the values. By default the variable has the same value on all replicas.
        """
        graph = _graph_of_variables()
        variable = self._variables_by_name.get((graph, name))
        if variable is None or replicas.is_missing_copies(variable):
            with tf.init_scope():
                value = initial_value if variable is None else variable.numpy()
                variable = _new_variable(name, value, dtype, tracked, aggregation)
            self._variables_by_name[graph, name] = variable
            _announce(variable)
            if tracked:
                self._track_trackable(variable, name, overwrite=True)
                self._handle_deferred_dependencies(name=name, trackable=variable)
                if name not in self._tracked_names:
                    self._tracked_names.append(name)
        return variable

    def _is_missing(self, name: str) -> bool:
        """Return whether the variable does not exist yet, or has no copies for the replicas."""
        made = self._variables_by_name.get((_graph_of_variables(), name))
        return made is None or (tf.distribute.has_strategy() and replicas.is_missing_copies(made))

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables in the current graph that checkpoints include, and those that are attributes of a subclass."""
        tracked = tuple(self._tracked().values())
        # tf.Module also finds the variables that checkpoints do not contain, here and in loss scales inside this one.
        inside = [module for module in self.submodules if isinstance(module, Variables)]
        untracked = [variable for each in inside for variable in each._untracked()]
        hidden = {id(each) for each in (*self._all().values(), *untracked)}
        own = [each for each in super().variables if id(each) not in hidden]
        # tf.Module sorts by the names of attributes. Keras's files find a value by its position, so the order must not
        # change if an attribute is renamed.
        position = {id(value): i for i, value in enumerate(vars(self).values())}
        return (*tracked, *sorted(own, key=lambda each: position.get(id(each), len(position))))

    def _tracked(self) -> dict[str, tf.Variable]:
        made = self._all()
        return {name: made[name] for name in self._tracked_names if name in made}

    def _untracked(self) -> list[tf.Variable]:
        return [variable for name, variable in self._all().items() if name not in self._tracked_names]

    def _all(self) -> dict[str, tf.Variable]:
        graph = _graph_of_variables()
        return {name: variable for (where, name), variable in self._variables_by_name.items() if where is graph}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # A SavedModel must include all variables that its exported functions write, even if checkpoints do not include
        # them.
        own = self._tracked() if save_type == "checkpoint" else self._all()
        return {**super()._trackable_children(save_type, **kwargs), **own}


class LazyVariable:
    """A variable of a `Variables` object: declared in the class, created when it is first read.

    It takes the same arguments as `Variables._variable_named`. `initial_value` may be a function of the object.
    """

    def __init__(self, initial_value: Any, dtype: tf.DType, **options: Any):
        self._initial_value, self._dtype, self._options = initial_value, dtype, options

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        if holder is None:
            return self
        # Each step reads several variables, so the usual case takes no function call.
        variable = holder._variables_by_name.get((None, self._name))
        if variable is None or tf.distribute.has_strategy() or not tf.compat.v1.executing_eagerly_outside_functions():
            initial = self._initial_value(holder) if callable(self._initial_value) else self._initial_value
            variable = holder._variable_named(self._name, initial, self._dtype, **self._options)
        return variable

    def __set__(self, holder: Any, value: Any) -> None:
        raise AttributeError(f"`{self._name}` cannot be set as an attribute. Call its method `assign`.")


_in_legacy_graphs: list[weakref.ref[Any]] = []
_listeners: list[Callable[[Any], Any]] = []


def tell_of_new(listener: Callable[[Any], Any]) -> None:
    """Call a function with each variable that `Variables` objects have created or will create in TF1 graphs.

    A library with its own session, such as Keras 2, must know these variables in order to initialize them.
    """
    _listeners.append(listener)
    for variable in [reference() for reference in _in_legacy_graphs]:
        if variable is not None:
            listener(variable)


def _announce(variable: Any) -> None:
    if tf.compat.v1.executing_eagerly_outside_functions():
        return
    _in_legacy_graphs[:] = [reference for reference in _in_legacy_graphs if reference() is not None] + [
        weakref.ref(variable)
    ]
    for listener in _listeners:
        listener(variable)


def value_or_zero(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value. If the variable is in a TF1 graph and was not initialized, return zeros."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tf.convert_to_tensor(variable)
    return tf.cond(variable.is_initialized(), variable.read_value, lambda: tf.zeros(variable.shape, variable.dtype))


def add(variable: tf.Variable, change: Any) -> Any:
    """Add to a variable. If the variable is in a TF1 graph and was not initialized, start at 0."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return variable.assign(value_or_zero(variable) + change)
    # In a graph, `read_value=True` also adds the variable to the graph's variables.
    return variable.assign_add(change, read_value=not tf.executing_eagerly())


def unless(fine: tf.Tensor, change: Callable[[], Any]) -> list[tf.Operation]:
    """Run `change`, which returns the results of `assign`, unless `fine` is True.

    Return the operations for a session to run.
    """
    if tf.executing_eagerly():
        if not fine:
            change()
        return []
    return [tf.cond(fine, lambda: tf.constant(True), lambda: finished(change())).op]


def as_number(variable: Any) -> Any:
    """Return a variable's value as a Python number, or as a list of numbers, in eager mode."""
    return tf.convert_to_tensor(variable).numpy().tolist()


def _graph_of_variables() -> Any:
    """Return the TF1 graph being built, not the graph of a branch or loop in it. Without a TF1 graph, return None."""
    return None if tf.compat.v1.executing_eagerly_outside_functions() else enclosing()[-1]


def _new_variable(
    name: str, value: Any, dtype: tf.DType | None, tracked: bool, aggregation: tf.VariableAggregation | None
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
    if not tracked and not tf.executing_eagerly():
        # In a TF1 graph a variable that checkpoints do not contain must be local, because a Saver saves and restores
        # all global variables.
        local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(tf.constant(value, dtype), collections=local, use_resource=True, **shared)
    return tf.Variable(tf.constant(value, dtype), **shared)
