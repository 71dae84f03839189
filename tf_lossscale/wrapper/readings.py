"""Methods of LossScaleOptimizer that read the state of the loss scale and report overflows and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import gradients as arithmetic
from tf_lossscale.core.loss_scale import current_scale
from tf_lossscale.core.variables import as_number, value_or_zero
from tf_lossscale.diagnosis.exponents import Exponents
from tf_lossscale.diagnosis.overflow import Overflow, OverflowReport
from tf_lossscale.diagnosis.precision import ExponentCounts, PrecisionReport
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper.grads_and_vars import name_of, tensors_of, unused
from tf_lossscale.wrapper.hyperparameters import Parts

if TYPE_CHECKING:
    from tf_lossscale.types import State


class Observable(Parts):
    """Methods and properties of LossScaleOptimizer that read or set the state of its loss scale."""

    dynamic: Any
    _factor_of_gradients: Any

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale, as a float32 scalar tensor."""
        self._stall.report_silent_steps(self)
        return current_scale(self._loss_scale)

    @property
    def last_step_skipped(self) -> tf.Tensor | bool:
        """Whether the last step was skipped, as a bool scalar tensor. Reading it does not wait for the device.

        The value is the Python constant False if the scale is fixed and `skip_nonfinite` is not True, because then no
        step is ever skipped.
        """
        return self._loss_scale.last_step_skipped if self._loss_scale.may_skip else False

    @property
    def skipped_steps(self) -> tf.Tensor | int:
        """The number of skipped steps, as an int64 scalar tensor. A loaded model continues with the saved number.

        If the optimizer is configured never to skip a step, the value is the Python integer 0.
        """
        return value_or_zero(self._loss_scale.skipped_steps) if self._loss_scale.may_skip else 0

    @property
    def gradient_norm(self) -> tf.Variable | None:
        """The global norm of the last step's unscaled gradients, as a float32 variable.

        It is None without `diagnose=True`.

        The gradients are summed over the replicas, and the inner optimizer has not clipped them yet. The norm is
        infinite or NaN if the step was skipped.
        """
        return None if self._diagnosis is None else self._diagnosis.gradient_norm

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
        values = self._loss_scale._state(value_of)
        self._stall.report_silent_steps(self)
        return values

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
        self._loss_scale._set_state(state, value_of, set_value)
        if self._loss_scale.may_skip:
            self._stall.after_set_state(self)

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
            counted from 1, the first step of this optimizer. Gradients are checked after they are summed over the
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

    def count_exponents(self) -> None:
        """Count gradients by exponent in the next step, and again in every `diagnose_every`-th step after it.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose="exponents")
        >>> optimizer.count_exponents()

        In a TF1 graph, call this method inside `with session.as_default():`.

        Raises:
            ValueError: the optimizer was created without `diagnose="exponents"`.
            RuntimeError: the method is called in a TF1 graph, and no default session is set.
        """
        exponents = self._counting("count_exponents")
        if not tf.compat.v1.executing_eagerly_outside_functions():
            require_values("count_exponents")
        exponents.count_next()

    def precision_report(self) -> PrecisionReport:
        """Report how much of each variable's gradient vanishes or overflows in float16.

        For each variable, the report also contains the headroom: the number of times that the loss scale can double
        before the variable's gradient overflows.

        The report describes the last step in which gradients were counted. They are counted in the first step, in every
        `diagnose_every`-th step after it, and in the step after a call to `count_exponents`, even if that step is
        skipped. Each replica counts its own gradients while they are still multiplied by the loss scale, before they
        are summed over the replicas.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8, diagnose="exponents")
        >>> kernel = tf.Variable([1.0, 1.0], name="kernel")
        >>> _ = optimizer.scale_loss(0.0)
        >>> optimizer.apply([tf.constant([2.0**-20, 0.0])], [kernel])
        >>> row = optimizer.precision_report().rows[0]
        >>> row.variable, row.zeros, row.subnormal
        ('kernel', 0.5, 1.0)

        Returns:
            A report that contains plain data and prints as a table.

        Raises:
            ValueError: the optimizer was created without `diagnose="exponents"`, or no gradients have been counted yet.
            RuntimeError: the method is called while a graph is being built, or in a TF1 graph without a default
                session.

        Source: Micikevicius et al., Mixed Precision Training, figure 3, https://arxiv.org/abs/1710.03740
        """
        self._counting("precision_report")
        require_values("precision_report")
        counts = self._last_counts()
        if counts is None:
            raise ValueError(
                "precision_report() needs a step whose gradients were counted, but there was none. Take a step first."
            )
        return PrecisionReport(counts)

    def _last_counts(self) -> ExponentCounts | None:
        """Return the counts of the last step that counted gradients by exponent. If there is none, return None."""
        return None if self._exponents is None else self._exponents.last()

    def _counting(self, method: str) -> Exponents:
        if self._exponents is None:
            raise ValueError(
                f"{method}() needs an optimizer that counts gradients by exponent. Create it with "
                'LossScaleOptimizer(..., diagnose="exponents").'
            )
        return self._exponents

    def _count_by_exponent(self, gradients: list[Any], variables: list[Any], scaled: bool) -> list[tf.Operation]:
        """Count this replica's gradients by exponent, as they are while they are multiplied by the loss scale."""
        if self._exponents is None or not variables:
            return []
        if any(isinstance(variable, tf.experimental.dtensor.DVariable) for variable in variables):
            raise ValueError(
                "Gradients cannot be counted by exponent on a DTensor mesh. Leave out "
                'diagnose="exponents", or count in a run without a mesh.'
            )

        def as_scaled() -> list[Any]:
            if scaled:
                return gradients
            return [arithmetic.multiplied(gradient, self._factor_of_gradients()) for gradient in gradients]

        return self._exponents.record(lambda: self._names_in_reports(variables), as_scaled, self._factor_of_gradients)

    def _names_in_reports(self, variables: list[Any]) -> tuple[str, ...]:
        """Return the names of variables. In all steps of the optimizer, a name belongs to one variable."""
        tensors = tensors_of(variables)
        names = {id(tensor): name for name, tensor in self._variable_names.items()}
        for variable, tensor in zip(variables, tensors):
            if id(tensor) not in names:
                names[id(tensor)] = name = unused(name_of(variable), self._variable_names)
                self._variable_names[name] = tensor
        return tuple(names[id(tensor)] for tensor in tensors)

    def _observer(self, variables: list[Any]) -> Callable[..., Any]:
        """Return a function that is called at the end of each step, for the diagnosis and for stalls in eager mode."""
        diagnosis = self._diagnosis if variables else None
        names = () if diagnosis is None else self._names_in_reports(variables)
        if diagnosis is not None:
            diagnosis.prepare(names)

        def observe(applied: tf.Tensor, gradients: list[Any], checked: list[Any]) -> Any:
            recorded = diagnosis and diagnosis.record(
                names, applied, gradients, checked, applies_only_finite=not self._loss_scale._overrides("check")
            )
            if tf.executing_eagerly() and not applied:
                self._stall.after_step(self)
            return recorded

        return observe


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


def require_values(method: str) -> None:
    """Raise an error unless variables can be read from Python: in eager mode, or through a default session."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        _require_eager(method)
    elif tf.compat.v1.get_default_session() is None:
        raise RuntimeError(
            f"{method}() reads variables of a TF1 graph, which have values only in a session. Call it inside "
            "`with session.as_default():`."
        )


def _require_eager(method: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{method}() reads the values of variables, which are not known while a graph is being built. Call it "
            "outside of tf.function, between steps; in a tf.compat.v1.Session, run variables such as "
            "optimizer.skipped_steps."
        )
