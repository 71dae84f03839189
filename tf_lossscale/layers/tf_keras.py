"""Functions for tf_keras layers and models: compute dtypes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_lossscale.libraries import keras_versions

tf_keras: Any = keras_versions.keras_2()
library: Any = tf_keras
autocast_variable: Any = keras_versions.keras_2("src.mixed_precision.autocast_variable")

# Layers of these classes do their own casting, so their variables are not cast when they are read. Casting the table of
# an Embedding would make the table's gradient dense.
_CAST_BY_THEMSELVES = ("BatchNormalizationBase", "LayerNormalization", "Embedding")

# The key in a layer's `__dict__` for the original values of its constants, from which `set_compute_dtype` always casts,
# so that float32 restores every bit. Maps each constant's name to its original value and the value that replaced it.
_CONSTANTS = "_tf_lossscale_constants"

# tf_keras's API for dtype policies. `layers/keras3.py` defines the same names for Keras 3.
Policy = tf_keras.mixed_precision.Policy
global_policy = tf_keras.mixed_precision.global_policy
set_global_policy = tf_keras.mixed_precision.set_global_policy


def set_compute_dtype(layer: Any, dtype: str) -> None:
    """Set the compute dtype of a layer, which may already be built. The layer's variables stay float32."""
    policy = tf_keras.mixed_precision.Policy("float32" if dtype == "float32" else f"mixed_{dtype}")
    # tf_keras has no public way to change an existing layer's policy, or to cast its variables when they are read.
    layer._set_dtype_policy(policy)
    if any(base.__name__ in _CAST_BY_THEMSELVES for base in type(layer).__mro__):
        return
    constants = layer.__dict__.setdefault(_CONSTANTS, {})
    for name, value in list(vars(layer).items()):
        if isinstance(value, tf.Variable) and value.dtype.is_floating and not hasattr(value, "true_dtype"):
            layer.__dict__[name] = autocast_variable.create_autocast_variable(value)
        elif isinstance(value, tf.Tensor) and value.dtype.is_floating and not tf.is_symbolic_tensor(value):
            # This tensor is a constant that was cast to the old dtype when the layer was built.
            original, rounded = constants.get(name, (value, value))
            if value is not rounded:
                original = value
            layer.__dict__[name] = tf.cast(original, dtype)
            constants[name] = (original, layer.__dict__[name])
