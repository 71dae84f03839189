"""Registers this package's classes with the Keras libraries, so that saved files load after `import tf_lossscale`."""

from __future__ import annotations

import importlib
import types

from tf_lossscale.libraries import import_hooks, keras_versions, optional


def register_when_imported() -> None:
    """Register this package's classes with Keras 3 and tf_keras as soon as either library is imported."""
    for name in ("keras", "tf_keras"):
        import_hooks.when_imported(name, _register, after=["tensorflow"])


def _register(keras: types.ModuleType) -> None:
    # Use the library's `__name__`, because a program may have stored tf_keras as `sys.modules["keras"]`.
    library = keras_versions.library_in(keras.__name__)
    # If the installed `keras` is Keras 2, this package has no adapters for the separate `tf_keras` package.
    if library not in keras_versions.MODULES:
        return
    # Each module registers its classes when it is imported. An error would come out of the user's import statement.
    with optional.missing_names_reported(keras.__name__):
        importlib.import_module(f"tf_lossscale.optimizers.{keras_versions.MODULES[library]}")
    with optional.missing_names_reported(keras.__name__):
        importlib.import_module("tf_lossscale.legacy.experimental").register(library)
