"""Family: an inner optimizer, and how its library builds, reduces, applies and saves."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import replicas, scaling
from tf_lossscale.core.graphs import runs_in_order
from tf_lossscale.wrapper import options as options_lib
from tf_lossscale.wrapper.grads_and_vars import tensors_of, without_none

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Variable


class Family(abc.ABC):
    """One inner optimizer, with its library's way of doing things. Derive from it to support another library.

    A family knows its optimizer but not the wrapper. Two methods have no default: `build`, which creates the
    optimizer's variables, and `apply`, which applies reduced gradients.

    >>> class Descent(Family):
    ...     def build(self, variables):
    ...         pass
    ...     def apply(self, gradients, variables):
    ...         for gradient, variable in zip(gradients, variables):
    ...             variable.assign_sub(self.inner.learning_rate * gradient)
    ...     def count_skipped_step(self):
    ...         return None
    >>> import types
    >>> family, weight = Descent(types.SimpleNamespace(learning_rate=0.5)), tf.Variable(1.0)
    >>> family.apply([tf.constant(1.0)], [weight])
    >>> weight.numpy().item()
    0.5

    Args:
        inner: the optimizer.
    """

    #: The base class of the family's optimizers, which `register_family` requires.
    optimizer_class: type | None = None
    #: Classes of the library that the wrapper derives from, too, for the library's `isinstance` checks.
    wrapper_bases: tuple[type, ...] = ()

    def __new__(cls, inner: Any) -> Family:
        counts = cls.count_skipped_step is not Family.count_skipped_step or _counts_its_steps(inner)
        missing = [*cls.__abstractmethods__, *([] if counts else ["count_skipped_step"])]
        require_answers(cls, missing, f"a {type(inner).__name__}")
        return super().__new__(cls)

    def __init__(self, inner: Any):
        self.inner = inner
        self._built_for: list[weakref.ref[Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        new = object.__new__(type(self))
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()}, _built_for=[])
        return new

    # Building. --------------------------------------------------------------------------------------------------

    #: Whether variables without a gradient get no slots, as in old checkpoints.
    slots_need_gradients = False

    @abc.abstractmethod
    def build(self, variables: list[Variable]) -> None:
        """Create the variables that the optimizer lacks. Each trace, and each step with other variables, calls this."""

    def ensure_built(self, variables: list[Variable]) -> None:
        """Build the optimizer. In eager mode, do so only if the variables differ from the last call's."""
        remembers = tf.executing_eagerly() and not tf.distribute.has_strategy()
        same = [last() is variable for last, variable in zip(self._built_for, variables)]
        if remembers and len(self._built_for) == len(variables) and all(same):
            return
        self.build(variables)
        self._built_for = [weakref.ref(variable) for variable in variables] if remembers else []

    @property
    def is_built(self) -> bool:
        """Whether the optimizer has its slots, after which options cannot be set."""
        return False

    def known_variables(self) -> list[Variable] | None:
        """Return the variables that the optimizer was built for; None if it does not store them."""
        return None

    # Reducing. --------------------------------------------------------------------------------------------------

    #: Whether a step sums the gradients over the replicas; False if the library leaves that to the caller.
    sums_over_replicas = True
    #: A function that sums (gradient, variable) pairs instead of the strategy; None if the strategy does.
    own_aggregation: Callable[..., Any] | None = None
    #: Whether `apply_gradients` without pairs is a finite step, rather than an error.
    takes_empty_steps = False
    #: Whether the optimizers return the operations of an update, which a legacy graph needs.
    returns_operations = False
    #: Whether `apply` also takes gradients that `get_unscaled_gradients` returned.
    apply_takes_unscaled = False
    #: A factor of the loss besides the loss scale, or None.
    loss_scale_factor: Any = None

    def gradients(
        self, loss: tf.Tensor, variables: list[Variable], grad_loss: Any, tape: tf.GradientTape
    ) -> list[tuple[Gradient, Variable]]:
        """Return the (gradient, variable) pairs of a scaled loss."""
        return list(zip(tape.gradient(loss, tensors_of(variables), grad_loss), variables))

    def unscale(self, gradients: list[Any], factor: tf.Tensor, variables: list[Any] | None = None) -> list[Any]:
        """Divide gradients by the factor of the loss. Their variables are given in `apply`, and are None elsewhere."""
        del variables
        return scaling.unscale(gradients, factor)

    def reduce(self, gradients: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Sum the gradients over the replicas, in a replica context."""
        if self.own_aggregation is not None:
            return without_none(self.own_aggregation, gradients, variables)
        return replicas.sum_over_replicas(gradients)

    # Applying. --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def apply(self, gradients: list[Gradient], variables: list[Variable], **kwargs: Any) -> Any:
        """Apply reduced gradients with the optimizer, without reducing them again."""

    def require_graph_mode(self) -> None:
        """Raise in a legacy graph if the optimizer cannot train there."""
        if not self.returns_operations and not runs_in_order():
            inner = type(self.inner)
            raise RuntimeError(
                f"{inner.__module__}.{inner.__name__} cannot train in graph mode: a Session would run only a part of "
                "its update. Wrap an optimizer of tf_keras.optimizers.legacy or tf.compat.v1.train, put the step into "
                "a tf.function, or leave out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()."
            )

    def takes(self, keyword: str) -> bool:
        """Return whether the optimizer's `apply_gradients` takes a keyword."""
        method = getattr(self.inner, "apply_gradients", None)
        return method is not None and _takes(getattr(method, "__func__", method), keyword)

    def count_skipped_step(self) -> Any:
        """Add a skipped step to the count of steps."""
        return self.inner.iterations.assign_add(1)

    def start_averages(self) -> Any:
        """In a skipped step, start the averages that the optimizer would start in its first step."""
        return None

    def result(self) -> Any:
        """Return the result of `apply_gradients` in eager mode."""
        return None

    def obstacle(self) -> str | None:
        """Return the reason why XLA cannot compile the optimizer's update; None if no reason is known."""
        if getattr(self.inner, "has_step_hooks", False):
            return "the optimizer's step hooks are Python functions"
        return None

    #: Attributes of the optimizer that each step sets before it reads them.
    set_in_each_step: tuple[str, ...] = ()

    def replica_variables(self) -> Iterable[tuple[Any, str]]:
        """Return (object, attribute) for each variable of which every replica writes its own copy in a step."""
        return ()

    # Hyperparameters and options. -------------------------------------------------------------------------------

    #: Attributes of the optimizer, besides its hyperparameters, that can be read and set on the wrapper.
    delegated: tuple[str, ...] = options_lib.CLIPS
    #: Keyword arguments of the wrapper that are set on the family's optimizers.
    options: tuple[str, ...] = options_lib.CLIPS
    #: The optimizer's attribute that the wrapper's keyword `name` sets; None if the wrapper has no such keyword.
    name_attribute: str | None = None

    def hyperparameter_names(self) -> tuple[str, ...]:
        """Return the names of the optimizer's hyperparameters, without `learning_rate`."""
        return tuple(getattr(self.inner, "hyperparameter_names", ()))

    def checked_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that must be set on the optimizer, or raise and change nothing."""
        name = None if self.name_attribute is None else options_lib.take_name(given)
        wanted = options_lib.checked(self.inner, given, self.options)
        if wanted and self.is_built:
            raise ValueError(
                f"`{next(iter(wanted))}` must be set before the inner {type(self.inner).__name__} is built, but it is "
                "built. Wrap the optimizer before its first step."
            )
        return wanted if name is None else {**wanted, self.name_attribute: name}  # type: ignore[dict-item]

    def set_options(self, wanted: dict[str, Any]) -> None:
        """Set the options on the optimizer."""
        for name, value in wanted.items():
            setattr(self.inner, name, value)

    # Configs and copies. ----------------------------------------------------------------------------------------

    def config(self) -> Any:
        """Return the config of the optimizer."""
        raise _without_config(type(self.inner).__name__)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        """Create an optimizer from the result of `config`."""
        del config, custom_objects
        raise _without_config("The inner optimizer")

    def copied(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the optimizer, with its state."""
        return copy.deepcopy(self.inner, memo)

    def parts_changed(self) -> Any:
        """Drop the library's cached list of the optimizer's parts, because the loss scale was added."""
        return None

    # Restoring, for `migrate`. ----------------------------------------------------------------------------------

    #: The library's module of optimizer classes; None for a family that `migrate` cannot restore.
    optimizers: Any = None
    #: The name of that module in users' code.
    optimizers_name = ""
    #: Whether slots are lists of variables, as in Keras 3 and tf_keras; False for TensorFlow 2's slots and formulas.
    slots_are_lists = True
    #: Nadam's attribute with the product of its momenta, and the decay of its schedule.
    nadam_product = ("_u_product", 1.0)

    def slot(self, variable: Any, name: str, attribute: str) -> Any:
        """Return a variable's slot, by its name in TensorFlow 2 and its list in Keras 3; None if there is none."""
        del variable, name, attribute
        raise NotImplementedError(f"The family of {type(self.inner).__name__} must define slot() to find a slot.")

    def set_iterations(self, value: int) -> None:
        """Set the count of steps."""
        self.inner.iterations.assign(value)

    def given_learning_rate(self) -> Any:
        """Return the learning rate as the optimizer stores it: a variable, a number, a function or a schedule."""
        return getattr(self.inner, "_learning_rate", None)

    @staticmethod
    def with_layer_names(objects: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Return the objects of a checkpoint, with the library's names for layers and weights added."""
        return objects


def require_answers(family: type, missing: Collection[str], optimizers: str) -> None:
    """Raise if a family lacks methods that its optimizers need.

    >>> require_answers(Family, [], "optimizers of class SGD")

    Args:
        family: the class.
        missing: names of the methods.
        optimizers: the optimizers that need the methods, for the message.

    Raises:
        TypeError: a method is missing.
    """
    if missing:
        raise TypeError(
            f"{family.__name__} must define {' and '.join(f'{name}()' for name in sorted(missing))} for "
            f"{optimizers}. See the documentation of tf_lossscale.Family."
        )


def _counts_its_steps(inner: Any) -> bool:
    return hasattr(type(inner), "iterations") or "iterations" in getattr(inner, "__dict__", ())


@functools.lru_cache(maxsize=64)
def _takes(function: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _without_config(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no config, and so its LossScaleOptimizer has none. Save it with tf.train.Checkpoint."
    )
