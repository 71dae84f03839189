"""Access to the slots, step count and learning rate of each Keras library's optimizers, to restore checkpoints."""

from __future__ import annotations

from typing import Any

from tf_lossscale.families import registry


def target_of(inner: Any) -> Target | None:
    """Return access to an optimizer's state. If its library is not supported, return None.

    >>> import tensorflow as tf
    >>> target_of(tf.keras.optimizers.SGD(0.5)).learning_rate().numpy().item()
    0.5

    Args:
        inner: an optimizer without a wrapper.
    """
    wrapper_class = registry.wrapper_class_of(inner)
    return None if wrapper_class is None else _TARGETS.get(wrapper_class.__module__, lambda inner: None)(inner)


class Target:
    """An optimizer of tf_keras, which keeps each kind of slot as a list of variables.

    Args:
        inner: the optimizer.
    """

    #: Whether the optimizer stores slots as lists of variables and uses the newer update formulas.
    slots_are_lists = True
    #: The attribute with the product of Nadam's momentum coefficients, and the decay of its momentum schedule.
    nadam_product = ("_u_product", 1.0)

    def __init__(self, inner: Any):
        self.inner = inner

    def slot(self, variable: Any, name: str, attribute: str) -> Any:
        """Return a variable's slot. If the slot does not exist, return None.

        Args:
            variable: the variable.
            name: the slot's name in TensorFlow 2.
            attribute: the attribute in which Keras 3 stores the list of these slots, one for each variable.

        Raises:
            KeyError: the optimizer was not built for the variable.
        """
        del name
        slots = getattr(self.inner, attribute, None)
        return slots[self._index(variable)] if slots else None

    def _index(self, variable: Any) -> int:
        return int(self.inner._index_dict[self.inner._var_key(variable)])

    def set_iterations(self, value: int) -> None:
        """Set the optimizer's step count."""
        self.inner.iterations.assign(value)

    def learning_rate(self) -> Any:
        """Return the learning rate as the optimizer stores it: a variable, a number, a function or a schedule."""
        return getattr(self.inner, "_learning_rate", None)


class _Keras3(Target):
    def _index(self, variable: Any) -> int:
        return int(self.inner._get_variable_index(variable))

    def set_iterations(self, value: int) -> None:
        registry.family_of(self.inner).set_iterations(value)


class _Legacy(Target):
    slots_are_lists = False
    nadam_product = ("_m_cache", 0.004)

    def slot(self, variable: Any, name: str, attribute: str) -> Any:
        del attribute
        return self.inner.get_slot(variable, name) if name in self.inner.get_slot_names() else None

    def learning_rate(self) -> Any:
        return self.inner._hyper["learning_rate"]


# Maps the module of each wrapper class to the class of targets for the optimizers that it wraps.
_TARGETS: dict[str, Any] = {
    "tf_lossscale.families.keras3": _Keras3,
    "tf_lossscale.families.tf_keras": Target,
    "tf_lossscale.families.tf_keras_legacy": _Legacy,
}
