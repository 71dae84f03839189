"""What a traced function keeps of Python objects: their constants as a key, and their attributes put back."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

#: Libraries whose functions depend on nothing but their arguments and what they close over.
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "sonnet", "tf_lossscale")
#: What the libraries add to an object to track and build its parts. No update reads it.
_BOOKKEEPING = ("_self_", "_snt_", "_tracker")
#: Arrays of up to this many values are compared by value in each step.
_FEW = 64


class Unknown(Exception):
    """A Python object whose effect on a traced function is not known; the text says where it is.

    >>> key({"rate": print})
    Traceback (most recent call last):
    tf_lossscale.core.constants.Unknown: `rate` is a Python function
    """

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.path = what, ""

    def __str__(self) -> str:
        return f"`{self.path}` is {self.what}"


class Same:
    """A weak reference that equals another one as long as both refer to the same living object.

    >>> variable = tf.Variable(1.0)
    >>> Same(variable) == Same(variable), Same(variable) == Same(tf.Variable(1.0))
    (True, False)
    """

    __slots__ = ("_hash", "held")

    def __init__(self, held: Any):
        self.held = weakref.ref(held)
        self._hash = id(held)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Same) and (held := self.held()) is not None and held is other.held()


def key(value: Any, ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Return the constants in an object at any depth, which a function that is traced with it keeps.

    Numbers, texts and small arrays and tensors are in the key by value. Variables and strategies are in it as objects,
    because a traced function reads and writes those that it was traced with.

    >>> class SGD:
    ...     def __init__(self, momentum):
    ...         self.momentum, self.decay = momentum, {"rate": np.float32(0.5)}
    >>> key(SGD(0.5)) == key(SGD(0.5)), key(SGD(0.5)) == key(SGD(0.25))
    (True, False)

    Args:
        value: an optimizer, or anything else.
        ignored: names of attributes that are left out.

    Returns:
        A tuple that can be hashed; it is another one after anything was set.

    Raises:
        Unknown: some part may change what a function does in a way that its attributes do not show.
    """
    found: list[Any] = []
    _add(found, value, frozenset(ignored), [])
    return tuple(found)


def objects(key: tuple[Any, ...]) -> list[Any]:
    """Return the objects that a key refers to.

    >>> variable = tf.Variable(1.0)
    >>> objects(key([1, variable]))[0] is variable
    True

    Args:
        key: what `key` returned.
    """
    return [each.held() for each in dict.fromkeys(part for part in key if isinstance(part, Same))]


def _add(found: list[Any], value: Any, ignored: frozenset[str], above: list[Any]) -> None:
    kind = type(value)
    if _is_variable(kind):
        found.append(Same(value))
        if "_value" in vars(value):  # Keras 3: may get another variable of TensorFlow
            _add(found, value._value, ignored, above)
    elif value is None or kind in (bool, int, str, bytes, complex, tf.DType, tf.TensorShape):
        found += (kind, value)
    elif kind is float:
        found += (kind, repr(value))  # NaN equals itself, and 0.0 is not -0.0
    elif isinstance(value, type):
        found.append(value)
    elif isinstance(value, (np.generic, np.ndarray)):
        _add_array(found, kind, value)
    elif isinstance(value, tf.Tensor):
        if not hasattr(value, "numpy"):
            raise Unknown("a tensor of a graph")
        if (value.shape.num_elements() or 0) > _FEW:
            raise Unknown(_TOO_LARGE)
        _add_array(found, kind, np.asarray(value.numpy()))
    elif isinstance(value, (tf.distribute.Strategy, tf.compat.v1.distribute.Strategy)):
        found.append(Same(value))
    elif any(value is each for each in above):
        found.append(next(i for i, each in enumerate(above) if each is value))
    else:
        above.append(value)
        _add_parts(found, value, ignored, above)
        above.pop()


def _is_variable(kind: type) -> bool:
    return hasattr(kind, "assign") and hasattr(kind, "dtype")


def _add_array(found: list[Any], kind: type, array: Any) -> None:
    if array.size > _FEW:
        raise Unknown(_TOO_LARGE)
    if array.dtype.hasobject:
        raise Unknown("an array of objects")
    found += (kind, array.dtype.name, array.shape, array.tobytes())


_TOO_LARGE = f"an array of more than {_FEW} values"


def _add_parts(found: list[Any], value: Any, ignored: frozenset[str], above: list[Any]) -> None:
    kind = type(value)
    if isinstance(value, dict):
        found.append(kind)
        _add_named(found, value, ignored, above)
    elif isinstance(value, (list, tuple, deque)):
        found += (kind, len(value))
        for each in value:
            _add(found, each, ignored, above)
    elif isinstance(value, (set, frozenset)):
        found += (kind, frozenset(key(each, ignored) for each in value))
    elif isinstance(value, types.FunctionType) and _is_of_a_library(value):
        found.append(value.__code__)
        for part in (
            value.__defaults__,
            value.__kwdefaults__,
            [cell.cell_contents for cell in value.__closure__ or ()],
        ):
            _add(found, part, ignored, above)
    elif callable(value) and not (_is_of_a_library(kind) or hasattr(value, "get_config")):
        raise Unknown("a Python function")
    elif not hasattr(value, "__dict__"):
        raise Unknown(f"a {kind.__name__}")
    else:
        found.append(kind)
        _add_named(found, vars(value), ignored, above)


def _is_of_a_library(defined: Any) -> bool:
    return (defined.__module__ or "").split(".")[0] in _LIBRARIES


def _add_named(found: list[Any], parts: dict[Any, Any], ignored: frozenset[str], above: list[Any]) -> None:
    texts = sorted(name for name in parts if isinstance(name, str) and not name.startswith(_BOOKKEEPING))
    for name in [*texts, *(name for name in parts if not isinstance(name, str))]:
        if name in ignored:
            continue
        _add(found, name, ignored, above)
        try:
            _add(found, parts[name], ignored, above)
        except Unknown as unknown:
            unknown.path = f"{name}.{unknown.path}".rstrip(".")
            raise
    found.append(_END)


_END = object()


@contextlib.contextmanager
def put_back(value: Any) -> Iterator[None]:
    """Undo, at the end, what was set in an object and in the dicts and lists in it.

    >>> class Counting:
    ...     steps, seen = 1, {}
    >>> counting = Counting()
    >>> with put_back(counting):
    ...     counting.steps = 2
    >>> counting.steps
    1

    Args:
        value: anything that has a `key`.
    """
    before: list[tuple[Any, Any]] = []
    _remember(before, value, set())
    try:
        yield
    finally:
        for container, content in before:
            _restore(container, content)


def _remember(before: list[tuple[Any, Any]], value: Any, seen: set[int]) -> None:
    kind = type(value)
    if id(value) in seen or _is_variable(kind) or isinstance(value, (tf.Tensor, tf.distribute.Strategy)):
        return
    seen.add(id(value))
    if isinstance(value, (dict, list, deque, set)):
        before.append((value, value.copy()))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType)):
        before.append((vars(value), vars(value).copy()))
        value = vars(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, _SEVERAL) else ():
        _remember(before, part, seen)


_SEVERAL = (list, tuple, deque, set, frozenset)


def _restore(container: Any, content: Any) -> None:
    """Give a container its content again; one that still has it is not touched, as TensorFlow notes each change."""
    if len(container) == len(content):
        if isinstance(content, dict) and all(
            name in container and container[name] is content[name] for name in content
        ):
            return
        if not isinstance(content, dict) and all(one is other for one, other in zip(container, content)):
            return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)
