"""The loss scale of a wrapper: its state, and the report of overflows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.skipping import kinds_on_all_replicas
from tf_lossscale.core.variables import as_number
from tf_lossscale.diagnosis.overflow import Diagnosis, Overflow, OverflowReport
from tf_lossscale.libraries import keras_versions
from tf_lossscale.libraries.models import name_of, tensors_of, unused
from tf_lossscale.wrapper.forwarding import Forwarding

if TYPE_CHECKING:
    from tf_lossscale.types import State


class WithLossScale(Forwarding):
    """The loss scale of a wrapper, with its state readable on the wrapper."""

    _scale: Any
    _diagnosis: Diagnosis | None
    # Maps each name in a report to the variable that has it.
    _variable_names: weakref.WeakValueDictionary[str, Any]

    @property
    def scaler(self) -> Any:
        """The `LossScale` object, which has the rules of the scale.

        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
        >>> optimizer.scaler.change_rules(min_scale=4.0)
        >>> optimizer.scaler.min_scale
        4.0
        """
        return self._scale

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale, as a float32 scalar tensor. The object that determines it is `scaler`."""
        scale = self.scaler._current()
        self.scaler._factors.note_read(scale, self.scaler)
        return scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic rather than fixed."""
        return isinstance(self.scaler, DynamicLossScale)

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The number of finite steps that count towards the next growth of the scale, as an int64 variable.

        It is None if the scale is fixed.
        """
        return self.scaler.good_steps if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The loss scale at the start. A rule of your own that has no `initial_scale` has NaN."""
        return getattr(self.scaler, "initial_scale", float("nan"))

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The number of finite steps in a row after which the scale grows, or None if the scale is fixed."""
        return self.scaler.dynamic_growth_steps if self.dynamic else None

    @property
    def last_step_skipped(self) -> tf.Tensor | bool:
        """Whether the last step was skipped, as a bool scalar tensor. Reading it does not wait for the device.

        The value is the Python constant False if the scale is fixed and `skip_nonfinite` is not True, because then no
        step is ever skipped.
        """
        return self.scaler.last_step_skipped if self.scaler.may_skip else False

    @property
    def skipped_steps(self) -> tf.Tensor | int:
        """The number of skipped steps, as an int64 scalar tensor. A loaded model continues with the saved number.

        If the optimizer is configured never to skip a step, the value is the Python integer 0.
        """
        return self.scaler.skipped_steps if self.scaler.may_skip else 0

    @property
    def total_steps(self) -> tf.Tensor | int:
        """The number of steps, applied or skipped, as an int64 scalar tensor.

        If the optimizer is configured never to skip a step, the value is the Python integer 0.
        """
        return self.scaler.total_steps if self.scaler.may_skip else 0

    @property
    def skipped_in_a_row(self) -> tf.Tensor | int:
        """The number of skipped steps since the last applied step, as an int64 scalar tensor.

        If the optimizer is configured never to skip a step, the value is the Python integer 0.
        """
        return self.scaler.skipped_in_a_row if self.scaler.may_skip else 0

    def state(self) -> State:
        """Return the state of the loss scale as plain numbers, for a log or a JSON file.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> optimizer.state()["loss_scale"], optimizer.state()["total_steps"]
        (8.0, 0)

        Returns:
            A dict with `loss_scale` (float) and the ints `dynamic_counter` (finite steps that count towards the next
            growth of the scale), `bad_steps` (overflows that count towards the hysteresis), `skipped_steps`,
            `skipped_in_a_row` and `total_steps`. Checkpoints and weight files store only the first three values; saved
            models and pickles store all of them. The second and third value exist only if the scale is dynamic, and
            the last three only if a step can be skipped.

        Raises:
            RuntimeError: the method is called while a graph is being built.
        """
        _require_eager("state")
        return self._state()

    def _state(self) -> Any:
        """Return the loss scale's state. Unlike `state`, this method also works in graph mode."""
        return self.scaler._state(value_of)

    def set_state(self, state: State | Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. The state may have been stored as JSON in between.

        >>> import json
        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
        >>> other = LossScaleOptimizer(tf.keras.optimizers.SGD())
        >>> other.set_state(json.loads(json.dumps(optimizer.state())))
        >>> other.loss_scale.numpy().item()
        8.0

        Args:
            state: a dict that `state` returned. Counts other than `dynamic_counter` are set to 0 if they are missing. A
                loss scale outside the range of this optimizer's rule is replaced by the nearest scale in the range, and
                a warning is logged.

        Raises:
            ValueError: a key is missing or unknown, a value is negative or too large for its variable, or the scale is
                fixed at a different value. The state is then unchanged.
            TypeError: the state is not a mapping, or a value is not a number.
            RuntimeError: the method is called while a graph is being built.
        """
        _require_eager("set_state")
        self._set_state(state)

    def _set_state(self, state: Any) -> None:
        """Set the loss scale's state. Unlike `set_state`, this method also works in graph mode."""
        self.scaler._set_state(state, value_of, set_value)

    def overflow_report(self) -> OverflowReport:
        """Report which variables' gradients were not finite, and in how many steps.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=True)
        >>> kernel, bias = tf.Variable([1.0], name="kernel"), tf.Variable(1.0, name="bias")
        >>> _ = optimizer.scale_loss(0.0)
        >>> optimizer.apply([tf.constant([float("inf")]), tf.constant(1.0)], [kernel, bias])
        >>> optimizer.overflow_report()
        variable  steps  last step  kind
        kernel        1          1  inf

        Returns:
            A tuple of `Overflow` rows that prints as a table, in descending order of the number of steps. Steps are
            counted from 1, as in `total_steps` of `state()`. Gradients are checked after they are summed over the
            replicas.

        Raises:
            ValueError: the optimizer was created without `diagnose=True`.
            RuntimeError: the method is called while a graph is being built.
        """
        if self._diagnosis is None:
            raise ValueError(
                "overflow_report() needs an optimizer that records overflows from its first step on. "
                "Create it with LossScaleOptimizer(..., diagnose=True)."
            )
        _require_eager("overflow_report")
        counts = {name: [int(x) for x in row] for name, row in self._diagnosis.counts().items() if row[0]}
        rows = [Overflow(name, *row) for name, row in counts.items()]
        return OverflowReport(sorted(rows, key=lambda row: -row.steps))

    def _names_in_reports(self, variables: list[Any]) -> tuple[str, ...]:
        """Return the names of variables. In all steps of the optimizer, a name belongs to one variable."""
        tensors = tensors_of(variables)
        names = {id(tensor): name for name, tensor in self._variable_names.items()}
        for variable, tensor in zip(variables, tensors):
            if id(tensor) not in names:
                names[id(tensor)] = name = unused(name_of(variable), self._variable_names)
                self._variable_names[name] = tensor
        return tuple(names[id(tensor)] for tensor in tensors)

    def _recording(self, update: Any, variables: list[Any]) -> Any:
        """Return the update with functions that also record the overflows for `overflow_report`."""
        diagnosis: Any = self._diagnosis
        names, scaler = self._names_in_reports(variables), self.scaler
        diagnosis.prepare(names)
        gradients = checked = update.gradients
        if update.aggregate:
            gradients = checked = replicas.sum_over_replicas(gradients)
        elif replicas.several_replicas():
            # Gradients that the caller has summed may differ between the replicas.
            checked = kinds_on_all_replicas(gradients)

        def skip_and_record() -> Any:
            return [update.skip(), diagnosis.record(names, checked, scaler.total_steps)]

        def apply_and_record(gradients: list[Any]) -> Any:
            return [update.apply(gradients), diagnosis.record(names, checked, scaler.total_steps + 1)]

        # Only a `check` of the user's may apply a step whose gradients are not finite.
        apply = apply_and_record if scaler._overrides("check") else update.apply
        return update._replace(gradients=gradients, apply=apply, skip=skip_and_record, aggregate=False)


def value_of(variable: Any) -> Any:
    """Return a variable's value as a Python number or list. In graph mode, the value is read in Keras 2's session."""
    if tf.executing_eagerly():
        return as_number(variable)
    return keras_versions.keras_2("backend").get_value(tf.convert_to_tensor(variable)).tolist()


def set_value(variable: Any, value: Any) -> None:
    """Assign a number to a scalar variable. In graph mode, the number is assigned in Keras 2's session."""
    if tf.executing_eagerly():
        variable.assign(value)
    else:
        keras_versions.keras_2("backend").set_value(variable, value)


def _require_eager(method: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{method}() reads the values of variables, which are not known while a graph is being built. Call it "
            "outside of tf.function, between steps; in a tf.compat.v1.Session, run variables such as "
            "optimizer.skipped_steps."
        )
