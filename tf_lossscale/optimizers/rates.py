"""Learning rates of parameter groups. A learning rate is a number, a variable, a schedule or a function."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import tensorflow as tf


class Rate:
    """The learning rate of one parameter group.

    A number is stored in one of the optimizer's variables, so a traced tf.function uses the new number after a change.
    The variable is also created for schedules and functions, because the saved state must always have the same
    variables.

    Args:
        optimizer: an `AdafactorBase`.
        value: a number, a variable, a `LearningRateSchedule` or a function without arguments.
        name: the name of the variable in which a number is stored.
    """

    #: The variable, schedule or function from which the learning rate is read.
    source: Any

    def __init__(self, optimizer: Any, value: Any, name: str):
        self._optimizer = optimizer
        value = _number_or_source(value)
        self._variable = optimizer._new_rate_variable(value if isinstance(value, float) else 0.0, name)
        self.source = self._variable if isinstance(value, float) else value

    def read(self) -> Any:
        """Return the learning rate as it was set: a number, variable, schedule or function."""
        if self.source is not self._variable:
            return self.source
        variable = self._optimizer._tensor_variable(self._variable)
        return float(variable.numpy()) if tf.executing_eagerly() else tf.convert_to_tensor(variable)

    def write(self, value: Any) -> None:
        """Set a new learning rate: a number, variable, schedule or function."""
        value = _number_or_source(value)
        if isinstance(value, float) or _is_symbolic(value):
            self._optimizer._tensor_variable(self._variable).assign(value)
            value = self._variable
        self.source = value

    def load(self, value: Any) -> None:
        """Load a learning rate from a state dict, which contains only the number that a source returned.

        A schedule or function stays. A variable that the user passed is assigned the number.
        """
        value = _number_or_source(value)
        if not isinstance(value, float):
            self.write(value)
        elif not callable(self.source):
            variable = self._optimizer._tensor_variable(self.source)
            variable.assign(tf.constant(value, variable.dtype, variable.shape))

    def now(self) -> tf.Tensor:
        """Return the learning rate for the next step, as a scalar."""
        source = self.source
        if isinstance(source, self._optimizer._schedules.LearningRateSchedule):
            source = source(self._optimizer._iterations)
        elif callable(source):
            source = source()
        # By default, TensorFlow would round a Python number to float32.
        dtype = tf.float64 if isinstance(source, numbers.Real) else None
        return tf.reshape(tf.convert_to_tensor(source, dtype), [])

    def number(self) -> Any:
        """Return the learning rate as a number. For a variable that the user passed, return its value as an array."""
        value = self.read()
        if callable(value):
            return float(self.now().numpy())
        return np.array(value.numpy()) if hasattr(value, "numpy") else value


class FirstRate(Rate):
    """The learning rate of the first group, stored where Keras stores an optimizer's learning rate."""

    @property
    def source(self) -> Any:
        """The variable, schedule or function from which the learning rate is read."""
        return getattr(self._optimizer, "_learning_rate", None)

    @source.setter
    def source(self, value: Any) -> None:
        # Do not assign the same value again, because every assignment calls Keras's setter.
        if value is not self.source:
            self._optimizer._learning_rate = value


def _number_or_source(value: Any) -> Any:
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(value, "assign") or callable(value) or _is_symbolic(value):
        return value
    return float(np.asarray(value).item())


def _is_symbolic(value: Any) -> bool:
    return tf.is_tensor(value) and not hasattr(value, "numpy")
