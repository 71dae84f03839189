"""Compiles optimizer steps with XLA, in eager mode and in tf.functions, and caches the compiled steps."""

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
    """The functions that XLA has compiled for one optimizer's steps.

    >>> steps = CompiledSteps()
    >>> [steps.compile(2.0, lambda x: 2.0 * x, tf.constant(2.0))(tf.constant(3.0)).numpy().item() for _ in range(2)]
    [6.0, 6.0]
    >>> len(steps)
    1
    """

    def __init__(self) -> None:
        # Maps the key of a step's constants to a pair: the compiled step, and weak references to the objects whose ids
        # are in the key. The compiled step is None if the step cannot be compiled. An entry is removed when one of the
        # objects is garbage-collected.
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

        In eager mode, all calls for which the objects in `reads` contain the same Python constants share one compiled
        function. In a graph the function is traced as a part of that graph.

        Args:
            reads: all Python objects that the function reads, except its arguments.
            function: a function of tensors that returns a tensor. XLA's error messages contain the function's name.
            *arguments: example arguments with which the function is traced: tensors, lists of tensors, or None.
            ignored: the names of attributes, on the objects in `reads`, that the function sets before it reads them.
                The values of these attributes may differ between calls.

        Returns:
            A compiled function with the same arguments. None if `function` cannot be compiled, if later calls to the
            compiled function might return wrong results, or if there are already too many versions. Each reason is
            logged once. If tracing failed only because the function filled a cache, nothing is logged, because the next
            trace may succeed.
        """
        if not tf.executing_eagerly():
            return _with_xla(function)
        identified: list[Any] = []
        try:
            key = (replicas.replica(), *constants.key(reads, ignored, identified))
        except constants.Unknown as unknown:
            self.log_once(f"{unknown}, and a compiled step would ignore its later changes")
            return None
        if key not in self._steps:
            if len(self._steps) >= _MOST * tf.distribute.get_strategy().num_replicas_in_sync:
                self.log_once(
                    f"there are already {_MOST} versions of the step, because each set of variables and each value of "
                    "a hyperparameter that is a Python number needs its own version. Keep values that change from step "
                    "to step in a tf.Variable or a schedule"
                )
                return None
            self._keep(key, self._traced(key, reads, function, arguments, ignored), identified)
        return self._steps[key][0]

    def _traced(
        self, key: tuple[Any, ...], reads: Any, function: Callable[..., Any], arguments: Any, ignored: Sequence[str]
    ) -> Any:
        """Trace a function. Return None if tracing fails, or if tracing changes any of the constants in the key."""
        with constants.put_back(reads):
            try:
                traced = _with_xla(function).get_concrete_function(*arguments)
                after = (key[0], *constants.key(reads, ignored))
            except constants.Unknown:
                after = ()
            except Exception as error:
                # A step that cannot be traced runs without XLA. If the step itself is faulty, it raises the error again
                # when it runs. An error that only tracing causes does not recur.
                self.log_once(f"TensorFlow cannot trace a step ({type(error).__name__}: {str(error).splitlines()[0]})")
                return None
        if after == key:
            return traced
        # If the key is longer after tracing, the function has filled a cache during tracing, and `put_back` has emptied
        # it. This step now runs without XLA and fills the cache again, so the next trace may succeed, and nothing is
        # logged.
        if len(after) <= len(key):
            self.log_once("each step sets a Python attribute of the optimizer, which a compiled step cannot do")
        return None

    def _keep(self, key: tuple[Any, ...], step: Any, identified: list[Any]) -> None:
        """Cache a compiled step until one of the objects whose ids are in its key is garbage-collected."""
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
    """What `CompiledSteps.compile` needs to know about an optimizer's step."""

    compiled_steps: CompiledSteps
    #: All Python objects that the step reads, except its arguments.
    reads: Any
    #: Names of attributes that each step sets before it reads them.
    ignored: tuple[str, ...] = ()


def joined(steps: Sequence[StepToCompile | None]) -> StepToCompile | None:
    """Combine several optimizers' steps into one step. If any of the steps is not compiled, return None.

    >>> joined([StepToCompile(CompiledSteps(), "a"), StepToCompile(CompiledSteps(), "b")]).reads
    ['a', 'b']
    >>> joined([StepToCompile(CompiledSteps(), "a"), None]) is None
    True

    Args:
        steps: a nonempty list with one item for each optimizer: its step, or None if its step is not compiled.
    """
    compiled = [step for step in steps if step is not None]
    if len(compiled) < len(steps):
        return None
    ignored = tuple(name for step in compiled for name in step.ignored)
    return StepToCompile(compiled[0].compiled_steps, [step.reads for step in compiled], ignored)


def _with_xla(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


def obstacle(gradients: Sequence[Any], variables: Sequence[Any]) -> str | None:
    """Return why a step with these gradients cannot be compiled as one function. If it can be compiled, return None.

    >>> obstacle([tf.constant([1.0])], [tf.Variable([1.0])]) is None
    True

    Args:
        gradients: tensors, IndexedSlices or None.
        variables: the variables, one for each gradient.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "a TF1 graph cannot call a compiled function"
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return "a gradient is sparse, and may have a different number of rows in each step"
    if not tf.distribute.has_strategy():
        devices = {getattr(variable, "device", "") for variable in variables} - {""}
        return "the variables are on several devices" if len(devices) > 1 else None
    if not replicas.can_write_independently():
        return f"{type(tf.distribute.get_strategy()).__name__} has no replicas that write their own variables"
    return None
