"""Functions for Keras 3 layers and models: compute dtypes and names in checkpoints."""

from __future__ import annotations

import re
from typing import Any

from tf_lossscale.libraries import keras_versions

keras: Any = keras_versions.keras_3()
library: Any = keras

# Keras 3's API for dtype policies. `layers/tf_keras.py` defines the same names for tf_keras.
Policy = keras.DTypePolicy
global_policy = keras.config.dtype_policy
set_global_policy = keras.config.set_dtype_policy


def set_compute_dtype(layer: Any, dtype: str) -> None:
    """Set the compute dtype of a layer, which may already be built. The layer's variables stay float32.

    >>> layer = keras.layers.Dense(2)
    >>> set_compute_dtype(layer, "float16")
    >>> layer.compute_dtype, layer.variable_dtype
    ('float16', 'float32')

    Args:
        layer: a Keras 3 layer.
        dtype: "float32", "float16" or "bfloat16".
    """
    layer.dtype_policy = keras.DTypePolicy("float32" if dtype == "float32" else f"mixed_{dtype}")


def with_layer_names(objects: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Add Keras 3's names of layers and weights to the object tree of a Keras 2 checkpoint, and return the new tree.

    Keras 2 names the layers of a functional or sequential model `layer-0`, `layer-1` and so on. Keras 3 stores the
    layers in an `_operations` list. For a sequential model, this list is stored in the model's `_functional` attribute
    and starts with the input layer. Some Keras 3 layers store a weight such as `kernel` under the name `_kernel`.

    >>> there = with_layer_names({"model": {"layer-0": "dense"}, "dense": {"kernel": "weight"}})
    >>> there["dense"]
    {'kernel': 'weight', '_kernel': 'weight'}
    >>> there["model"]["_operations"], there["model/_operations"]
    ('model/_operations', {'0': 'dense'})

    Args:
        objects: the object tree. It maps the path of each object to a dict, which maps the names of the object's
            children to their paths.

    Returns:
        A new object tree that contains the names from both Keras versions.
    """
    named = {}
    for path, parts in objects.items():
        named[path] = dict(parts)
        layers = {int(name[6:]): part for name, part in parts.items() if re.fullmatch(r"layer-\d+", name)}
        if layers:
            lists = {
                f"{path}/_operations": {str(i): part for i, part in layers.items()},
                f"{path}/_functional/_operations": {str(i + 1): part for i, part in layers.items()},
                f"{path}/_functional": {"_operations": f"{path}/_functional/_operations"},
            }
            named.update(lists)
            named[path].update(_operations=f"{path}/_operations", _functional=f"{path}/_functional")
        for name, part in parts.items():
            if part not in objects and f"_{name}" not in parts:
                named[path][f"_{name}"] = part
    return named
