"""Parameter groups: the variables that an optimizer updates, and their options."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import tensorflow as tf

from tf_lossscale.optimizers import arguments
from tf_lossscale.optimizers.rates import Rate


class ParameterGroup(MutableMapping[str, Any]):
    """A parameter group as in PyTorch: a mapping with the options and a "params" entry, which contains the variables.

    The "lr" entry is stored in a variable, so a new value also takes effect in a tf.function that is already traced.

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
    optimizer is built.
    """

    def __init__(self, entries: dict[str, Any], rate: Rate, own: Iterable[str]):
        self.data = entries
        self.rate = rate
        self.own = frozenset(own)
        self.steps: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.rate.read() if name == "lr" else self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        arguments.check({name: value})
        if name == "lr":
            self.rate.write(value)
            value = None
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        if name in arguments.DEFAULTS or name == "params":
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

    def reorder(self, names: Iterable[str]) -> None:
        """Reorder the entries: the given names come first."""
        self.data = {name: self.data[name] for name in dict.fromkeys([*names, *self.data])}


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
    names = [name for name, _ in listed] if any(named) else None
    variables = [variable for _, variable in listed] if any(named) else listed
    for variable in variables:
        _require_variable(variable)
    once = list({id(variable): variable for variable in variables}.values())
    if len(once) < len(variables):
        if names is not None:
            raise ValueError(
                "A parameter group contains the same parameter more than once. The names in the group are: "
                f"{names}. Pass the parameter once."
            )
        warnings.warn("A parameter group contains a parameter twice; it is updated once.", stacklevel=4)
    entries = {**group, "params": once}
    return entries if names is None else {**entries, "param_names": names}


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
