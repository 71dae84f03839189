"""Family: the interface between LossScaleOptimizer and the library of its inner optimizer."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.core import replicas, scaling
from tf_lossscale.core.graphs import runs_in_order
from tf_lossscale.libraries.models import tensors_of
from tf_lossscale.wrapper import checks
from tf_lossscale.wrapper.checks import without_none

if TYPE_CHECKING:
    from tf_lossscale.types import Gradient, Variable


class Family(abc.ABC):
    """Base class of adapters between LossScaleOptimizer and an optimizer library. Each instance adapts one optimizer.

    Derive a class to support another library. It must define `build`, which creates the optimizer's variables, and
    `apply`, which applies gradients that are already summed over the replicas. If the optimizer counts its steps in an
    attribute that is not named `iterations`, or in a number, the class must also define `count_skipped_step`. A number
    grows only while a `tf.function` is traced, so a count that a step uses has to be a variable.

    >>> class Descent(Family):
    ...     def build(self, variables):
    ...         pass
    ...     def apply(self, gradients, variables):
    ...         for gradient, variable in zip(gradients, variables):
    ...             variable.assign_sub(self.inner.learning_rate * gradient)
    >>> import types
    >>> family, weight = Descent(types.SimpleNamespace(learning_rate=0.5)), tf.Variable(1.0)
    >>> family.apply([tf.constant(1.0)], [weight])
    >>> weight.numpy().item()
    0.5

    Args:
        inner: the inner optimizer.
    """

    #: The base class of the family's optimizers. `register_family` requires this attribute.
    optimizer_class: type | None = None
    #: Additional base classes of the wrapper class. With them, wrappers pass the library's `isinstance` checks.
    wrapper_bases: tuple[type, ...] = ()

    def __new__(cls, inner: Any) -> Family:
        counts = cls.count_skipped_step is not Family.count_skipped_step or not _counts_in_a_number(inner)
        missing = [*cls.__abstractmethods__, *([] if counts else ["count_skipped_step"])]
        require_methods(cls, missing, f"a {type(inner).__name__}")
        return super().__new__(cls)

    def __init__(self, inner: Any):
        self.inner = inner
        self._built_for: list[weakref.ref[Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()}, _built_for=[])
        return new

    # Building. --------------------------------------------------------------------------------------------------

    #: Whether the optimizer creates slots only for variables that have a gradient, as legacy and TF1 optimizers do.
    _slots_need_gradients = False

    @abc.abstractmethod
    def build(self, variables: list[Variable]) -> None:
        """Create the optimizer's variables that do not exist yet.

        This method is called whenever a step is traced, on each replica, so it must create variables in a
        `tf.init_scope`. In eager mode without a strategy, it is called only if a step has different variables than the
        previous step.
        """

    def _ensure_built(self, variables: list[Variable]) -> bool:
        """Call `build`, except in eager mode without a strategy if the variables are the same as last time.

        Return whether `build` was called.
        """
        remembers = tf.executing_eagerly() and not tf.distribute.has_strategy()
        same = [last() is variable for last, variable in zip(self._built_for, variables)]
        if remembers and len(self._built_for) == len(variables) and all(same):
            return False
        if self._writes_variables_directly and replicas.several_replicas():
            _require_copies(self.inner)
        try:
            self.build(variables)
        except ValueError as error:
            # TensorFlow has two texts for this error, and both contain these words.
            if tf.executing_eagerly() or "first call" not in str(error):
                raise
            raise ValueError(
                f"{type(self.inner).__name__} has no state yet for some variables of this step, and a tf.function "
                "creates variables only in its first call. Call optimizer.build(variables) with all variables that "
                f"the optimizer will train, before the function is called. TensorFlow's error is: {error}"
            ) from error
        self._built_for = [weakref.ref(variable) for variable in variables] if remembers else []
        return True

    #: Whether `apply` writes the optimizer's variables without a merge call. If so, each replica needs a copy of them.
    _writes_variables_directly = True

    @property
    def _is_built(self) -> bool:
        """Whether the optimizer has created its slots. Options can be set only before that."""
        return False

    def known_variables(self) -> list[Variable] | None:
        """Return the variables that the optimizer was built for. If the optimizer does not store them, return None."""
        return None

    # Gradients. -------------------------------------------------------------------------------------------------

    #: Whether a step sums the gradients over the replicas. If False, the library leaves the summing to the caller.
    sums_over_replicas = True
    #: Whether `apply_gradients([])` counts as a finite step. If False, such a call raises an error.
    _takes_empty_steps = False
    #: Whether `minimize` does nothing if there are no variables, as in `fit` of a model without trainable variables.
    _minimizes_without_variables = False
    #: Whether the family's optimizers return the operations that a session runs to apply an update in a TF1 graph.
    _returns_operations = False
    #: Whether the wrapper's `apply` also accepts gradients that `get_unscaled_gradients` returned.
    _apply_takes_unscaled = False

    def _gradients(
        self, loss: tf.Tensor, variables: list[Variable], grad_loss: Any, tape: tf.GradientTape
    ) -> list[tuple[Gradient, Variable]]:
        """Compute the gradients of a scaled loss, and return (gradient, variable) pairs."""
        return list(zip(tape.gradient(loss, tensors_of(variables), grad_loss), variables))

    def _overwrites(self, variable: Variable) -> bool:
        """Return whether the optimizer replaces a variable's value with the gradient.

        Such a gradient does not depend on the loss scale, so it must not be unscaled.
        """
        del variable
        return False

    def _unless_overwritten(
        self, change: Callable[..., list[Any]], gradients: list[Any], variables: list[Any]
    ) -> list[Any]:
        """Apply `change` to gradients and variables. Gradients that overwrite their variables stay as they are."""
        overwritten = [self._overwrites(variable) for variable in variables]
        changed = change([None if new else g for g, new in zip(gradients, overwritten)], variables)
        return [g if new else other for g, other, new in zip(gradients, changed, overwritten)]

    def _unscale(self, gradients: list[Any], factor: tf.Tensor, variables: list[Any] | None = None) -> list[Any]:
        """Divide gradients by the factor that the loss was multiplied by.

        `variables` are the gradients' variables if the gradients are about to be applied, otherwise None.
        """
        del variables
        return scaling.unscale(gradients, factor)

    def _reduces_itself(self, variables: list[Variable]) -> bool:
        """Return whether `_reduce` must reduce these variables' gradients, because it does more than sum them."""
        del variables
        return False

    def _reduce(
        self, gradients: list[Gradient], variables: list[Variable], custom_sum: Callable[..., Any] | None
    ) -> list[Gradient]:
        """Sum the gradients over the replicas, with `custom_sum` if it is not None. Called in a replica context."""
        if custom_sum is not None:
            return without_none(custom_sum, gradients, variables)
        return replicas.sum_over_replicas(gradients)

    def _custom_sum(self) -> Callable[..., Any] | None:
        """Return a user's method of the optimizer that sums gradients over the replicas or workers, or None.

        The method takes and returns (gradient, variable) pairs.
        """
        return None

    # Applying. --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def apply(self, gradients: list[Gradient], variables: list[Variable], **kwargs: Any) -> Any:
        """Apply gradients that are already summed over the replicas, without summing them again."""

    def _require_graph_mode(self) -> None:
        """Raise an error if a TF1 graph is being built and the optimizer cannot train in it."""
        if not self._returns_operations and not runs_in_order():
            inner = type(self.inner)
            raise RuntimeError(
                f"{inner.__module__}.{inner.__name__} cannot train in graph mode: a Session would run only part of "
                "its update. Wrap an optimizer from tf_keras.optimizers.legacy or tf.compat.v1.train, put the step "
                "into a tf.function, or leave out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()."
            )

    def _takes(self, keyword: str) -> bool:
        """Return whether `apply` accepts a keyword argument, which a family may pass on to the optimizer."""
        accepted, passes_on = _keywords(type(self).apply)
        if keyword in accepted or not passes_on:
            return keyword in accepted
        method = getattr(self.inner, "apply_gradients", None)
        named, any_other = ((), False) if method is None else _keywords(getattr(method, "__func__", method))
        return keyword in named or any_other

    def count_skipped_step(self) -> Any:
        """Increment the optimizer's step count after a skipped step. The default does so if it has `iterations`."""
        iterations = getattr(self.inner, "iterations", None)
        return None if iterations is None else iterations.assign_add(1)

    def _start_averages(self) -> Any:
        """When a step is skipped, initialize state that the optimizer otherwise initializes in its first step."""
        return None

    def _result(self) -> Any:
        """Return the value that the wrapper's `apply_gradients` returns in eager mode."""
        return None

    def _replica_variables(self) -> Iterable[tuple[Any, str]]:
        """Return an (object, attribute name) pair for each variable that every replica updates independently."""
        return ()

    # Hyperparameters and options. -------------------------------------------------------------------------------

    #: Attributes of the optimizer that can be read and set on the wrapper, in addition to hyperparameters.
    delegated: tuple[str, ...] = ()
    #: Keyword arguments of the wrapper's constructor that are set as attributes of the inner optimizer.
    _options: tuple[str, ...] = ()
    #: The attribute of the optimizer that the constructor argument `name` sets, or None if `name` is not accepted.
    _name_attribute: str | None = None

    @property
    def learning_rate_name(self) -> str:
        """The name of the attribute in which the optimizer stores its learning rate."""
        for name in ("learning_rate", "lr"):
            if hasattr(self.inner, name):
                return name
        raise AttributeError(
            f"The inner {type(self.inner).__name__} has neither a `learning_rate` nor an `lr`. Read or set its own "
            "attribute on optimizer.inner_optimizer."
        )

    def hyperparameter_names(self) -> tuple[str, ...]:
        """Return the names of the optimizer's hyperparameters other than `learning_rate`."""
        return tuple(getattr(self.inner, "hyperparameter_names", ()))

    def _checked_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Check constructor options, and return the attributes to set on the optimizer, without setting them.

        `name` is removed from `given`.
        """
        name = None if self._name_attribute is None else checks.take_name(given)
        wanted = checks.checked_options(self.inner, given, self._options)
        if wanted and self._is_built:
            raise ValueError(
                f"`{next(iter(wanted))}` must be set before the inner {type(self.inner).__name__} is built, but it "
                "is already built. Wrap the optimizer before its first step."
            )
        return wanted if name is None else {**wanted, self._name_attribute: name}  # type: ignore[dict-item]

    def _set_options(self, wanted: dict[str, Any]) -> None:
        """Set the options on the optimizer."""
        for name, value in wanted.items():
            setattr(self.inner, name, value)

    # Configs and copies. ----------------------------------------------------------------------------------------

    #: The library's module with `get_registered_name` and `get_registered_object`, which find registered classes.
    _saving: Any = None

    def config(self) -> Any:
        """Return the optimizer's config."""
        raise _without_config(type(self.inner).__name__)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        """Create an optimizer from a config that `config` returned."""
        del config, custom_objects
        raise _without_config("The inner optimizer")

    def _copied(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy of the optimizer, including its state."""
        return copy.deepcopy(self.inner, memo)

    def _parts_changed(self) -> Any:
        """If the library caches a list of the objects that the optimizer tracks, delete this list."""
        return None


def overridden(optimizer: Any, method: str, base: type) -> Any:
    """Return a method of an optimizer, or None if it is the method of the library's class `base`.

    The method may come from a subclass or a mixin, or be an attribute of the object.
    """
    found = getattr(optimizer, method)
    return None if getattr(found, "__func__", None) is getattr(base, method) else found


def without_summing(optimizer: Any, *methods: str) -> contextlib.AbstractContextManager[None]:
    """In a `with` block, let methods that sum (gradient, variable) pairs over the replicas return them as they are."""
    return replicas.overriding(optimizer, **dict.fromkeys(methods, _unchanged))


def _unchanged(grads_and_vars: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return list(grads_and_vars)


def require_methods(family: type, missing: Collection[str], optimizers: str) -> None:
    """Raise a TypeError if a family class does not define all methods that its optimizers need."""
    if missing:
        raise TypeError(
            f"{family.__name__} must define {' and '.join(f'{name}()' for name in sorted(missing))} for "
            f"{optimizers}. See the documentation of tf_lossscale.Family."
        )


def _require_copies(inner: Any) -> None:
    """Raise an error if the optimizer has variables without a copy for each replica, which would all write them."""
    holder = tf.Module()
    holder.attributes = dict(getattr(inner, "__dict__", {}))
    for variable in holder.variables:
        if replicas.strategy_of(variable) is None:
            raise ValueError(
                f"The variable {variable.name} of the inner {type(inner).__name__}, or of its loss scale, was created "
                "outside of strategy.scope(), so every replica would update it once in each step. Create the optimizer "
                "and its LossScaleOptimizer in strategy.scope()."
            )


def _counts_in_a_number(inner: Any) -> bool:
    """Return whether an optimizer's `iterations` is a Python number, which has no `assign_add`."""
    # Reading a property may create its variable, so the value of a property is not looked at.
    of_class = getattr(type(inner), "iterations", None)
    value = getattr(inner, "__dict__", {}).get("iterations", of_class)
    if isinstance(value, types.MemberDescriptorType):
        value = getattr(inner, "iterations", None)
    return isinstance(value, (int, float))


@functools.lru_cache(maxsize=64)
def _keywords(function: Callable[..., Any]) -> tuple[Collection[str], bool]:
    """Return the names of a function's parameters, and whether it also accepts other keyword arguments."""
    parameters = inspect.signature(function).parameters
    return tuple(parameters), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _without_config(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no config, so neither does its LossScaleOptimizer. Save it with tf.train.Checkpoint."
    )
