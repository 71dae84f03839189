"""Builds hashable keys from the Python constants that tracing embeds in a graph.

It also undoes the changes that tracing makes to objects.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

#: Libraries whose functions depend only on their arguments and closures.
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "sonnet", "tf_lossscale")
#: Libraries keep internal data in attributes with these prefixes. No optimizer update reads such attributes.
_BOOKKEEPING = ("_self_", "_snt_", "_tracker", "_abc_")
#: Arrays with up to this many values are compared by value in each step.
_FEW = 64


class Unknown(Exception):
    """Raised for a Python object whose effect on a traced function is unknown. The message contains the object's path.

    >>> key({"rate": print})
    Traceback (most recent call last):
    tf_lossscale.core.constants.Unknown: `rate` is a Python function

    Args:
        what: a noun phrase that describes the object.
        path: the attributes and keys that lead to the object.
    """

    def __init__(self, what: str, path: str):
        super().__init__(f"`{path}` is {what}")


def key(value: Any, ignored: Collection[str] = (), identified: list[Any] | None = None) -> tuple[Any, ...]:
    """Return a hashable key of the Python constants that tracing would embed in a graph.

    The key covers an object and all its parts, at any depth. It contains numbers, strings, small arrays and small
    tensors by value. It contains the ids of variables and strategies, because a traced function keeps using the
    variables and strategies with which it was traced. Do not use a key after any of these variables or strategies has
    been garbage-collected: a new object may get the same id.

    >>> class SGD:
    ...     def __init__(self, momentum):
    ...         self.momentum, self.decay = momentum, {"rate": np.float32(0.5)}
    >>> key(SGD(0.5)) == key(SGD(0.5)), key(SGD(0.5)) == key(SGD(0.25))
    (True, False)

    Args:
        value: an optimizer, or any other object.
        ignored: names of attributes that the key leaves out.
        identified: a list to which all variables and strategies in the object are appended.

    Returns:
        A hashable tuple that differs if any of the constants differs.

    Raises:
        Unknown: a part of the object may affect a traced function, but the key cannot represent the part, for example a
            Python function or a large array.
    """
    items: list[Any] = []
    identified = [] if identified is None else identified
    # The objects whose attributes or items are in the key. Maps each object's id to a serial number and the object
    # itself. The reference to the object prevents Python from reusing the id.
    numbers: dict[int, tuple[int, Any]] = {}
    waiting = [("", value)]
    # A key is computed in each eager step, so this code uses a loop, which is faster than recursion.
    while waiting:
        path, value = waiting.pop()
        kind = type(value)
        if kind in _BY_VALUE:
            items += (kind, value)
        elif kind is float:
            # The key contains floats as strings, so that NaN equals NaN, and 0.0 differs from -0.0.
            items += (kind, repr(value))
        elif _is_variable(kind):  # type: ignore[arg-type]
            identified.append(value)
            items += (kind, id(value))
            # A Keras 3 variable wraps a TensorFlow variable. The wrapped variable may be replaced, so the key also
            # contains the wrapped variable's id.
            if "_value" in vars(value):
                waiting.append((path, value._value))
        elif isinstance(value, type):
            items.append(value)
        elif isinstance(value, (np.generic, np.ndarray, tf.Tensor)):
            items += (kind, *_values(value, path))
        elif isinstance(value, (tf.distribute.Strategy, tf.compat.v1.distribute.Strategy)):
            identified.append(value)
            items += (kind, id(value))
        elif id(value) in numbers:
            items.append(numbers[id(value)][0])
        else:
            numbers[id(value)] = len(numbers), value
            shape, parts = _parts(value, path, ignored, identified)
            items.append(shape)
            waiting += parts
    return tuple(items)


_BY_VALUE = frozenset({type(None), bool, int, str, bytes, complex, tf.DType, tf.TensorShape})


@functools.cache
def _is_variable(kind: type) -> bool:
    return hasattr(kind, "assign") and hasattr(kind, "dtype")


def _values(array: Any, path: str) -> tuple[Any, ...]:
    if isinstance(array, tf.Tensor):
        if not hasattr(array, "numpy"):
            raise Unknown("a symbolic tensor", path)
        if (array.shape.num_elements() or 0) > _FEW:
            raise Unknown(f"an array of more than {_FEW} values", path)
        array = np.asarray(array.numpy())
    if array.size > _FEW:
        raise Unknown(f"an array of more than {_FEW} values", path)
    if array.dtype.hasobject:
        raise Unknown("an array of objects", path)
    return array.dtype.name, array.shape, array.tobytes()


def _parts(value: Any, path: str, ignored: Collection[str], identified: list[Any]) -> tuple[Any, list[tuple[str, Any]]]:
    """Return what an object itself contributes to a key, and the object's parts with their paths."""
    kind = type(value)
    if isinstance(value, dict):
        return _named_parts(kind, value, path, ignored)
    if isinstance(value, (list, tuple, deque)):
        return (kind, len(value)), list(zip(itertools.repeat(path), value))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(key(each, ignored, identified) for each in value)), []
    if isinstance(value, types.FunctionType) and _is_of_a_library(value):
        cells = [(path, cell.cell_contents) for cell in value.__closure__ or ()]
        return (value.__code__, len(cells)), [(path, value.__defaults__), (path, value.__kwdefaults__), *cells]
    if callable(value) and not (_is_of_a_library(kind) or hasattr(value, "get_config")):
        raise Unknown("a Python function", path)
    if not hasattr(value, "__dict__"):
        raise Unknown(f"a {kind.__name__}", path)
    attributes = vars(value)
    for cls in _user_defined_classes(kind):  # type: ignore[arg-type]
        attributes = {**_class_attributes(cls), **attributes}
    return _named_parts(kind, attributes, path, ignored)


@functools.cache
def _user_defined_classes(kind: type) -> tuple[type, ...]:
    """Return a class and its base classes, without the classes of `_LIBRARIES` and of Python's standard library."""
    stdlib = sys.stdlib_module_names
    return tuple(c for c in kind.__mro__ if not _is_of_a_library(c) and c.__module__.split(".")[0] not in stdlib)


def _class_attributes(cls: type) -> dict[str, Any]:
    """Return a class's own attributes, except methods and descriptors such as properties."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


def _is_of_a_library(defined: Any) -> bool:
    return (defined.__module__ or "").split(".")[0] in _LIBRARIES


def _named_parts(
    kind: type, parts: dict[Any, Any], path: str, ignored: Collection[str]
) -> tuple[Any, list[tuple[str, Any]]]:
    names: list[str] = []
    named_parts: list[tuple[str, Any]] = []
    for name, part in parts.items():
        if not isinstance(name, str):
            named_parts += [(f"{path}[{name!r}]", name), (f"{path}[{name!r}]", part)]
        elif name not in ignored and not name.startswith(_BOOKKEEPING):
            names.append(name)
    # The order of attributes must not matter: deleting an attribute and setting it again moves it to the end.
    names.sort()
    for name in names:
        named_parts.append((f"{path}.{name}" if path else name, parts[name]))
    return (kind, tuple(names)), named_parts


@contextlib.contextmanager
def put_back(value: Any) -> Iterator[None]:
    """Restore all attributes, dicts and lists in an object at the end of a `with` block.

    >>> class Counting:
    ...     steps, seen = 1, {}
    >>> counting = Counting()
    >>> with put_back(counting):
    ...     counting.steps = 2
    >>> counting.steps
    1

    Args:
        value: any object that `key` accepts.
    """
    before: list[tuple[Any, Any]] = []
    _remember(before, value, set())
    try:
        yield
    finally:
        for container, content in before:
            # TensorFlow tracks each modification of some containers, so unchanged containers are left alone.
            if list(map(id, _items(container))) != list(map(id, _items(content))):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)


_CONTAINERS = (dict, list, tuple, deque, set, frozenset)


def _remember(before: list[tuple[Any, Any]], value: Any, seen: set[int]) -> None:
    """Collect all containers in an object, at any depth, each with a copy of its contents."""
    if id(value) in seen or _is_variable(type(value)):  # type: ignore[arg-type]
        return
    seen.add(id(value))
    if isinstance(value, (tf.Tensor, tf.distribute.Strategy, type, types.FunctionType)):
        return
    if not isinstance(value, _CONTAINERS):
        value = getattr(value, "__dict__", ())
    if not isinstance(value, (tuple, frozenset)):
        before.append((value, value.copy()))
    for part in _items(value):
        _remember(before, part, seen)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)
