"""The replicas of the strategy in use: sums over them, and how a step writes their variables."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf


def several_replicas() -> bool:
    """Return whether the caller runs on more than one replica."""
    return tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def uses_merge_call() -> bool:
    """Return whether a step uses `merge_call` to continue in the cross-replica context.

    A step on a TPU uses no `merge_call`, because all replicas run a single program. The replicas sum the gradients and
    take the same branch in their replica contexts.
    """
    if not tf.distribute.has_strategy() or write_independently():
        return False
    tpu = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
    return not isinstance(tf.distribute.get_strategy(), tpu)


def workers_step_alone() -> bool:
    """Return whether the workers share the loss scale, but take steps independently.

    If so, one worker may change the loss scale during another worker's step.
    """
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def several_processes() -> bool:
    """Return whether other processes take part in the training."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return workers_step_alone()
    return len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync


def write_independently() -> bool:
    """Return whether each replica writes its own copies of the variables, so that a step needs no merge call.

    This is the case under a MirroredStrategy on GPUs, if XLA compiles the function that the replicas run.
    """
    return tf.distribute.has_strategy() and tf.__internal__.distribute.strategy_supports_no_merge_call()


def is_missing_copies(variable: tf.Variable) -> bool:
    """Return whether a variable was created outside the strategy's scope and the replicas need copies of it."""
    if not tf.distribute.has_strategy() or uses_merge_call():
        return False
    return not tf.distribute.get_strategy().extended.variable_created_in_scope(variable)


def scope_of(variable: tf.Variable) -> contextlib.AbstractContextManager[Any]:
    """Return the scope of the strategy under which a variable was created, unless a strategy is already in use."""
    strategy = strategy_of(variable)
    if strategy is None or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    return strategy.scope()


def strategy_of(variable: tf.Variable) -> Any:
    """Return the strategy under which a variable was created. If there was no strategy, return None."""
    return getattr(variable, "distribute_strategy", None) or getattr(variable, "_distribute_strategy", None)


def give_copies(holder: Any, names: Iterable[str], listed: list[Any]) -> None:
    """Recreate an optimizer's variables for which `is_missing_copies` is true, and keep their values.

    `listed` is the optimizer's list of its variables, in which new variables replace old ones.
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


@contextlib.contextmanager
def explaining_refused_merge_calls() -> Iterator[None]:
    """If TensorFlow refuses a `merge_call` in a `with` block, replace its error with one that names a remedy."""
    try:
        yield
    except RuntimeError as error:
        if "`merge_call` called while defining" not in str(error):
            raise
        raise _refused_merge_call() from error


def _refused_merge_call() -> RuntimeError:
    strategy = type(tf.distribute.get_strategy()).__name__
    if write_independently():
        return RuntimeError(
            f"A function that XLA compiles for several GPUs cannot use the merge_call of {strategy}, but the inner "
            "optimizer uses merge_call to apply gradients. Use an optimizer from tf.keras.optimizers or "
            "tf_keras.optimizers, or do not compile the function."
        )
    return RuntimeError(
        "A step with LossScaleOptimizer cannot be taken inside a tf.while_loop, tf.cond or tf.function that is inside "
        f"the function passed to strategy.run: the merge_call of {strategy} does not work there. Put the loop, the "
        "condition or the tf.function around strategy.run."
    )


def once(function: Callable[[], Any]) -> None:
    """Call a function once for all replicas, for example to create variables, in the cross-replica context."""
    # Directly inside strategy.scope() there is no replica context, and `context` is None.
    context = tf.distribute.get_replica_context()
    if context is None or not tf.distribute.has_strategy():
        function()
    elif uses_merge_call():

        def across_replicas(strategy: tf.distribute.Strategy) -> None:
            del strategy
            function()

        with explaining_refused_merge_calls():
            context.merge_call(across_replicas)
    else:
        _in_scope(tf.distribute.get_strategy(), function)


def _in_scope(strategy: tf.distribute.Strategy, function: Callable[[], Any]) -> None:
    """Call a function in a strategy's scope, in a new thread, because a thread cannot leave its replica context.

    Variables must not be created in a replica context: a checkpoint would restore them only on that replica.
    """

    def call() -> None:
        with strategy.scope():
            function()

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(call).result()


def local_copies_of(variable: Any) -> list[Any]:
    """Return the copy of a variable on the calling replica, or in the cross-replica context all local copies."""
    strategy = strategy_of(variable)
    if strategy is None:
        return [variable]
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return [_local_copy(variable)]
    return list(strategy.experimental_local_results(variable))


def local_copies(places: Callable[[], Iterable[tuple[Any, str]]]) -> contextlib.AbstractContextManager[None]:
    """Temporarily replace distributed variables with this replica's copies, if `write_independently()` is true.

    `places` returns an (object, attribute name) pair for each variable. A write to a distributed variable with an
    aggregation, such as `iterations`, synchronizes all replicas, which is impossible inside a tf.cond.
    """
    return _holding_local_copies(places()) if write_independently() else contextlib.nullcontext()


@contextlib.contextmanager
def _holding_local_copies(places: Iterable[tuple[Any, str]]) -> Iterator[None]:
    held = [(place.__dict__, name, place.__dict__[name]) for place, name in places]
    try:
        for attributes, name, variable in held:
            attributes[name] = _local_copy(variable)
        yield
    finally:
        for attributes, name, variable in held:
            attributes[name] = variable


def _local_copy(variable: Any) -> Any:
    # A worker has one copy of each variable for each of its replicas, and all workers have the same number of replicas.
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return copies[replica() % len(copies)]


def replica() -> int:
    """Return the index of the calling replica. Call this in a replica context."""
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


@contextlib.contextmanager
def overriding(holder: Any, **attributes: Any) -> Iterator[None]:
    """Override attributes of an object temporarily, in its `__dict__`.

    The threads of several replicas may be in a block for the same attributes at the same time. The last thread to leave
    the block restores the original values.
    """
    held = holder.__dict__
    # `with` blocks are counted separately for each set of attributes, so that blocks for different sets can be nested.
    names = frozenset(attributes)
    blocks = held.setdefault(_OVERRIDDEN, {})
    depth, before = blocks.get(names, (0, {name: held[name] for name in names if name in held}))
    held.update(attributes)
    blocks[names] = (depth + 1, before)
    try:
        yield
    finally:
        depth, before = blocks.pop(names)
        if depth > 1:
            blocks[names] = (depth - 1, before)
        else:
            for name in names:
                del held[name]
            held.update(before)
            if not blocks:
                del held[_OVERRIDDEN]


# The key in an object's `__dict__` for the dict that maps each set of overridden attributes to the number of open
# `overriding` blocks and the original values.
_OVERRIDDEN = "_overridden_by_tf_lossscale"


def require_replica_context(method: str) -> None:
    """Raise an error if a method that takes a step is called in a cross-replica context."""
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"{method}() must be called in a replica context. Call it inside the function that you give to "
            "strategy.run(), not directly under strategy.scope()."
        )


def sum_over_replicas(gradients: list[Any]) -> list[Any]:
    """Sum the gradients over all replicas. IndexedSlices stay sparse, and None stays None."""
    if not tf.distribute.has_strategy():
        return gradients
    sums: list[Any] = [None] * len(gradients)
    # One all-reduce is enough for each dtype, because TensorFlow concatenates the tensors.
    for dtype in {g.dtype: None for g in gradients if g is not None}:
        here = [i for i, g in enumerate(gradients) if g is not None and g.dtype == dtype]
        for i, total in zip(here, all_reduce([gradients[i] for i in here])):
            sums[i] = total
    return sums


def all_reduce(tensors: list[Any]) -> list[Any]:
    """Sum tensors or IndexedSlices of one dtype over all replicas. Call this in a replica context."""
    context: Any = tf.distribute.get_replica_context()
    if tf.compat.v1.executing_eagerly_outside_functions() or not uses_merge_call():
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))

    # In a TF1 graph `context.all_reduce` fails. It looks up the graph's variables by name in order to define a
    # gradient for its result, but does not find the variables' copies on the second replica.
    def across_replicas(strategy: tf.distribute.Strategy, *per_replica: Any) -> list[Any]:
        pairs = [(each, each) for each in per_replica]
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

    return list(context.merge_call(across_replicas, args=tuple(tensors)))
