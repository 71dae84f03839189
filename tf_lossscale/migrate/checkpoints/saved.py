"""The content of a file, in any format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# `Optimizer.family` -> the name shown to users.
LIBRARIES = {
    "keras3": "Keras 3",
    "tf_keras": "tf_keras",
    "tf_keras_legacy": "TensorFlow 2, or tf_keras.optimizers.legacy",
    "tf1": "TensorFlow 1",
}


class UnreadableError(ValueError):
    """The error for a damaged or unknown file. The message names the file and the part."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A variable in a file. Its value is read on access.

    >>> Tensor("w0", "w0", (2,), "float32", lambda: np.zeros(2)).value().shape
    (2,)
    """

    path: str  # the path in the file, in the form shown to users: "w0", "model/layer_with_weights-0/kernel"
    name: str  # the variable's own name when it was saved: "dense/kernel"
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any] = dataclasses.field(repr=False, compare=False)

    def value(self) -> np.ndarray:
        """Return the value.

        Raises:
            ValueError: the file is damaged.
        """
        return np.asarray(self.read())


@dataclasses.dataclass
class Slots:
    """One slot of all variables, for example the momenta."""

    tensors: list[Tensor]
    #: For each tensor the variable that it belongs to; None if unknown.
    of: list[Tensor | None]
    #: For each tensor the variable's name, as far as the slot's name contains it.
    names: list[str]


@dataclasses.dataclass
class Optimizer:
    """An optimizer in a file, with its loss scale if it was wrapped."""

    path: str  # "optimizer"
    family: str  # the library: "tf_keras_legacy" (TensorFlow 2's too), "tf_keras", "keras3" or "tf1"
    name: str | None  # the class, "Adam"; None if unknown
    wrapper: str | None  # the wrapper's name; None without a wrapper
    iterations: int | None = None
    scale: float | None = None
    counter: int | None = None
    learning_rate: float | None = None
    hyperparameters: dict[str, float] = dataclasses.field(default_factory=dict)
    slots: dict[str, Slots] = dataclasses.field(default_factory=dict)
    #: Values that belong to no variable, such as Nadam's product of momenta.
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Whether the file holds the configs, which have all arguments of the optimizer and its wrapper.
    has_config: bool = False
    #: The wrapper's arguments in the file's config.
    wrapper_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def of_tf1(self) -> bool:
        """Whether it is of TensorFlow 1, whose files lack the learning rate, and whose momenta exclude that factor."""
        return self.family == "tf1"

    @property
    def scale_is_fixed(self) -> bool:
        """Whether its wrapper has a fixed loss scale."""
        dynamic = self.wrapper_arguments.get("dynamic", True) if self.has_config else self.counter is not None
        return self.wrapper is not None and not dynamic

    @property
    def slots_are_lists(self) -> bool:
        """Whether it is of Keras 3 or tf_keras, whose slots are lists, and which use the current formulas."""
        return self.family in ("keras3", "tf_keras")


@dataclasses.dataclass
class File:
    """A checkpoint or model that was read."""

    path: str
    kind: str
    writer: str
    variables: list[Tensor]
    optimizers: list[Optimizer]
    #: Variables outside of models and optimizers, such as a manager's `save_counter`.
    others: list[Tensor] = dataclasses.field(default_factory=list)
    #: Path of an object -> name of a part -> path of that part, down to variables; empty if the file has no objects.
    objects: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def damage_is_said(path: str, part: str) -> Iterator[None]:
    """Turn the various errors of libraries about damaged files into one clear error.

    >>> try:
    ...     with damage_is_said("model.keras", "config.json"):
    ...         raise EOFError("no closing bracket")
    ... except UnreadableError as error:
    ...     print(str(error)[:67])
    model.keras: config.json cannot be read, because the file is cut sh

    Args:
        path: the file.
        part: the part of the file that the block reads.

    Raises:
        UnreadableError: names the file and the part.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, UnreadableError):
        raise
    except Exception as error:  # the error depends on the library and on which byte is damaged
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnreadableError(
            f"{path}: {part} cannot be read, because the file is cut short or damaged ({why}). Use another copy of it."
        ) from error
