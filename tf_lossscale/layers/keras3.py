"""Functions for Keras 3 layers and models: compute dtypes."""

from __future__ import annotations

from typing import Any

from tf_lossscale.libraries import keras_versions

keras: Any = keras_versions.keras_3()
library: Any = keras

# Keras 3's API for dtype policies. `layers/tf_keras.py` defines the same names for tf_keras.
Policy = keras.DTypePolicy
global_policy = keras.config.dtype_policy
set_global_policy = keras.config.set_dtype_policy


def set_compute_dtype(layer: Any, dtype: str) -> None:
    """Set the compute dtype of a layer, which may already be built. The layer's variables stay float32."""
    layer.dtype_policy = keras.DTypePolicy("float32" if dtype == "float32" else f"mixed_{dtype}")
