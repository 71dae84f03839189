"""One step across replicas: reduce, agree, apply or skip under one tf.cond."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core import finite as finite_lib
from tf_lossscale.core import groups, origins, replicas
from tf_lossscale.core.branches import Branch, either, operations
from tf_lossscale.core.state import LossScale

Gradients = list[Any]


class Part(NamedTuple):
    """What one optimizer brings to a step.

    >>> weight = tf.Variable(1.0)
    >>> part = Part([tf.constant(0.25)], reduce=list, apply=lambda gradients: weight.assign_sub(gradients[0]))
    >>> part.aggregate
    True
    """

    #: This replica's, tensors or IndexedSlices or None.
    gradients: Gradients
    #: Sums them over the replicas, in a replica context.
    reduce: Callable[[Gradients], Gradients]
    #: Applies reduced gradients without reducing them again, in a replica context.
    apply: Callable[[Gradients], Any]
    #: What a skipped step still does, in a cross-replica context where there is one.
    skip: Callable[[], Any] = lambda: None
    #: Whether the gradients still have to be summed over the replicas.
    aggregate: bool = True
    #: Notes (applied, the reduced gradients, what was judged of each), after each step, where it is to be noted.
    observe: Callable[[tf.Tensor, Gradients, Gradients], Any] | None = None


@replicas.explains_where_replicas_cannot_meet
def step(loss_scale: LossScale, part: Part) -> Any:
    """Applies the gradients on all replicas, or skips them on all.

    >>> from tf_lossscale.core.state import DynamicLossScale
    >>> weight = tf.Variable(1.0)
    >>> part = Part([tf.constant(0.25)], reduce=list, apply=lambda gradients: weight.assign_sub(gradients[0]))
    >>> step(DynamicLossScale(), part)
    True
    >>> weight.numpy().item()
    0.75

    Args:
        loss_scale: decides, and is moved once.
        part: the gradients, and what is done with them.

    Returns:
        In eager mode whether the step was applied; in a legacy graph the operation to run.
    """
    gradients = part.reduce(part.gradients) if part.aggregate else part.gradients
    if not loss_scale.may_skip:
        done = part.apply(gradients)
        return True if tf.executing_eagerly() else done
    small, agreed = groups.are_small(gradients), None
    if not part.aggregate and replicas.several_replicas():
        agreed = _agree(gradients, exactly=part.observe is not None)

    def skip(_: Any) -> list[Any]:
        done = part.skip()  # may raise: then nothing is counted
        with tf.control_dependencies([] if tf.executing_eagerly() else operations(done)):
            return [done, loss_scale.skip()]

    def decide(local: Gradients, judged: Gradients, apply: Branch) -> Any:
        applied, known, done = loss_scale.check(judged), None, []
        if tf.executing_eagerly():
            known = bool(applied)  # the one wait for the device
            (apply if known else skip)(None)
        else:
            done = either(applied, apply, skip, as_one_call=small)
        with tf.control_dependencies(done):
            recorded = loss_scale.record(applied)
            if part.observe is not None:
                recorded = [recorded, part.observe(applied, local, judged)]
            return _group(recorded) if known is None else known

    as_they_are = tf.executing_eagerly() or part.observe is not None or loss_scale.looks_at_values
    if not replicas.meet():
        if agreed or as_they_are:
            return decide(gradients, agreed or gradients, lambda _: part.apply(gradients))
        packed = origins.Packed(gradients)
        return decide(gradients, packed.tensors, lambda one: _unpack_and(part.apply, packed, one))

    given, apply = gradients, part.apply
    if not as_they_are:
        stacks = origins.Packed(gradients, scaled=False)
        given, apply = stacks.tensors, lambda tensors: part.apply(stacks.unpacked(tensors=tensors))

    def across_replicas(strategy: tf.distribute.Strategy, per_replica: Gradients, judged: Any) -> Any:
        local, judged = ([_first(strategy, g) for g in each or []] for each in (per_replica, judged))
        everywhere = functools.partial(strategy.extended.call_for_each_replica, apply, args=(per_replica,))
        return decide(local, judged or local, lambda _: everywhere())

    return tf.distribute.get_replica_context().merge_call(across_replicas, args=(given, agreed))


def _unpack_and(apply: Callable[[Gradients], Any], packed: origins.Packed, one: tf.Tensor | None) -> Any:
    gradients = packed.unpacked(one)
    done = apply(gradients)
    if not groups.compiled():
        packed.one_by_one(gradients)
    return done


def joined(parts: list[Part]) -> Part:
    """Returns the parts of several optimizers as one, which is applied or skipped as a whole.

    >>> weights = [tf.Variable(1.0), tf.Variable(2.0)]
    >>> parts = [Part([tf.constant(0.5)], reduce=list, apply=lambda g, w=w: w.assign_sub(g[0])) for w in weights]
    >>> together = joined(parts)
    >>> _ = together.apply(together.gradients)
    >>> [weight.numpy().item() for weight in weights]
    [0.5, 1.5]

    Args:
        parts: at least one; all of them summed over the replicas already, or none.

    Returns:
        A part.
    """
    ends = list(itertools.accumulate(len(part.gradients) for part in parts))

    def each_of(gradients: Gradients) -> Iterator[Gradients]:
        return (gradients[end - len(part.gradients) : end] for part, end in zip(parts, ends))

    def reduce(gradients: Gradients) -> Gradients:
        return [g for part, own in zip(parts, each_of(gradients)) for g in part.reduce(own)]

    def apply(gradients: Gradients) -> Any:
        return [part.apply(own) for part, own in zip(parts, each_of(gradients))]

    def skip() -> Any:
        return [part.skip() for part in parts]

    def observe(applied: tf.Tensor, gradients: Gradients, judged: Gradients) -> Any:
        each = zip(parts, each_of(gradients), each_of(judged))
        return [part.observe(applied, *own) for part, *own in each if part.observe is not None]

    observes = any(part.observe is not None for part in parts)
    gradients = [g for part in parts for g in part.gradients]
    return Part(gradients, reduce, apply, skip, parts[0].aggregate, observe if observes else None)


def _agree(gradients: Gradients, exactly: bool) -> Gradients:
    """In place of gradients what all replicas judge by: zero for a finite one, else NaN, or exactly infinity or NaN.

    Unless it has to be exact, one number stands for all.
    """
    if exactly:
        alone = [finite_lib.kind(g) for g in gradients if g is not None]
    else:
        alone = [tf.where(finite_lib.all_finite(gradients), 0.0, float("nan"))]
    context = tf.distribute.get_replica_context()
    total = iter(tf.unstack(context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(alone))))
    return [None if g is None else next(total) for g in gradients] if exactly else list(total)


def _first(strategy: tf.distribute.Strategy, per_replica: Any) -> Any:
    return None if per_replica is None else strategy.experimental_local_results(per_replica)[0]


def _group(result: Any) -> Any:
    return None if tf.executing_eagerly() else tf.group(*operations(result))
