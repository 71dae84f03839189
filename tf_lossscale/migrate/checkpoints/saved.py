"""Classes for the contents of a checkpoint, a saved model or a live optimizer, whatever its format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.writing import printable

# Maps each value of `Optimizer.family` to the libraries that write such an optimizer, as messages show them.
LIBRARIES = {
    "keras3": "Keras 3",
    "tf_keras": "TensorFlow 2.11 to 2.15, or tf_keras",
    "tf_keras_legacy": "TensorFlow 2.0 to 2.15, or tf_keras legacy",
    "tf1": "TensorFlow 1.13 to 2 (tf.compat.v1.train)",
}

#: Maps each value of a dynamic loss scale, by its key in `LossScale.state()`, to the names that it has had.
SCALE_NAMES: dict[str, tuple[str, ...]] = {
    "loss_scale": ("current_loss_scale", "dynamic_scale", "loss_scale"),
    "dynamic_counter": ("good_steps", "step_counter", "counter"),
    **{name: (name,) for name in ("bad_steps", "skipped_steps", "skipped_in_a_row", "total_steps")},
}


class FileError(ValueError):
    """Raised if a file is damaged, has an unknown format or does not match. The message names the file and the part."""

    def __init__(self, message: str):
        super().__init__(printable(message))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A variable in a file. Its value is read only when `value` is called."""

    #: The variable's path in the file, for example "w0" or "model/layer_with_weights-0/kernel".
    path: str
    #: The name that the variable had when it was saved, for example "dense/kernel".
    name: str
    shape: tuple[int, ...]
    dtype: str
    #: A function that reads the value, or None for a variable of which only the name is known.
    read: Any = dataclasses.field(repr=False, compare=False)

    @property
    def is_weight(self) -> bool:
        """Whether this is neither a step count nor the state of a random number generator of Keras 3."""
        return not self.dtype.startswith("uint") and (not self.dtype.startswith("int") or bool(self.shape))

    def value(self) -> np.ndarray:
        """Read the value from the file."""
        return np.asarray(self.read())

    def number(self) -> Any:
        """Read the value of a scalar as a Python number. If it is not a real number, raise a ValueError."""
        number: Any = self.value().item()
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{self.path} must be a real number, but is {number!r}")
        return number


class Slot(NamedTuple):
    """A tensor that an optimizer keeps for one trained variable, for example its momentum."""

    tensor: Tensor
    #: The trained variable. If a reader leaves it as None, `File` looks for the variable by the tensor's full name.
    owner: Tensor | None


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
    #: The step count. With gradient accumulation in Keras 3, it counts micro-steps.
    iterations: int | None = None
    learning_rate: float | None = None
    #: The other hyperparameters, and the arguments of the wrapper's rules, as far as the file contains them.
    hyperparameters: dict[str, float] = dataclasses.field(default_factory=dict)
    wrapper_arguments: dict[str, float] = dataclasses.field(default_factory=dict)
    #: The state of the loss scale, with the keys of `LossScale.state()`. A fixed scale has only a `loss_scale`.
    scale_state: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Whether the loss scale is known to be fixed.
    scale_is_fixed: bool = False
    #: Maps each slot name, for example "momentum", to the slots of all trained variables. These are the slot names that
    #: TensorFlow 2 uses, or the names in the file if the optimizer's class is unknown.
    slots: dict[str, list[Slot]] = dataclasses.field(default_factory=dict)
    #: The trained variables in the order of the optimizer's `build`, as far as a Keras 3 or live optimizer tells it.
    trained: list[Tensor] = dataclasses.field(default_factory=list)
    #: Nadam's product of the momentum coefficients of all steps, with the schedule of the optimizer's library.
    nadam_product: float | None = None
    #: The powers of the betas that TensorFlow 1's Adam saves: `beta1_power` and `beta2_power`.
    powers: dict[str, float] = dataclasses.field(default_factory=dict)
    #: The optimizer's own name, which its slots' names contain.
    scope: str = ""
    #: The paths of the remaining variables of the optimizer and of its wrapper. Their meaning is unknown.
    others: list[str] = dataclasses.field(default_factory=list)

    @property
    def of_tf1(self) -> bool:
        """Whether this is a TensorFlow 1 optimizer, whose files do not contain the learning rate."""
        return self.family == "tf1"

    @property
    def slots_are_lists(self) -> bool:
        """Whether this is a Keras 3 or tf_keras optimizer. Such optimizers save slots as lists and use newer update
        formulas."""
        return self.family in ("keras3", "tf_keras")


def scale_values(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values of a dynamic loss scale. If there is no loss scale, return an empty dict."""
    found = {key: [value for name in names if (value := get(name)) is not None] for key, names in SCALE_NAMES.items()}
    return {key: values[0] for key, values in found.items() if values} if found["loss_scale"] else {}


@dataclasses.dataclass
class File:
    """The contents of a checkpoint, a saved model or a live optimizer."""

    path: str
    kind: str
    writer: str
    variables: list[Tensor]
    optimizers: list[Optimizer]
    #: Whether `variables` is in the order in which Keras lists a model's variables.
    order_is_known: bool = True
    #: The object graph of a checkpoint, which tells the paths of its objects.
    graph: Any = None
    #: The user's variable for each variable, if the source is an optimizer that was built for the user's variables.
    known: list[tuple[Tensor, Any]] | None = None
    #: What a user of `restore` has to know about the source.
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for optimizer in self.optimizers:
            for name, slots in optimizer.slots.items():
                named = [owner or self._named_in(tensor, optimizer) for tensor, owner in slots]
                # If two slots name one variable, there were two variables of this name.
                optimizer.slots[name] = [
                    Slot(tensor, None if named.count(found) > 1 and owner is None else found)
                    for (tensor, owner), found in zip(slots, named)
                ]

    def _named_in(self, slot: Tensor, optimizer: Optimizer) -> Tensor | None:
        """Return the only variable whose full name is in a slot's full name, such as `Adam/m/dense/kernel`, or None."""
        wanted = slot_names.variable_in(slot.name, optimizer.family, optimizer.scope)
        named = [
            each
            for each in self.variables
            if each.shape == slot.shape
            and wanted == (each.name.replace("/", "_") if optimizer.family == "keras3" else each.name)
        ]
        return named[0] if len(named) == 1 else None


@contextlib.contextmanager
def explaining_damage(path: str, part: str) -> Iterator[None]:
    """Turn any error that a library raises for a damaged file into a `FileError`."""
    try:
        yield
    except (FileNotFoundError, PermissionError, FileError):
        raise
    # The type of the error depends on the library and on which byte of the file is damaged.
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileError(
            f"{path}: {part} cannot be read, because the file is truncated or damaged ({why}). Use another copy."
        ) from error
