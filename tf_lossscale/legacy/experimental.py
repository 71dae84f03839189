"""The `tf.keras.mixed_precision.experimental` module, which TensorFlow 1.15 and 2.0 to 2.8 contain.

`Policy`, `global_policy`, `set_policy` and `get_layer_policy` act on the Keras library that `tf.keras` refers to.

>>> import tensorflow as tf
>>> set_policy("mixed_float16")
>>> tf.keras.layers.Dense(1).compute_dtype, global_policy().loss_scale.increment_period
('float16', 2000)
>>> set_policy("float32")
"""

from __future__ import annotations

import copy
from typing import Any

from tf_lossscale import layers
from tf_lossscale.legacy import loss_scale as loss_scale_lib
from tf_lossscale.legacy.isinstance_names import OldLossScaleOptimizer, inner_of
from tf_lossscale.legacy.policy import config_of, policies_of
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import registry, saving

__all__ = ["LossScaleOptimizer", "Policy", "get_layer_policy", "global_policy", "set_policy"]  # noqa: F822


class LossScaleOptimizer(OldLossScaleOptimizer):
    """Wraps an optimizer and applies loss scaling. The `loss_scale` argument describes the loss scale.

    >>> import tensorflow as tf
    >>> optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), "dynamic")
    >>> optimizer.loss_scale().numpy().item()
    32768.0

    Programs for TensorFlow 2.3 and older call `optimizer.loss_scale()`. Programs for newer versions use
    `optimizer.loss_scale` as a tensor. Both work:

    >>> f"{optimizer.loss_scale:.0f}", (optimizer.loss_scale / 2).numpy().item()
    ('32768', 16384.0)

    Args:
        optimizer: the optimizer that does the update; `opt` and `inner_optimizer` are other names for it.
        loss_scale: "dynamic"; a number that is at least 1 for a fixed scale; a `tf_lossscale.legacy.LossScale`, or an
            instance of your own subclass of it; or the config of a LossScale.

    Raises:
        TypeError: an argument is missing or unknown, or `optimizer` is not supported.
        ValueError: `loss_scale` has an unsupported value, or `optimizer` is already wrapped.

    Source: `tf.keras.mixed_precision.experimental.LossScaleOptimizer`,
    https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/keras/mixed_precision/experimental/LossScaleOptimizer
    """

    is_wrapper_name = True

    def __init__(self, *args: Any, **kwargs: Any):
        optimizer, args, kwargs = inner_of(args, kwargs)
        super().__init__(optimizer, loss_scale=loss_scale_lib.get_for_wrapper(*args, **kwargs))

    @property
    def loss_scale(self) -> Any:
        """The `LossScale` object. Call it to get the current scale, or use it as a tensor."""
        return self.scaler

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, from which `from_config` creates an equivalent optimizer."""
        return {"optimizer": self._inner_config(), "loss_scale": config_of(self.scaler)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Create an optimizer from a config. The config may come from any version of TensorFlow.

        Args:
            config: the return value of `get_config`. It is not modified.
            custom_objects: a dict that maps names to classes, for optimizers and loss scales that you wrote yourself.

        Returns:
            A new LossScaleOptimizer with a new inner optimizer.
        """
        inner = copy.deepcopy(saving.inner_of(config))
        config = copy.deepcopy({k: v for k, v in config.items() if k not in ("optimizer", "inner_optimizer")})
        of_inner: Any = registry.wrapper_class_of_config(inner) if cls._family_class is None else cls
        optimizer = of_inner._family_class.from_config(inner, custom_objects)
        if "loss_scale" in config:
            loss_scale = _scale_from(config.pop("loss_scale"), custom_objects)
        else:
            loss_scale = _scale_from_newer(**config)
            config = {}
        # An old config does not say which library the inner optimizer is from, so this class may be unable to wrap it.
        fits = cls._family_class is None or issubclass(cls, registry.require_wrapper_class(optimizer))
        new: Any = (cls if fits else LossScaleOptimizer)(optimizer=optimizer, loss_scale=loss_scale, **config)
        new._take_state(inner)
        return new


def register(library: str) -> None:
    """Register the classes of this module with a Keras library, so that it can load files that contain them."""
    # This call registers the `Policy` class.
    policies_of(library)
    saving = layers.layers_in(library).library.saving
    for wrapper_class in registry.wrapper_classes_of(library):
        package = saving.get_registered_name(wrapper_class).partition(">")[0]
        saving.register_keras_serializable(f"{package}.experimental")(
            registry.combined(LossScaleOptimizer, wrapper_class)
        )


def _scale_from(config: Any, custom_objects: dict[str, Any] | None) -> Any:
    own = (custom_objects or {}).get(config["class_name"]) if isinstance(config, dict) else None
    return config if own is None else own.from_config(config["config"])


def global_policy() -> Any:
    """Return the global dtype policy of `tf.keras`, with its loss scale.

    >>> global_policy().name, global_policy().loss_scale
    ('float32', None)

    Source: `tf.keras.mixed_precision.experimental.global_policy`.
    """
    return _policies().global_policy()


def set_policy(policy: Any) -> None:
    """Set the global dtype policy of `tf.keras`.

    >>> set_policy("mixed_bfloat16")
    >>> global_policy().compute_dtype
    'bfloat16'
    >>> set_policy("float32")

    Args:
        policy: a Policy, a name such as "mixed_float16", or None for float32.

    Source: `tf.keras.mixed_precision.experimental.set_policy`.
    """
    _policies().set_policy(policy)


def get_layer_policy(layer: Any) -> Any:
    """Return the dtype policy of a layer, with its loss scale.

    >>> import tensorflow as tf
    >>> get_layer_policy(tf.keras.layers.Dense(1, dtype="float16")).variable_dtype
    'float16'

    Args:
        layer: a layer from `tf.keras`.

    Raises:
        ValueError: `layer` is not a Keras layer.

    Source: `tf.keras.mixed_precision.experimental.get_layer_policy`.
    """
    return _policies().get_layer_policy(layer)


def _policies() -> Any:
    return policies_of(keras_versions.keras_of_tensorflow())


def _scale_from_newer(
    dynamic: bool, initial_scale: Any, dynamic_growth_steps: Any = None, name: Any = None
) -> loss_scale_lib.LossScale:
    """Return the loss scale that a config from TensorFlow 2.4 or newer describes."""
    del name
    if dynamic:
        return loss_scale_lib.DynamicLossScale(initial_scale, dynamic_growth_steps)
    return loss_scale_lib.FixedLossScale(initial_scale)


def __getattr__(name: str) -> Any:
    # The `Policy` class depends on the Keras library that `tf.keras` refers to.
    if name == "Policy":
        return _policies().Policy
    raise AttributeError(f"module 'tf_lossscale.legacy.experimental' has no attribute '{name}'")
