"""Compiles optimizer steps with XLA, for eager mode, tf.functions and replicas, and caches the compiled steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_lossscale.core import constants, replicas

#: XLA compiles at most this many versions of an optimizer's step for each replica. All other versions run without XLA.
_MOST = 8


class CompiledSteps:
    """The functions that XLA has compiled for the steps of one optimizer.

    >>> steps = CompiledSteps()
    >>> [steps.compile(2.0, lambda x: 2.0 * x, tf.constant(2.0))(tf.constant(3.0)).numpy().item() for _ in range(2)]
    [6.0, 6.0]
    >>> len(steps)
    1
    """

    def __init__(self) -> None:
        # Maps the key of a step's constants to (compiled step, weak references to the objects whose ids are in the
        # key). The compiled step is None if the step cannot be compiled. An entry is removed when one of these objects
        # is garbage-collected.
        self._steps: dict[tuple[Any, ...], tuple[Any, list[weakref.ref[Any]]]] = {}
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return sum(step is not None for step, _ in self._steps.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledSteps:
        # A copy of an optimizer cannot use the compiled functions, because they contain the original optimizer's
        # variables.
        return CompiledSteps()

    def compile(
        self, reads: Any, function: Callable[..., Any], *arguments: Any, ignored: Sequence[str] = ()
    ) -> Callable[..., Any] | None:
        """Compile a function with XLA.

        In eager mode a function is compiled once for all calls with the same constants in `reads`. In a graph the
        function is traced as a part of that graph.

        Args:
            reads: all Python objects that the function reads, except its arguments.
            function: a function of tensors that returns a tensor. XLA's errors show its name.
            *arguments: the arguments to trace the function with: tensors, lists of tensors, or None.
            ignored: names of attributes in `reads` that the function sets before it reads them.

        Returns:
            A compiled function with the same arguments. If `function` cannot be compiled, or might return wrong results
            in later calls after compilation, the reason is logged once and None is returned.
        """
        if not tf.executing_eagerly():
            return _with_xla(function)
        identified: list[Any] = []
        try:
            key = (replicas.replica(), *constants.key(reads, ignored, identified))
        except constants.Unknown as unknown:
            self.log_once(f"{unknown}, and a compiled step would not notice what it changes")
            return None
        if key not in self._steps:
            if len(self._steps) >= _MOST * tf.distribute.get_strategy().num_replicas_in_sync:
                self.log_once(
                    f"there are {_MOST} already, because each set of variables and each value of a hyperparameter that "
                    "is a Python number needs one. Keep what changes from step to step in a tf.Variable or a schedule"
                )
                return None
            self._keep(key, self._traced(key, reads, function, arguments, ignored), identified)
        return self._steps[key][0]

    def _traced(
        self, key: tuple[Any, ...], reads: Any, function: Callable[..., Any], arguments: Any, ignored: Sequence[str]
    ) -> Any:
        """Trace a function. If tracing fails, or if each call sets Python attributes, return None."""
        with constants.put_back(reads):
            try:
                traced = _with_xla(function).get_concrete_function(*arguments)
                after = (key[0], *constants.key(reads, ignored))
            except constants.Unknown:
                after = ()
            except Exception as error:
                # A step that cannot be traced runs without XLA. It then raises the same error as the trace, unless the
                # error occurs only in tracing.
                self.log_once(f"TensorFlow cannot trace them ({type(error).__name__}: {str(error).splitlines()[0]})")
                return None
        if after == key:
            return traced
        # If the key is longer after tracing, tracing has filled a cache and the next trace may succeed. Nothing is
        # logged in this case.
        if len(after) <= len(key):
            self.log_once("each step sets a Python attribute of the optimizer, which a compiled step cannot do")
        return None

    def _keep(self, key: tuple[Any, ...], step: Any, identified: list[Any]) -> None:
        """Cache a compiled step until an object whose id is part of the key is garbage-collected."""
        drop = functools.partial(_drop, weakref.ref(self), key)
        self._steps[key] = step, [weakref.ref(each, drop) for each in identified]

    def log_once(self, reason: str) -> None:
        """Log a warning that steps are not compiled, once for each reason.

        Args:
            reason: why the steps are not compiled. The warning ends with this text.
        """
        if reason not in self._logged:
            self._logged.add(reason)
            logging.warning("LossScaleOptimizer(jit_compile=True) takes steps that are not compiled: %s.", reason)


def _drop(compiled_steps: weakref.ref[CompiledSteps], key: tuple[Any, ...], dead: weakref.ref[Any]) -> None:
    del dead
    living = compiled_steps()
    if living is not None:
        living._steps.pop(key, None)


class StepToCompile(NamedTuple):
    """What `CompiledSteps.compile` needs to know about a step of an optimizer."""

    compiled_steps: CompiledSteps
    #: All Python objects that the step reads, except its arguments.
    reads: Any
    #: Names of attributes that each step sets before it reads them.
    ignored: tuple[str, ...] = ()


def joined(steps: Sequence[StepToCompile | None]) -> StepToCompile | None:
    """Combine the steps of several optimizers into one. Return None if one of them is not compiled.

    >>> joined([StepToCompile(CompiledSteps(), "a"), StepToCompile(CompiledSteps(), "b")]).reads
    ['a', 'b']
    >>> joined([StepToCompile(CompiledSteps(), "a"), None]) is None
    True

    Args:
        steps: one or more items: the step of each optimizer, or None if the optimizer's step is not compiled.
    """
    compiled = [step for step in steps if step is not None]
    if len(compiled) < len(steps):
        return None
    ignored = tuple(name for step in compiled for name in step.ignored)
    return StepToCompile(compiled[0].compiled_steps, [step.reads for step in compiled], ignored)


def _with_xla(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


def obstacle(gradients: Sequence[Any], variables: Sequence[Any]) -> str | None:
    """Return why a step with these gradients cannot be compiled as one function. If it can, return None.

    >>> obstacle([tf.constant([1.0])], [tf.Variable([1.0])]) is None
    True

    Args:
        gradients: tensors, IndexedSlices or None.
        variables: the variables, one for each gradient.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "a legacy graph cannot call a compiled function"
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return "a gradient is sparse, and has another number of rows in each step"
    if not tf.distribute.has_strategy():
        devices = {getattr(variable, "device", "") for variable in variables} - {""}
        return "the variables are on several devices" if len(devices) > 1 else None
    if not replicas.can_write_independently():
        return f"{type(tf.distribute.get_strategy()).__name__} has no replicas that write their own variables"
    return None
