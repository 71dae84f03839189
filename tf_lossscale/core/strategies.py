"""What the replicas of the strategy in use can do: meet within a step, or write apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf


def several_replicas() -> bool:
    """Whether the caller runs on more than one replica.

    >>> several_replicas()
    False
    """
    return tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def meet() -> bool:
    """Whether a step is taken in a cross-replica context, from which each replica is called once more.

    A TPU's replicas are one program: they reduce and branch in their replica context, all alike.

    >>> meet()
    False
    """
    if not tf.distribute.has_strategy() or tf.__internal__.distribute.strategy_supports_no_merge_call():
        return False
    tpu = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
    return not isinstance(tf.distribute.get_strategy(), tpu)


def workers_step_alone() -> bool:
    """Whether workers share the variables but not their steps: one may move the scale amid a step of another.

    >>> workers_step_alone()
    False
    """
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def write_apart() -> bool:
    """Whether each replica writes its own copies of the variables, since replicas cannot meet within the step.

    >>> write_apart()
    False

    Returns:
        True under MirroredStrategy where XLA compiles the function that the replicas run on GPUs.
    """
    return several_replicas() and tf.__internal__.distribute.strategy_supports_no_merge_call()


def is_missing_copies(variable: tf.Variable) -> bool:
    """Whether replicas do not meet, but the variable was made outside the strategy's scope and has one copy for all.

    >>> is_missing_copies(tf.Variable(1.0))
    False

    Args:
        variable: of the loss scale or of an optimizer.
    """
    if not tf.distribute.has_strategy() or meet():
        return False
    return not tf.distribute.get_strategy().extended.variable_created_in_scope(variable)


def give_copies(holder: Any, names: Iterable[str], listed: list[Any]) -> None:
    """Has an object's variables made anew, with their values, where `is_missing_copies` says so.

    >>> class Count:
    ...     steps = None
    >>> give_copies(Count, ["steps"], [])

    Args:
        holder: an optimizer.
        names: of attributes; those that are no variables are left alone.
        listed: the holder's list of its variables, which is changed as well.
    """
    for name in names:
        old = getattr(holder, name, None)
        if not isinstance(old, tf.Variable) or not is_missing_copies(old):
            continue
        with tf.init_scope():
            new = tf.Variable(
                old.numpy(), trainable=False, dtype=old.dtype, aggregation=old.aggregation, name=old.name.split(":")[0]
            )
            setattr(holder, name, new)
            listed[:] = [new if each is old else each for each in listed]


def once(function: Callable[[], Any]) -> None:
    """Calls a function once for all replicas, not once on each: variables are made so.

    >>> calls = []
    >>> once(lambda: calls.append(1))
    >>> calls
    [1]

    Args:
        function: takes nothing; runs in a cross-replica context where there is one.
    """
    if several_replicas() and meet():

        def across_replicas(strategy: tf.distribute.Strategy) -> None:
            del strategy
            function()

        tf.distribute.get_replica_context().merge_call(across_replicas)
    else:
        function()


@contextlib.contextmanager
def own_copies(places: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Has objects hold this replica's copies of their variables, where replicas write apart.

    Otherwise each write would have to be agreed upon by all replicas, which cannot be done inside a tf.cond.

    >>> class Count:
    ...     steps = None
    >>> with own_copies([(Count, "steps")]):
    ...     pass

    Args:
        places: (object, attribute) pairs; the attribute is a variable.
    """
    if not write_apart():
        yield
        return
    held = [(place.__dict__, name, place.__dict__[name]) for place, name in places]
    try:
        for attributes, name, variable in held:
            attributes[name] = _own_copy(variable)
        yield
    finally:
        for attributes, name, variable in held:
            attributes[name] = variable


def _own_copy(variable: Any) -> Any:
    # A worker has as many replicas as it has copies, and all workers have equally many.
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return copies[int(replica) % len(copies)]
