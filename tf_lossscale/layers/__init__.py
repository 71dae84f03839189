"""Finds the Keras library that a layer or model belongs to, and this package's module for that library."""

from __future__ import annotations

import importlib
from typing import Any

from tf_lossscale.libraries import keras_versions


def layers_of(layer: Any) -> Any:
    """Return the `tf_lossscale.layers` module for the Keras library that a layer belongs to."""
    library = _library_of(layer)
    if library is None:
        raise TypeError(f"`layer` must be a Keras 3 or tf_keras layer, but got: {layer!r}.")
    return layers_in(library)


def is_layer(value: Any) -> bool:
    """Return whether an object is a Keras 3 or tf_keras layer or model."""
    return _library_of(value) is not None


def _library_of(value: Any) -> str | None:
    libraries = (keras_versions.library_in(base.__module__) for base in type(value).__mro__ if base.__name__ == "Layer")
    return next((library for library in libraries if library in keras_versions.MODULES), None)


def layers_in(library: str) -> Any:
    """Return the `tf_lossscale.layers` module for a Keras library."""
    return importlib.import_module(f"tf_lossscale.layers.{keras_versions.MODULES[library]}")
