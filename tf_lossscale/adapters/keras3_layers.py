"""Keras 3's layers: the dtype they compute in."""

from __future__ import annotations

from typing import Any

from tf_lossscale.libraries import keras_versions

keras = library = keras_versions.keras_3()

# The names of the dtype policies.
Policy = keras.DTypePolicy
global_policy = keras.config.dtype_policy
set_global_policy = keras.config.set_dtype_policy


def set_compute_dtype(layer: Any, dtype: str) -> None:
    """Has a layer, built or not, compute in a dtype; its variables stay float32.

    >>> layer = keras.layers.Dense(2)
    >>> set_compute_dtype(layer, "float16")
    >>> layer.compute_dtype, layer.variable_dtype
    ('float16', 'float32')

    Args:
        layer: a Keras 3 layer.
        dtype: "float32", "float16" or "bfloat16".
    """
    layer.dtype_policy = keras.DTypePolicy("float32" if dtype == "float32" else f"mixed_{dtype}")


def compile_as_given(model: Any, **arguments: Any) -> None:
    """Compile a model, and leave the optimizer as it is under a mixed_float16 policy too.

    >>> model = keras.Sequential([keras.layers.Dense(2)])
    >>> compile_as_given(model, optimizer=keras.optimizers.SGD())
    >>> type(model.optimizer).__name__
    'SGD'

    Args:
        model: a Keras 3 model.
        **arguments: those of `compile`.
    """
    model.compile(auto_scale_loss=False, **arguments)
