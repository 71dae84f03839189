"""One step of a wrapper: builds the inner optimizer, and says how the core reduces, applies and skips."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.clusters import Cluster, obstacle
from tf_lossscale.core.graphs import compiled, operations, runs_in_order
from tf_lossscale.core.step import Part, step
from tf_lossscale.wrapper.family import Family
from tf_lossscale.wrapper.readings import names_of

#: Python attributes of a variable that a step depends on.
_TRAITS = ("constraint", "overwrite_with_gradient")


class Stepping(Family):
    """Takes the steps of a wrapper."""

    def _step(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> Any:
        self._require_graph_mode()
        part = self._part(gradients, variables, **kwargs)
        if self._loss_scale.defers(self, part):
            return self._step_result(None)
        result = step(self._loss_scale, part)
        if result is False:  # in eager mode only: the one that has the outcome at hand
            self._report_stall()
        return self._step_result(result)

    def _require_graph_mode(self) -> None:
        if not self._returns_operations and not runs_in_order():
            inner = type(self._optimizer)
            raise RuntimeError(
                f"{inner.__module__}.{inner.__name__} cannot train in graph mode: a Session would run only a part of "
                "its update. Wrap an optimizer of tf_keras.optimizers.legacy or tf.compat.v1.train, put the step into "
                "a tf.function, or leave out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()."
            )

    def _report_stall(self) -> None:
        replicas.once(lambda: self._stall.look(self, self._loss_scale))

    def _skip(self, count: bool) -> list[Any]:
        """Return the operations of a skipped step."""
        watched = self._stall.watch(self, self._loss_scale)
        with tf.control_dependencies(watched), replicas.own_copies(self._own_copies()):
            started = self._start_averages()
            with tf.control_dependencies(operations(started)):
                return [*watched, started, self._advance_iterations() if count else tf.no_op()]

    def _part(
        self,
        gradients: list[Any],
        variables: list[Any],
        *,
        scaled: bool,
        aggregate: bool,
        count_skipped: bool,
        **kwargs: Any,
    ) -> Part:
        """Build the inner optimizer, and return the parts of a step with these gradients."""
        if not tf.executing_eagerly():
            self.__dict__["_traced"] = True
        all_variables = not self._slots_need_gradients
        to_build = [v for g, v in zip(gradients, variables) if all_variables or g is not None]
        compiles = self._compiles(gradients, variables)
        with replicas.apart() if compiles else contextlib.nullcontext():
            if compiles:
                replicas.once(self._loss_scale.give_copies)
            self._build_once(to_build)
        cluster = self._cluster(gradients, variables, scaled, aggregate, count_skipped, kwargs) if compiles else None
        if scaled:
            gradients = self._unscale(gradients, variables, self._factor())

        def apply(reduced: list[Any]) -> Any:
            with replicas.own_copies(self._own_copies()):
                return self._apply_reduced(list(zip(reduced, variables)), **kwargs)

        return Part(
            gradients,
            reduce=lambda local: self._reduce(local, variables),
            apply=apply,
            skip=lambda: self._skip(count_skipped),
            aggregate=aggregate and self._sums_over_replicas,
            observe=self._observer(variables),
            cluster=cluster,
        )

    def _compiles(self, gradients: list[Any], variables: list[Any]) -> bool:
        """Return whether XLA compiles the step alone; False also if it compiles the caller as a whole."""
        if self._clusters is None or compiled():
            return False
        reason = self._obstacle() or obstacle(gradients, variables)
        if reason is not None:
            self._clusters.log_once(reason)
        return reason is None

    def _cluster(self, gradients: list[Any], variables: list[Any], *others: Any) -> Cluster:
        """Return the cluster of a step, with all Python objects that the step reads."""
        place: dict[int, int] = {}  # a gradient that is given twice is one argument of the compiled function
        types = [None if g is None else (g.dtype, g.shape, place.setdefault(id(g), len(place))) for g in gradients]
        traits = [[getattr(v, name, None) for name in _TRAITS] for v in variables]
        held = [tf.distribute.get_strategy(), types, variables, traits, others, self._loss_scale, self._optimizer]
        return Cluster(self._clusters, held, (*self._set_in_each_step, *self._loss_scale.not_in_a_step))

    def _build_once(self, variables: list[Any]) -> None:
        """Build the inner optimizer; in eager mode only if the variables are not those of the last step."""
        noted = tf.executing_eagerly() and not tf.distribute.has_strategy()
        these, last = [self._optimizer, *variables], self.__dict__.get("_built_for", [])
        if noted and len(last) == len(these) and all(each() is one for each, one in zip(last, these)):
            return
        self._build_inner(variables)
        self.__dict__["_built_for"] = [weakref.ref(one) for one in these] if noted else []

    def _observer(self, variables: list[Any]) -> Callable[..., Any] | None:
        diagnosis = self._diagnosis
        if diagnosis is None:
            return None
        names = names_of(variables)
        diagnosis.prepare(names)
        return lambda *outcome: diagnosis.record(names, *outcome)

    def _step_result(self, operation: Any) -> Any:
        """Return the result of `apply_gradients`: in a graph an operation or a tensor to wait for."""
        if tf.executing_eagerly():
            return self._eager_result()
        if not runs_in_order():
            return operation
        with tf.control_dependencies(operations(operation)):
            return tf.constant(True)  # a tf.function can return a tensor, but no operation
