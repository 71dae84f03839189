"""The variables, the config and the copies of a LossScaleOptimizer."""

from __future__ import annotations

import copy
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
from tf_lossscale.wrapper import registry
from tf_lossscale.wrapper.checks import assign_all
from tf_lossscale.wrapper.contract import Contract
from tf_lossscale.wrapper.shared import SharedLossScale
from tf_lossscale.wrapper.state import WithLossScale, set_value, value_of

if TYPE_CHECKING:
    from tf_lossscale.types import Variable

#: The key of the loss scale's state in the inner optimizer's config. The config has this key only while a model is
#: being saved.
STATE = "loss_scale_state"
# The key, in this state, of the values of a user-defined loss scale's variables.
_VARIABLES = "variables"
# The functions that save a model. Both Keras libraries call `save_model` to save a model, and Keras 3 calls
# `_save_model_to_fileobj` to pickle one.
_SAVES = ("save_model", "_save_model_to_fileobj")


class CallableList(list[Any]):
    """A list that returns itself when called, so that both `variables` and `variables()` work on an optimizer."""

    def __call__(self) -> CallableList:
        return self


class Saving(WithLossScale):
    """The variables, the config and the copies of a wrapper."""

    def _inner_config(self) -> dict[str, Any]:
        """Return the inner optimizer's config. While a model is being saved, add the loss scale's state.

        SavedModels, and the .h5 and .keras files of models with legacy tf_keras optimizers, store only the wrapper's
        config. Other formats store the wrapper's tracked variables, but not `skipped_steps`, `skipped_in_a_row` and
        `total_steps`. TensorFlow's and Keras's LossScaleOptimizer classes ignore the additional key, so they can read
        the config.
        """
        inner = self._family.config()
        scale = self.scaler
        if not scale.may_skip or not _a_model_is_being_saved():
            return inner
        values = [value_of(variable) for variable in scale.variables] if _has_config_of_user(scale) else []
        return {**inner, STATE: {**self._state(), **({_VARIABLES: values} if values else {})}}

    def _take_state(self, inner: Any) -> None:
        """Restore the loss scale's state from an inner optimizer's config, if `_inner_config` stored it there."""
        scale = self.scaler
        if isinstance(inner, dict) and STATE in inner and scale.may_skip:
            # A rule of the user's determines its scale itself.
            state = dict(inner[STATE])
            for variable, value in zip(scale.variables, state.pop(_VARIABLES, [])):
                set_value(variable, value)
            is_dynamic = isinstance(scale, DynamicLossScale)
            now = scale._clipped(state["loss_scale"]) if is_dynamic else value_of(scale._current())
            self._set_state({**state, "loss_scale": now})

    def get_config(self) -> dict[str, Any]:
        """Return a config of plain values, from which `from_config` creates an optimizer with the same settings.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> config = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8).get_config()
        >>> config["initial_scale"], config["dynamic_growth_steps"]
        (8.0, 2000)

        Returns:
            A dict of constructor arguments. An argument that TensorFlow's LossScaleOptimizer does not have is included
            only if its value is not the default.
        """
        self._warn_of_own_rule()
        return self._config_without_warning()

    def _config_without_warning(self) -> dict[str, Any]:
        diagnose = {} if self._diagnosis is None else {"diagnose": True}
        return {"inner_optimizer": self._inner_config(), **self._config_of_scale(), **diagnose}

    def _config_of_scale(self) -> dict[str, Any]:
        """Return the arguments that determine the loss scale."""
        scale: Any = self.scaler
        if _has_config_of_user(scale):
            saving = self._family._saving
            name = saving.get_registered_name(type(scale)) if saving else type(scale).__name__
            return {"loss_scale": {"class_name": name, "config": scale.get_config()}}
        config: dict[str, Any] = {
            "dynamic": self.dynamic,
            "initial_scale": self._scale_to_start_with(),
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        if self.dynamic:
            config = {**DynamicLossScale.get_config(scale), **config}
        elif scale.may_skip:
            config["skip_nonfinite"] = True
        return config

    def _warn_of_own_rule(self) -> None:
        scale = self.scaler
        if _has_rule_outside_of_config(scale) and not _has_config_of_user(scale):
            logging.warning(
                "A config cannot contain the rule of the loss scale %s. An optimizer that is "
                "created from this config, for example in a loaded model, has a %s loss scale without this rule. For a "
                "class of your own, define get_config(), and register the class with Keras. Or load "
                "the model with compile=False, compile it with a new optimizer and loss scale, and restore a "
                "tf.train.Checkpoint.",
                type(getattr(scale, "_manager", scale)).__name__,
                "dynamic" if self.dynamic else "fixed",
            )

    def _scale_to_start_with(self) -> float:
        """Return the initial scale. If a user's rule has none, return the current scale."""
        return self.initial_scale if math.isfinite(self.initial_scale) else float(value_of(self.scaler._current()))

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Create an optimizer from a config that this class or TensorFlow's LossScaleOptimizer wrote.

        Configs that TensorFlow 2.3 and older versions wrote are accepted as well.

        >>> import tensorflow as tf
        >>> from tf_lossscale import LossScaleOptimizer
        >>> config = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8).get_config()
        >>> LossScaleOptimizer.from_config(config).initial_scale
        8.0

        Args:
            config: a dict that `get_config` returned. It is not modified.
            custom_objects: a dict from names to the user-defined classes that the config refers to.

        Returns:
            A new LossScaleOptimizer with a new inner optimizer.

        Raises:
            KeyError: the config has no inner optimizer.
            TypeError: the config is not a dict, or has a key that the constructor does not accept.
            ValueError: the class of the config's loss scale is unknown.
        """
        this: Any = cls
        inner = inner_of(config)
        if cls._family_class is None:
            family = (
                registry.wrapper_class_of_config(inner)
                if isinstance(inner, dict)
                else registry.require_wrapper_class(inner)
            )
            return registry.combined(this, family).from_config(config, custom_objects)
        config = {name: value for name, value in config.items() if name not in ("inner_optimizer", "optimizer")}
        if "loss_scale" in config:
            config.update(cls._of_scale(config.pop("loss_scale"), custom_objects or {}))
        of_inner = inner
        if isinstance(inner, dict):
            inner = cls._family_class.from_config(copy.deepcopy(inner), custom_objects)
        # The wrapper class is looked up again, because the inner optimizer may belong to a different family. From an
        # old config, tf_keras creates a legacy optimizer, even if `cls` wraps tf_keras's newer optimizers.
        family = registry.require_wrapper_class(inner)
        new = (this if issubclass(this, family) else family)(inner_optimizer=inner, **config)
        new._take_state(of_inner)
        return new

    @classmethod
    def _of_scale(cls, loss_scale: Any, custom_objects: dict[str, Any]) -> dict[str, Any]:
        """Convert the `loss_scale` entry of a config to arguments of the constructor."""
        family, rule_class = cls._family_class, None
        if isinstance(loss_scale, dict):
            name = loss_scale["class_name"]
            rule_class = custom_objects.get(name)
            if rule_class is None and family is not None and family._saving:
                rule_class = family._saving.get_registered_object(name)
        if rule_class is None:
            return from_tf23(loss_scale)
        of_config = getattr(rule_class, "from_config", lambda config: rule_class(**config))
        return {"loss_scale": of_config(loss_scale["config"])}

    def _save_scale_with_inner(self, is_of_user: bool = True) -> None:
        """Track the loss scale in the inner optimizer, so that a checkpoint of the inner optimizer includes it.

        If this is impossible, warn, unless the user has the loss scale and can save it.
        """
        inner, scale = self._optimizer, self.scaler
        if not hasattr(inner, "_track_trackable"):
            if _has_state(scale) and not is_of_user:
                logging.warning(
                    "A checkpoint of the inner %s does not hold the loss scale, because its class is not derived from "
                    "tf.Module. Derive the class from tf.Module; or make the loss scale yourself, pass it as "
                    "`loss_scale`, and save it as tf.train.Checkpoint(loss_scale=loss_scale, ...).",
                    type(inner).__name__,
                )
            return
        # The constructors of legacy optimizers do not set up checkpoint tracking.
        inner._maybe_initialize_trackable()
        there = inner._lookup_dependency("loss_scale")
        if there is not None and not isinstance(there, LossScale):
            raise ValueError(
                f"`inner_optimizer` must not track an object named 'loss_scale', but {type(inner).__name__} has one: "
                f"{there!r}. In a checkpoint, the wrapper's loss scale has this name. Track your object under another "
                "name."
            )
        if there is not None or _has_state(scale):
            inner._track_trackable(scale, "loss_scale", overwrite=True)
            inner._handle_deferred_dependencies("loss_scale", scale)
            self._family._parts_changed()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        # Checkpoints do not contain the counts of overflows, to keep TensorFlow's original checkpoint format.
        if save_type == "checkpoint":
            return children
        return children if self._diagnosis is None else {**children, "diagnosis": self._diagnosis}

    @property
    def variables(self) -> CallableList:
        """The inner optimizer's variables, followed by the loss scale's. `variables()` returns the same list.

        Around an optimizer of tf_keras legacy, the list has only the inner optimizer's variables.
        """
        return CallableList([*self.weights, *self.scaler.variables])

    @property
    def weights(self) -> list[Variable]:
        """The inner optimizer's variables."""
        inner = self._optimizer.variables
        return list(inner() if callable(inner) else inner)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the values of `weights`, as NumPy arrays."""
        return [weight.numpy() for weight in self.weights]

    def set_weights(self, weights: list[Any]) -> None:
        """Set the inner optimizer's variables, and optionally also the loss scale's variables.

        Args:
            weights: the NumPy arrays that `get_weights` returned. The values of the loss scale's variables may come
                after these arrays, as in h5 files.

        Raises:
            ValueError: the number of arrays or the shape of an array does not match. In that case, no value is set.
        """
        variables = self.weights
        if self._are_of_scale(weights[len(variables) :]):
            variables = list(self.variables)
        if len(weights) != len(variables):
            raise ValueError(
                f"set_weights(weights) needs {len(self.weights)} arrays, as many as get_weights() returns, but got "
                f"{len(weights)}. Build the optimizer with build(variables) before setting its weights."
            )
        assign_all(variables, weights)

    def _are_of_scale(self, values: list[Any]) -> bool:
        """Return whether arrays match the loss scale's variables in shape and kind of dtype. Slots do not match."""
        arrays, variables = [np.asarray(value) for value in values], self.scaler.variables
        return [(array.shape, array.dtype.kind) for array in arrays] == [
            (tuple(variable.shape), np.dtype(variable.dtype.as_numpy_dtype).kind) for variable in variables
        ]

    def __copy__(self) -> Any:
        new: Any = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        registry.add(new)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new: Any = object.__new__(type(self))
        memo[id(self)] = new
        memo[id(self._optimizer)] = self._family._copied(memo)
        # Copies of optimizers with one SharedLossScale share a contract as well.
        memo.setdefault(id(vars(self)["_contract"]), Contract())
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()}, _traced=False)
        new._save_scale_with_inner()
        registry.add(new)
        return new


def _has_state(scale: Any) -> bool:
    return not isinstance(scale, FixedLossScale) or bool(scale.variables)


def _is_of_user(scale: Any) -> bool:
    return not type(scale).__module__.startswith("tf_lossscale.")


def _has_config_of_user(scale: Any) -> bool:
    get_config: Any = getattr(type(scale), "get_config", None)
    return get_config is not None and not get_config.__module__.startswith("tf_lossscale.")


def _has_rule_outside_of_config(scale: Any) -> bool:
    if _is_of_user(scale) or isinstance(scale, SharedLossScale):
        return True
    if isinstance(scale, DynamicLossScale):
        return not scale._rules.finite_step_resets
    return not isinstance(scale, FixedLossScale)


def _a_model_is_being_saved() -> bool:
    """Return whether Keras is saving or pickling a model. While a function is being traced, return False."""
    frame: Any = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in _SAVES and module.startswith(("keras.", "tf_keras.")):
            return not tf.inside_function()
        frame = frame.f_back
    return False


def inner_of(config: Any) -> Any:
    """Return the inner optimizer's entry in a wrapper's config: a nested config or an optimizer object."""
    if not isinstance(config, dict):
        raise TypeError(f"`config` must be a dict that get_config() returned, but got: {config!r}.")
    inner = config.get("inner_optimizer") or config.get("optimizer")
    if not inner:
        raise KeyError("`config` has no 'inner_optimizer'. Pass the result of a LossScaleOptimizer's get_config().")
    return inner


def by_registered_name(config: Any, saving: Any) -> Any:
    """Replace the class name in an inner optimizer's config with the class's registered name, if it has one.

    When tf_keras loads an .h5 file or a SavedModel, it looks only at the class name. If a registered class has the same
    name as a built-in optimizer, tf_keras would therefore create the built-in optimizer.
    """
    name = config.get("registered_name") if isinstance(config, dict) else None
    return {**config, "class_name": name} if name and saving.get_registered_object(name) is not None else config


def from_tf23(loss_scale: Any) -> dict[str, Any]:
    """Convert the `loss_scale` entry of a config from TensorFlow 2.3 or older to LossScaleOptimizer's arguments."""
    if loss_scale == "dynamic":
        return {}
    if not isinstance(loss_scale, dict):
        return {"dynamic": False, "initial_scale": loss_scale}
    kind, values = loss_scale["class_name"], loss_scale["config"]
    if kind == "FixedLossScale":
        return {"dynamic": False, "initial_scale": values["loss_scale_value"]}
    if kind == "DynamicLossScale":
        arguments = {
            "initial_scale": values["initial_loss_scale"],
            "dynamic_growth_steps": values["increment_period"],
        }
        if values["multiplier"] != 2:
            arguments.update(growth_factor=values["multiplier"], backoff_factor=1 / values["multiplier"])
        return arguments
    raise ValueError(
        f"`config` has a loss scale of the unknown class {kind!r}. The known classes are FixedLossScale and "
        f"DynamicLossScale; pass your own class as custom_objects={{{kind!r}: {kind.split('>')[-1]}}}, or register it "
        "with register_keras_serializable() of the library that loads the model: tf.keras.utils or tf_keras.utils."
    )
