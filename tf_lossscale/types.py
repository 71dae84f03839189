"""Types for public signatures. Type checkers need TensorFlow's stubs (`types-tensorflow`) to resolve them.

Import this module's types only under `if TYPE_CHECKING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
import tensorflow as tf

#: A number, in any form that TensorFlow converts to a scalar.
Scalar: TypeAlias = "float | np.generic | tf.Tensor"

#: A value that TensorFlow converts to a tensor.
TensorLike: TypeAlias = "Scalar | np.ndarray[Any, Any] | Sequence[TensorLike]"

#: A dtype: its name, or a TensorFlow or NumPy dtype object.
DType: TypeAlias = "str | tf.DType | np.dtype[Any] | type[np.generic]"

#: The gradient of one variable, or None if the loss does not depend on the variable.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"

#: The gradients that `tape.gradient(loss, sources)` returns, in the structure of `sources`.
Gradients: TypeAlias = "Gradient | Sequence[Gradients] | dict[str, Gradients]"


class OtherVariable(Protocol):
    """A variable that is not a `tf.Variable`, for example a `keras.Variable`."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def assign(self) -> Callable[..., Any]: ...

    @property
    def numpy(self) -> Callable[[], Any]: ...


#: A TensorFlow or Keras variable. Type checkers do not know the methods of tf.Variable.
Variable: TypeAlias = "tf.Variable | OtherVariable"


#: A model or layer of Keras, a `tf.Module`, or another object that `tf.train.Checkpoint` saves.
Model: TypeAlias = Any


class AppliesGradients(Protocol):
    """An optimizer with an `apply_gradients` method, such as a Keras or TensorFlow optimizer."""

    @property
    def apply_gradients(self) -> Callable[..., Any]: ...


class Applies(Protocol):
    """An optimizer with an `apply` method, such as a Sonnet or Keras 3 optimizer."""

    @property
    def apply(self) -> Callable[..., Any]: ...


#: An optimizer that LossScaleOptimizer can wrap.
Optimizer: TypeAlias = "AppliesGradients | Applies"


#: A loss tensor, or a function without arguments that returns one.
Loss: TypeAlias = "tf.Tensor | Callable[[], tf.Tensor]"

#: A variable, a sequence of variables, or a function that returns either.
Variables: TypeAlias = "Variable | Iterable[Variable] | Callable[[], Variable | Iterable[Variable]]"

# Type variables for functions whose result has the type or structure of an argument.
Same = TypeVar("Same")
SameFunction = TypeVar("SameFunction", bound=Callable[..., Any])
SameGradient = TypeVar("SameGradient", bound="Gradient")


class _Scale(TypedDict):
    loss_scale: float


class State(_Scale, total=False):
    """The state of a loss scale as plain numbers. If no step can be skipped, it has only `loss_scale`.

    >>> State(loss_scale=8.0)
    {'loss_scale': 8.0}
    """

    dynamic_counter: int
    bad_steps: int
    skipped_steps: int
    skipped_in_a_row: int
    total_steps: int
