"""The variables of models, layers and optimizers, in every version of Keras and in TensorFlow."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import tensorflow as tf

_CONTAINERS = (dict, list, tuple, set)
# Values that contain no variables, and that are skipped early because attributes have them most often.
_PLAIN = (bool, int, float, str, bytes, type, type(None), type(sys), type(lambda: None))
# Objects of these libraries are searched only if they hold variables: others, such as the nodes of a functional model,
# refer to models to which the object does not belong.
_LIBRARIES = {*sys.stdlib_module_names, "tensorflow", "keras", "tf_keras", "numpy"}


def walk(roots: Iterable[Any], without: Callable[[Any], bool] = lambda part: False) -> Iterator[tuple[Any, Any]]:
    """Iterate over objects and all objects inside them, such as layers, metrics and variables, each with its holder.

    The holder is the object whose attribute the part is, also if lists or dicts are in between. Plain objects of a
    user's classes are searched as well. Parts for which `without` returns True are left out with all that they hold.
    """
    seen: dict[int, Any] = {}
    waiting = [(None, root) for root in roots]
    while waiting:
        holder, part = waiting.pop()
        if isinstance(part, _PLAIN) or id(part) in seen or not _may_hold_variables(part) or without(part):
            continue
        seen[id(part)] = part  # keeps the object alive, and with it its id
        yield holder, part
        if isinstance(part, _CONTAINERS):
            waiting.extend((holder, each) for each in (part.values() if isinstance(part, dict) else part))
        elif not is_variable(part):
            waiting.extend((part, each) for each in getattr(part, "__dict__", {}).values())


def _may_hold_variables(part: Any) -> bool:
    if isinstance(part, (*_CONTAINERS, tf.__internal__.tracking.Trackable)) or is_random_state(part):
        return True
    if tf.is_tensor(part) or not hasattr(part, "__dict__"):
        return False
    # The metrics of Keras 3 are not tracked by TensorFlow.
    return type(part).__module__.split(".")[0] not in _LIBRARIES or hasattr(type(part), "variables")


def is_variable(part: Any) -> bool:
    """Return whether an object is a `tf.Variable` or a `keras.Variable`."""
    is_of_keras = type(part).__module__.startswith("keras.")
    return isinstance(part, tf.Variable) or (is_of_keras and hasattr(part, "assign") and hasattr(part, "value"))


def is_metric(part: Any) -> bool:
    """Return whether an object is a metric of Keras."""
    return hasattr(part, "update_state") and hasattr(part, "result")


def is_random_state(part: Any) -> bool:
    """Return whether an object is a random number generator of TensorFlow or of Keras 3."""
    return isinstance(part, tf.random.Generator) or type(part).__name__ == "SeedGenerator"


def variables_in(roots: Iterable[Any], without: Callable[[Any], bool] = lambda part: False) -> list[Any]:
    """Return all variables inside objects. For the tensor of a `keras.Variable`, the `keras.Variable` is returned."""
    return distinct(part for _, part in walk(roots, without) if is_variable(part))


def distinct(variables: Iterable[Any]) -> list[Any]:
    """Return variables without repetitions. For the tensor of a `keras.Variable`, return the `keras.Variable`."""
    found: dict[int, Any] = {}
    for variable in variables:
        [tensor] = tensors_of([variable])
        if id(tensor) not in found or variable is not tensor:
            found[id(tensor)] = variable
    return list(found.values())


def variables_of(model: Any, name: str = "variables") -> list[Any]:
    """Return a list of variables of a model, a layer or a module. An object without this list has none."""
    try:
        return list(getattr(model, name, ()))
    except ValueError:  # tf_keras raises it for a Sequential model that is not built.
        return []


def tensors_of(variables: list[Any]) -> list[Any]:
    """Replace each `keras.Variable` in a list with its `tf.Variable`, which a gradient tape can watch."""
    # A `tf.Variable` has a `value` method. A `keras.Variable` has a `value` attribute, which is the `tf.Variable`.
    return [v if callable(getattr(v, "value", None)) else getattr(v, "value", v) for v in variables]


def name_of(variable: Any) -> str:
    """Return the name of a variable for reports. The name of a `keras.Variable` is its path."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Number the names that occur several times: the second "kernel" becomes "kernel_1"."""
    made: list[str] = []
    for name in names:
        made.append(unused(name, made))
    return tuple(made)


def unused(name: str, taken: Container[str]) -> str:
    """Return the name, or the name with the first number that makes it different from those that are taken."""
    numbered = (f"{name}_{i}" if i else name for i in itertools.count())
    return next(each for each in numbered if each not in taken)
