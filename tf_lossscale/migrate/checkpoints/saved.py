"""Classes for the contents of a checkpoint or saved model, whatever its file format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

# Maps each value of `Optimizer.family` to the library name shown in messages.
LIBRARIES = {
    "keras3": "Keras 3",
    "tf_keras": "tf_keras",
    "tf_keras_legacy": "TensorFlow 2, or tf_keras.optimizers.legacy",
    "tf1": "TensorFlow 1",
}


class UnreadableError(ValueError):
    """Raised if a file is damaged or has an unknown format. The message names the file and the damaged part."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A variable in a file. Its value is read only when `value` is called.

    >>> Tensor("w0", "w0", (2,), "float32", lambda: np.zeros(2)).value().shape
    (2,)
    """

    #: The variable's path in the file, for example "w0" or "model/layer_with_weights-0/kernel".
    path: str
    #: The name that the variable had when it was saved, for example "dense/kernel".
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any] = dataclasses.field(repr=False, compare=False)

    @property
    def is_counter(self) -> bool:
        """Whether this is an integer scalar, such as a step count."""
        return self.dtype.startswith("int") and not self.shape

    def value(self) -> np.ndarray:
        """Read the value from the file.

        Raises:
            ValueError: the file is damaged.
        """
        return np.asarray(self.read())


class Slot(NamedTuple):
    """A tensor that an optimizer keeps for one trained variable, for example its momentum."""

    tensor: Tensor
    #: The trained variable, or None if it is unknown.
    owner: Tensor | None
    #: A name that may end with the name of the trained variable. If `owner` is None, the variable is looked up by this
    #: name.
    name: str


@dataclasses.dataclass
class Optimizer:
    """An optimizer in a file, with its loss scale if it was wrapped."""

    #: The optimizer's path in the file, for example "optimizer".
    path: str
    #: The optimizer's library: "keras3", "tf_keras", "tf_keras_legacy" (including TensorFlow 2.0 to 2.10) or "tf1".
    family: str
    #: The name of the class, for example "Adam", or None if unknown.
    name: str | None
    #: The wrapper around the optimizer, as `tf-lossscale inspect` shows it, or None if the optimizer was not wrapped.
    wrapper: str | None = None
    iterations: int | None = None
    scale: float | None = None
    counter: int | None = None
    learning_rate: float | None = None
    hyperparameters: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Maps each slot name, for example "momentum", to the slots of all trained variables. These are the slot names that
    #: TensorFlow 2 uses, or the names in the file if the optimizer's class is unknown.
    slots: dict[str, list[Slot]] = dataclasses.field(default_factory=dict)
    #: The powers of the betas that TensorFlow 1's Adam saves: `beta1_power` and `beta2_power`.
    powers: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Whether the file holds the configs of the optimizer and of its wrapper, with all of their arguments.
    has_config: bool = False
    #: The arguments of the wrapper, as read from its config in the file.
    wrapper_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def of_tf1(self) -> bool:
        """Whether this is a TensorFlow 1 optimizer, whose files do not contain the learning rate."""
        return self.family == "tf1"

    @property
    def scale_is_fixed(self) -> bool:
        """Whether the optimizer was wrapped with a fixed loss scale."""
        dynamic = self.wrapper_arguments.get("dynamic", True) if self.has_config else self.counter is not None
        return self.wrapper is not None and not dynamic

    @property
    def slots_are_lists(self) -> bool:
        """Whether this is a Keras 3 or tf_keras optimizer. Such optimizers save slots as lists and use newer update
        formulas."""
        return self.family in ("keras3", "tf_keras")


@dataclasses.dataclass
class File:
    """The contents of a checkpoint or saved model."""

    path: str
    kind: str
    writer: str
    variables: list[Tensor]
    optimizers: list[Optimizer]
    #: Variables outside of models and optimizers, such as the `save_counter` of a `tf.train.Checkpoint`.
    others: list[Tensor] = dataclasses.field(default_factory=list)
    #: The object graph. It maps the path of each object to a dict from the names of its children to their paths. It is
    #: empty if the file has no object graph.
    objects: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    #: Whether `variables` is in the order in which Keras lists a model's variables. If it is False, variables of one
    #: shape may be in another order.
    order_is_known: bool = True

    @property
    def ordered_variables(self) -> list[Tensor]:
        """The variables in Keras's order, or an empty list if the file does not tell the order."""
        return self.variables if self.order_is_known else []


@contextlib.contextmanager
def explaining_damage(path: str, part: str) -> Iterator[None]:
    """Turn any error that a library raises for a damaged file into an `UnreadableError`.

    >>> try:
    ...     with explaining_damage("model.keras", "config.json"):
    ...         raise EOFError("no closing bracket")
    ... except UnreadableError as error:
    ...     print(str(error)[:67])
    model.keras: config.json cannot be read, because the file is trunca

    Args:
        path: the file.
        part: the part of the file that the `with` block reads.

    Raises:
        UnreadableError: reading failed. The message names the file and the part.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, UnreadableError):
        raise
    # The type of the error depends on the library and on which byte of the file is damaged.
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnreadableError(
            f"{path}: {part} cannot be read, because the file is truncated or damaged ({why}). Use another copy."
        ) from error
