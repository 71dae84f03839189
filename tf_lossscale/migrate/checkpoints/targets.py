"""Access to the state of an optimizer of any Keras library, with or without a LossScaleOptimizer around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.variables import as_number
from tf_lossscale.migrate.checkpoints.matching import name_of
from tf_lossscale.migrate.checkpoints.saved import scale_values
from tf_lossscale.wrapper import registry


def target_of(optimizer: Any) -> Target | None:
    """Return access to an optimizer's state. If its library is not supported, return None."""
    inner = optimizer
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    wrapper_class = registry.wrapper_class_of(inner)
    # Each adapter is a module with the name of its library.
    library = "" if wrapper_class is None else wrapper_class.__module__.removeprefix("tf_lossscale.families.")
    targets = {"keras3": Target, "tf_keras": _TfKeras, "tf_keras_legacy": _Legacy}
    return targets[library](optimizer, inner, library) if library in targets else None


class Target:
    """An optimizer of Keras 3, which keeps each kind of slot as a list of variables."""

    #: Whether the optimizer stores slots as lists of variables and uses the newer update formulas.
    slots_are_lists = True
    _nadam_product = "_u_product"

    def __init__(self, optimizer: Any, inner: Any, library: str):
        self.optimizer = optimizer
        self.inner = inner
        self.library = library

    def config(self) -> dict[str, Any]:
        """Return the optimizer's config. A config of this package's wrapper is not saved, so nothing warns of it."""
        return getattr(self.optimizer, "_config_without_warning", self.optimizer.get_config)()

    @property
    def is_wrapped(self) -> bool:
        """Whether there is a LossScaleOptimizer around the optimizer."""
        return self.optimizer is not self.inner

    @property
    def micro_steps(self) -> int:
        """The number of accumulated gradients in a step, which only Keras 3 can make larger than 1."""
        return getattr(self.inner, "gradient_accumulation_steps", None) or 1

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is a schedule or function, and not a number that can be replaced."""
        rate = self.learning_rate()
        return callable(rate) and not hasattr(rate, "assign")

    def number(self, name: str) -> Any:
        """Return a hyperparameter as a number. Return other values, and None for a missing one, unchanged."""
        value: Any = getattr(self.inner, name, None)
        return value.numpy().item() if hasattr(value, "numpy") else value

    def variables(self) -> list[Any]:
        """Return all variables of the optimizer without its wrapper."""
        variables = self.inner.variables
        return list(variables() if callable(variables) else variables)

    def key(self, variable: Any) -> Any:
        """Return the key of a variable's slots in `slots`, or None if the optimizer was not built for the variable."""
        try:
            return self._key(variable)
        # The variable may also be from another library.
        except (AttributeError, KeyError):
            return None

    def _key(self, variable: Any) -> Any:
        return self.inner._get_variable_index(variable)

    def slots(self, name: str, attribute: str) -> dict[Any, Any]:
        """Return all slots of one kind."""
        del name
        return dict(enumerate(getattr(self.inner, attribute, None) or ()))

    def iterations(self) -> Any:
        """Return the variable with the step count. With gradient accumulation in Keras 3, it counts micro-steps."""
        return self.inner._iterations

    def nadam_product(self) -> Any:
        """Return the variable with the product of Nadam's momentum coefficients, or None for other optimizers."""
        return getattr(self.inner, self._nadam_product, None)

    def learning_rate(self) -> Any:
        """Return the learning rate as the optimizer stores it: a variable, a number, a function or a schedule."""
        return getattr(self.inner, "_learning_rate", None)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        rate = self.learning_rate()
        if self.has_schedule:
            rate = rate(step) if hasattr(rate, "get_config") else rate()
        return float(rate)

    def scale(self) -> float | None:
        """Return the current loss scale, or None if the optimizer is not wrapped."""
        if not self.is_wrapped:
            return None
        scale = self.optimizer.loss_scale if hasattr(self.optimizer, "_loss_scale") else self.optimizer.dynamic_scale
        return float(np.asarray(scale))

    def scale_variables(self) -> dict[str, Any]:
        """Return the variables of a dynamic loss scale, by the keys of `LossScale.state()`. A fixed scale has none."""
        # Keras 3's own wrapper has these variables itself.
        holder = getattr(self.optimizer, "_loss_scale", self.optimizer)
        return scale_values(lambda name: getattr(holder, name, None))

    def scale_places(self, state: dict[str, float]) -> list[tuple[Any, Any]]:
        """Return (variable, value) pairs that give a dynamic loss scale the values of a state, and keep the others."""
        scale: Any = getattr(self.optimizer, "_loss_scale", None)
        places: list[tuple[Any, Any]] = []
        if not isinstance(scale, LossScale) or not state:
            return [(self.scale_variables()[key], value) for key, value in state.items()]
        scale._set_state(scale.state() | state, as_number, lambda variable, value: places.append((variable, value)))
        return places

    def remaining(self, known: Iterable[Any]) -> list[str]:
        """Return the names of the variables that are neither known nor the learning rate, nor of any loss scale."""
        known = {id(each) for each in (*known, self.learning_rate(), *self.scale_variables().values())}
        of_own_rule = getattr(getattr(self.optimizer, "_loss_scale", None), "variables", ())
        return [name_of(each) for each in (*self.variables(), *of_own_rule) if id(each) not in known]


class _TfKeras(Target):
    def _key(self, variable: Any) -> Any:
        return self.inner._index_dict[self.inner._var_key(variable)]


class _Legacy(Target):
    slots_are_lists = False
    _nadam_product = "_m_cache"

    def _key(self, variable: Any) -> Any:
        key = variable._unique_id
        return key if key in self.inner._slots or not self.inner._slots else None

    def slots(self, name: str, attribute: str) -> dict[Any, Any]:
        del attribute
        return {key: slots[name] for key, slots in self.inner._slots.items() if name in slots}

    def iterations(self) -> Any:
        return self.inner.iterations

    def learning_rate(self) -> Any:
        return self.inner._hyper["learning_rate"]
