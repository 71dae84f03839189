"""A step as one XLA cluster, whatever calls it: in eager mode, in a tf.function, in a replica."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas


class Clusters:
    """The functions that XLA compiles for the eager steps of an optimizer.

    >>> clusters = Clusters()
    >>> [clusters.call("double", lambda x: 2.0 * x, [tf.constant(2.0)]).numpy().item() for _ in range(2)]
    [4.0, 4.0]
    >>> len(clusters)
    1
    """

    def __init__(self) -> None:
        self._functions: dict[Hashable, Any] = {}
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._functions)

    def __deepcopy__(self, memo: dict[int, Any]) -> Clusters:
        return Clusters()  # functions hold the variables of the object that was copied

    def call(self, key: Hashable, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call a function, compiled by XLA.

        Args:
            key: of the function; in eager mode a function that was traced for an equal one is called in its place. In
                a graph each call is traced, as everything else in it.
            function: of tensors, which returns a tensor. XLA's errors show its name.
            arguments: tensors, lists of them, or None.

        Returns:
            What the function returns.
        """
        if not tf.executing_eagerly():
            return _compiled(function)(*arguments)
        if key not in self._functions:
            self._functions[key] = _compiled(function).get_concrete_function(*arguments)
            if len(self._functions) == _MANY:
                logging.warning(
                    "XLA compiled the %dth step of one optimizer: each new set of variables, and each new value of a "
                    "hyperparameter that is a Python number, needs one. Keep what changes from step to step in a "
                    "tf.Variable or a schedule, or leave out jit_compile=True.",
                    _MANY,
                )
        return self._functions[key](*arguments)

    def log_once(self, reason: str) -> None:
        """Log that steps are not compiled, once for each reason.

        Args:
            reason: what `obstacle` returned.
        """
        if reason not in self._logged:
            self._logged.add(reason)
            logging.warning("LossScaleOptimizer(jit_compile=True) takes steps that are not compiled: %s.", reason)


_MANY = 8


class Cluster(NamedTuple):
    """One step as a function that XLA compiles; called with the function and its arguments.

    >>> Cluster(Clusters(), "double")(lambda x: 2.0 * x, tf.constant(2.0)).numpy().item()
    4.0
    """

    clusters: Clusters
    #: All that the step is traced for, beside the types of its arguments. Not used in a graph.
    key: Hashable

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.clusters.call(self.key, function, arguments)


def joined(clusters: Sequence[Cluster | None]) -> Cluster | None:
    """Return one cluster for the steps of several optimizers; None if one of them is not compiled.

    >>> joined([Cluster(Clusters(), "a"), Cluster(Clusters(), "b")]).key
    ('a', 'b')
    >>> joined([Cluster(Clusters(), "a"), None]) is None
    True

    Args:
        clusters: those of the optimizers, at least one.
    """
    compiled = [each for each in clusters if each is not None]
    if len(compiled) < len(clusters):
        return None
    return Cluster(compiled[0].clusters, tuple(each.key for each in compiled))


def _compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


def obstacle(gradients: Sequence[Any], variables: Sequence[Any]) -> str | None:
    """Return why a step of these gradients cannot be one cluster; None if it can.

    >>> obstacle([tf.constant([1.0])], [tf.Variable([1.0])]) is None
    True

    Args:
        gradients: tensors, IndexedSlices or None.
        variables: one for each gradient.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "a legacy graph cannot call a compiled function"
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return "a gradient is sparse, and has another number of rows in each step"
    if not tf.distribute.has_strategy():
        devices = {getattr(variable, "device", "") for variable in variables} - {""}
        return "the variables are on several devices" if len(devices) > 1 else None
    if not replicas.can_write_apart():
        return f"{type(tf.distribute.get_strategy()).__name__} has no replicas that write their own variables"
    return None
