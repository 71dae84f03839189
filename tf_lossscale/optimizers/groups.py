"""Parameter groups: the variables that an optimizer updates, and their options."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

#: The options of a group, in PyTorch's order.
OPTIONS = ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")

# The numbers among the options: name -> (the lowest and the highest value, the default).
_NUMBERS = {
    "beta2_decay": ("`beta2_decay`", -math.inf, 0.0, "beta2_decay=-0.8"),
    "d": ("`d`, the clipping threshold,", 1.0, math.inf, "d=1.0"),
    "weight_decay": ("`weight_decay`", 0.0, math.inf, "weight_decay=0.0"),
    "lr": ("`lr`, the learning rate,", 0.0, math.inf, "lr=0.01"),
    "eps1": ("`eps[0]`, if it is not None,", 0.0, math.inf, "eps[0]=None"),
    "eps2": ("`eps[1]`", 0.0, math.inf, "eps[1]=0.001"),
}


def check(options: Mapping[str, Any]) -> None:
    """Raise an error if the value of an option is not allowed.

    >>> check({"d": 0.5})
    Traceback (most recent call last):
    ...
    ValueError: `d`, the clipping threshold, must be a number >= 1, but got: 0.5. The default is d=1.0.

    Args:
        options: a dict with some of Adafactor's options. Other names in the dict are ignored.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range.
        IndexError: `eps` has fewer than two elements.
    """
    for name, value in options.items():
        if name == "lr":
            _check_rate(value)
        elif name == "eps":
            if not isinstance(value, (tuple, list)) or len(value) < 2:
                raise (IndexError if isinstance(value, (tuple, list)) else TypeError)(
                    f"`eps` must be a pair (eps1, eps2), but got: {value!r}. The default is (None, 1e-3)."
                )
            if value[0] is not None:
                _check_number("eps1", value[0])
            _check_number("eps2", value[1])
        elif name in _NUMBERS:
            _check_number(name, value)
        elif name in ("foreach", "maximize"):
            allowed = (True, False, None) if name == "foreach" else (True, False)
            if not any(value is each for each in allowed):
                raise TypeError(f"`{name}` must be one of {allowed}, but got: {value!r}.")


def _check_rate(rate: Any) -> None:
    if isinstance(rate, numbers.Real):
        _check_number("lr", rate)
    elif hasattr(rate, "shape") and hasattr(rate, "dtype"):
        if math.prod(rate.shape) != 1:
            raise ValueError(
                "`lr`, the learning rate, must be a number, or a tensor with 1 element, but got: "
                f"{rate!r}. The default is 0.01."
            )
        if hasattr(rate, "numpy"):
            _check_number("lr", rate.numpy().item())
    elif not callable(rate):
        raise TypeError(
            "`lr`, the learning rate, must be a number, a tensor, a variable, a LearningRateSchedule or a function "
            f"without arguments, but got: {rate!r}. The default is 0.01."
        )


def _check_number(name: str, value: Any) -> None:
    described, least, most, default = _NUMBERS[name]
    allowed = f"a number <= {most:g}" if least == -math.inf else f"a number >= {least:g}"
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{described} must be {allowed}, but got: {value!r}. The default is {default}.")
    if not least <= float(value) <= most:  # false for NaN, too
        raise ValueError(f"{described} must be {allowed}, but got: {value!r}. The default is {default}.")


class Rate:
    """The learning rate of one parameter group: a number, a variable, a schedule or a function.

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

    def load(self, number: float) -> None:
        """Load the number that a state dict contains. A schedule or function stays; a user's variable is assigned."""
        if not callable(self.source):
            variable = self._optimizer._tensor_variable(self.source)
            variable.assign(tf.constant(number, variable.dtype, variable.shape))

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


class ParameterGroup(MutableMapping[str, Any]):
    """A parameter group as in PyTorch: a mapping with the options and a "params" entry, which contains the variables.

    The "lr" entry is stored in a variable, so a new number also takes effect in a tf.function that is already traced.
    Changing any other option after a step was traced logs a warning.

    >>> from tf_lossscale.optimizers import Adafactor
    >>> group = Adafactor([tf.Variable(1.0)]).param_groups[0]
    >>> group["lr"] /= 2
    >>> group["lr"]
    0.005

    Args:
        entries: a dict with "params" and the options. The group keeps the dict's order. `rate` replaces the value of
            "lr".
        rate: the learning rate.
        own: the names of the options that were passed for this group. Setting one of these options on the optimizer
            does not change this group, unless this group is the first.

    The `steps` attribute is a float32 variable with the step count of each variable in the group. It is None before the
    optimizer is built. The `traced` attribute is True once a tf.function that updates the group was traced.
    """

    def __init__(self, entries: dict[str, Any], rate: Rate, own: Iterable[str]):
        self.data: dict[str, Any] = entries
        self.rate = rate
        self.own: frozenset[str] = frozenset(own)
        self.steps: Any = None
        self.traced = False

    def __getitem__(self, name: str) -> Any:
        return self.rate.read() if name == "lr" else self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        check({name: value})
        before = self._as_traced(name)
        if name == "lr":
            self.rate.write(value)
            value = None
        self.data[name] = value
        if self.traced and name in OPTIONS and self._as_traced(name) != before:
            logging.warning(
                "The option %r of a parameter group was set after a tf.function that takes steps was traced. That "
                "function keeps the old value. Make a new tf.function; in Keras, call compile again.",
                name,
            )

    def _as_traced(self, name: str) -> Any:
        """Return the Python value that a traced function has read."""
        value = id(self.rate.source) if name == "lr" else self.data.get(name)
        return list(value) if isinstance(value, tuple) else value

    def __delitem__(self, name: str) -> None:
        if name in (*OPTIONS, "params"):
            raise KeyError(f"{name!r} of a parameter group cannot be deleted; assign a new value instead.")
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """Return the entries as a plain dict. Later assignments to the group do not change the dict, and vice versa."""
        return dict(self)

    __copy__ = copy

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over the options of a group in a state dict, and their order."""
        for name, value in saved.items():
            if name == "lr" and not callable(value):
                self.rate.load(_number_or_source(value))
            elif name != "params":
                self[name] = value
        names = [*(name for name in saved if name != "params"), "params", *self.data]
        self.data = {name: self.data[name] for name in dict.fromkeys(names)}


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Return the `params` argument as a list of group dicts, each with a list of variables in "params".

    The names in (name, variable) pairs are stored in "param_names".

    >>> variable = tf.Variable(1.0)
    >>> [sorted(group) for group in groups_of([("weight", variable)])]
    [['param_names', 'params']]

    Args:
        params: an iterable of variables, of (name, variable) pairs or of dicts.

    Returns:
        New dicts; the caller's dicts do not change.

    Raises:
        TypeError: `params` is not an iterable of these objects.
        ValueError: `params` is empty, or contains a tensor that is not a variable, or a variable whose dtype is not
            floating-point.
        KeyError: a dict has no "params".
    """
    if _is_tensor(params) or isinstance(params, (Mapping, str, bytes)) or not isinstance(params, Iterable):
        hint = " The learning rate is the keyword lr." if isinstance(params, (int, float)) else ""
        raise TypeError(
            "`params` must be an iterable of variables, (name, variable) pairs or dicts, but got: "
            f"{params!r}. Pass [variable] for a single variable.{hint}"
        )
    listed = list(params)
    if not listed:
        raise ValueError(
            "`params` is an empty list. Pass the variables to optimize, or None to optimize the variables that are "
            "passed to apply_gradients."
        )
    if not isinstance(listed[0], Mapping):
        listed = [{"params": listed}]
    return [one_group(group) for group in listed]


def one_group(group: Any) -> dict[str, Any]:
    """Check a group dict, and return a copy in which "params" is a list of variables.

    >>> one_group({"lr": 0.1, "params": tf.Variable(1.0)})["params"][0].numpy().item()
    1.0

    Args:
        group: a dict with "params": a variable, or an iterable of variables or (name, variable) pairs.

    Returns:
        A new dict.

    Raises:
        TypeError: the group is not a dict, "params" is a set, or an entry of "params" is neither a variable nor a
            tensor.
        ValueError: an entry of "params" is a tensor that is not a variable, or only some of the variables have names.
        KeyError: the group has no "params".
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"A parameter group must be a dict, but got: {group!r}. Pass {{'params': variables}}.")
    if "params" not in group:
        raise KeyError(
            f"A parameter group must have an entry 'params' with its variables, but it has only: {sorted(group)}."
        )
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError("The 'params' of a parameter group must be an ordered collection, but got a set. Pass a list.")
    listed = [params] if _is_tensor(params) else list(params)
    named = [isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in listed]
    if any(named) and not all(named):
        raise ValueError("Either all or none of a group's parameters must have names. Pass (name, variable) for each.")
    variables = [each[1] for each in listed] if any(named) else listed
    for variable in variables:
        _require_variable(variable)
    entries = {**group, "params": list({id(variable): variable for variable in variables}.values())}
    if any(named):
        entries["param_names"] = [name for name, _ in listed]
    if len(entries["params"]) < len(variables):
        if any(named):
            raise ValueError(
                "A parameter group contains the same parameter more than once. The names in the group are: "
                f"{entries['param_names']}. Pass the parameter once."
            )
        warnings.warn("A parameter group contains a parameter twice; it is updated once.", stacklevel=4)
    return entries


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or (hasattr(value, "assign") and hasattr(value, "dtype"))


def _require_variable(variable: Any) -> None:
    if not _is_tensor(variable):
        raise TypeError(f"A parameter must be a variable, but got: {variable!r}.")
    if not hasattr(variable, "assign"):
        raise ValueError(f"A parameter must be a variable, but got a tensor that is not a variable: {variable!r}.")
    if not tf.as_dtype(variable.dtype).is_floating:
        raise ValueError(
            f"A parameter must have a floating-point dtype, but {variable.name} has dtype {variable.dtype!r}."
        )
