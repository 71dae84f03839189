"""One step: reduce, agree, apply or skip on all replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tf_lossscale.core import clusters, finite, replicas
from tf_lossscale.core.graphs import finished, operations
from tf_lossscale.core.scaling import over_values
from tf_lossscale.core.state import LossScale
from tf_lossscale.core.twins import faster_in

Gradients = list[Any]


class Part(NamedTuple):
    """The part of one optimizer in a step.

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
    #: Does what a skipped step still does, in a cross-replica context where there is one.
    skip: Callable[[], Any] = lambda: None
    #: Whether the gradients still have to be summed over the replicas.
    aggregate: bool = True
    #: Optional callback after each step: (applied, reduced gradients, evidence of whether each is finite).
    observe: Callable[[tf.Tensor, Gradients, Gradients], Any] | None = None
    #: Has XLA compile the step; None if the step is not to be compiled.
    cluster: clusters.Cluster | None = None


@replicas.explains_where_replicas_cannot_meet
def step(loss_scale: LossScale, part: Part) -> Any:
    """Apply the gradients on all replicas, or skip them on all.

    >>> from tf_lossscale.core.state import DynamicLossScale
    >>> weight = tf.Variable(1.0)
    >>> part = Part([tf.constant(0.25)], reduce=list, apply=lambda gradients: weight.assign_sub(gradients[0]))
    >>> step(DynamicLossScale(), part)
    True
    >>> weight.numpy().item()
    0.75

    Args:
        loss_scale: decides, and is moved once.
        part: the gradients, and how they are reduced and applied.

    Returns:
        In eager mode whether the step was applied; in a legacy graph the operation to run.
    """
    gradients = part.reduce(part.gradients) if part.aggregate else part.gradients
    evidence = None
    if loss_scale.may_skip and not part.aggregate and replicas.several_replicas():
        evidence = _agreed(gradients, part.observe is not None, loss_scale.reads_gradients)
    if part.cluster is None:
        return _take(loss_scale, part, gradients, evidence)
    return _take_compiled(part.cluster, loss_scale, part, gradients, evidence)


def _take(loss_scale: LossScale, part: Part, gradients: Gradients, evidence: Gradients | None) -> Any:
    if not loss_scale.may_skip:
        done = part.apply(gradients)
        return True if tf.executing_eagerly() else done
    decide = functools.partial(_decide, loss_scale, part)
    if replicas.meet():
        return _decide_together(decide, gradients, evidence, part.apply)
    return decide(gradients, gradients, evidence, part.apply)


def _take_compiled(
    cluster: clusters.Cluster, loss_scale: LossScale, part: Part, gradients: Gradients, evidence: Gradients | None
) -> Any:
    """Take the step in one function that XLA compiles; each replica takes it with its own copies of the variables.

    It is taken without XLA if the function might not do in later steps what it does in this one.
    """
    tensors, gradients_of = as_arguments(gradients, True)

    def LossScaleOptimizer_with_jit_compile(tensors: list[tf.Tensor], evidence: Gradients | None) -> tf.Tensor:
        done = _take(loss_scale, part, gradients_of(tensors), evidence)
        with tf.control_dependencies(operations(done)):
            return tf.logical_not(loss_scale.last_step_skipped) if loss_scale.may_skip else tf.constant(True)

    with replicas.apart():
        compiled = cluster.compiled(LossScaleOptimizer_with_jit_compile, tensors, evidence)
        applied = None if compiled is None else compiled(tensors, evidence)
    if applied is None:
        return _take(loss_scale, part, gradients, evidence)
    return bool(applied) if tf.executing_eagerly() else applied


@faster_in("packing")
def as_arguments(gradients: Gradients, to_compile: bool) -> tuple[list[Any], Callable[[list[Any]], Gradients]]:
    """Return the tensors that a function needs to work on gradients, and what makes gradients of them there.

    >>> tensors, gradients_of = as_arguments([None, tf.constant(2.0)], False)
    >>> len(tensors), gradients_of([tf.constant(3.0)])[1].numpy().item()
    (1, 3.0)

    Args:
        gradients: tensors, IndexedSlices or None.
        to_compile: whether XLA compiles the function.

    Returns:
        Tensors, and a function of as many tensors that returns gradients.
    """

    def back(tensors: list[tf.Tensor]) -> Gradients:
        each = iter(tensors)
        return [None if gradient is None else next(each) for gradient in gradients]

    return [gradient for gradient in gradients if gradient is not None], back


def _decide(
    loss_scale: LossScale,
    part: Part,
    given: list[Any],
    local: Gradients,
    evidence: Gradients | None,
    apply: Callable[[Any], Any],
) -> Any:
    """Apply or skip what is given: gradients, or those of each replica, of which one replica's are local."""
    evidence = local if evidence is None else evidence
    applied = loss_scale.check(evidence)

    def skip() -> list[Any]:
        done = part.skip()  # may raise: then nothing is counted
        with tf.control_dependencies(operations(done)):
            return [done, loss_scale.skip()]

    def record() -> list[Any]:
        recorded = loss_scale.record(applied)
        return recorded if part.observe is None else [recorded, part.observe(applied, local, evidence)]

    if tf.executing_eagerly():
        known = bool(applied)  # the one wait for the device
        apply(given) if known else skip()
        record()
        return known
    with tf.control_dependencies(apply_or_skip(applied, given, apply, skip)):
        return tf.group(*operations(record()))


@faster_in("branching")
def apply_or_skip(
    applied: tf.Tensor, gradients: list[Any], apply: Callable[[Any], Any], skip: Callable[[], Any]
) -> list[Any]:
    """Apply gradients under a condition, in a graph.

    >>> weight = tf.Variable(1.0)
    >>> @tf.function
    ... def take(applied):
    ...     apply_or_skip(applied, [tf.constant(0.25)], lambda gradients: weight.assign_sub(gradients[0]), lambda: None)
    >>> take(tf.constant(False))
    >>> take(tf.constant(True))
    >>> weight.numpy().item()
    0.75

    Args:
        applied: bool scalar tensor.
        gradients: given to `apply`.
        apply: called in the branch that applies.
        skip: called in the branch that skips.

    Returns:
        Tensors, for what follows to wait for.
    """
    return [tf.cond(applied, lambda: finished(apply(gradients)), lambda: finished(skip()))]


def _decide_together(
    decide: Callable[..., Any], gradients: Gradients, evidence: Gradients | None, apply: Callable[[Gradients], Any]
) -> Any:
    """Decide once for all replicas, in the cross-replica context, from which each replica then applies its gradients.

    Args:
        decide: a function of the gradients of each replica, those of the first one, the evidence, and of a function
            that applies gradients on each replica.
        gradients: this replica's, reduced: equal on all.
        evidence: of whether they are finite, if it is not the gradients themselves.
        apply: applies gradients, in a replica context.

    Returns:
        The result of `decide`.
    """
    tensors, gradients_of = as_arguments(gradients, False)

    def in_cross_replica_context(strategy: tf.distribute.Strategy, given: list[Any], evidence: Any) -> Any:
        def everywhere(given: list[Any]) -> Any:
            return strategy.extended.call_for_each_replica(lambda own: apply(gradients_of(own)), args=(given,))

        local = gradients_of(_first(strategy, given))
        return decide(given, local, evidence and _first(strategy, evidence), everywhere)

    return tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(tensors, evidence))


def _first(strategy: tf.distribute.Strategy, per_replica: list[Any]) -> list[Any]:
    return [None if each is None else strategy.experimental_local_results(each)[0] for each in per_replica]


def _agreed(gradients: Gradients, exactly: bool, all_values: bool) -> Gradients:
    """Return evidence that all replicas share: 0 for a finite gradient, else NaN, or exactly infinity or NaN.

    Unless it has to be exact, one number stands for all. A loss scale that reads the gradients gets these, which the
    caller has summed over the replicas, with the infinity or NaN that one of the replicas has.
    """
    if not exactly and not all_values:
        alone = tf.where(finite.all_finite(gradients), 0.0, float("nan"))
        return replicas.all_reduce([alone])
    kinds = tf.stack([finite.kind(g) for g in gradients if g is not None])
    [summed] = replicas.all_reduce([kinds])
    total = iter(tf.unstack(summed))
    agreed = [None if g is None else next(total) for g in gradients]
    if not all_values:
        return agreed

    def with_kind(gradient: Any, kind: Any) -> Any:
        return over_values(lambda values: values + tf.cast(kind, values.dtype), gradient)

    return list(map(with_kind, gradients, agreed))


def joined(parts: list[Part]) -> Part:
    """Return the parts of several optimizers as one, which is applied or skipped as a whole.

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

    def observe(applied: tf.Tensor, gradients: Gradients, evidence: Gradients) -> Any:
        each = zip(parts, each_of(gradients), each_of(evidence))
        return [part.observe(applied, *own) for part, *own in each if part.observe is not None]

    observes = any(part.observe is not None for part in parts)
    gradients = [g for part in parts for g in part.gradients]
    cluster = clusters.joined([part.cluster for part in parts])
    return Part(gradients, reduce, apply, skip, parts[0].aggregate, observe if observes else None, cluster)
