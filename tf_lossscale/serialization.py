"""Registers this package's classes with the Keras libraries, so that saved files load after `import tf_lossscale`."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from tf_lossscale.families import registry as families
from tf_lossscale.libraries import import_hooks

# For each Keras library, maps each (package, class name) pair in saved files to a module. The module registers the
# class when it is imported.
_REGISTERED = {
    "keras": {
        ("tf_lossscale", "LossScaleOptimizer"): "tf_lossscale.families.keras3",
        ("tf_lossscale", "Adafactor"): "tf_lossscale.optimizers.keras3",
        ("tf_lossscale.experimental", "LossScaleOptimizer"): "tf_lossscale.legacy.experimental",
        ("tf_lossscale.legacy", "Policy"): "tf_lossscale.legacy.experimental",
    },
    "tf_keras": {
        ("tf_lossscale", "LossScaleOptimizer"): "tf_lossscale.families.tf_keras",
        ("tf_lossscale", "Adafactor"): "tf_lossscale.optimizers.tf_keras",
        ("tf_lossscale.legacy", "LossScaleOptimizer"): "tf_lossscale.families.tf_keras_legacy",
        ("tf_lossscale.experimental", "LossScaleOptimizer"): "tf_lossscale.legacy.experimental",
        ("tf_lossscale.legacy.experimental", "LossScaleOptimizer"): "tf_lossscale.legacy.experimental",
        ("tf_lossscale.legacy", "Policy"): "tf_lossscale.legacy.experimental",
    },
}


def register_when_imported() -> None:
    """Register this package's classes with Keras 3 and tf_keras as soon as either library is imported.

    >>> register_when_imported()
    """
    for name in ("keras", "tf_keras"):
        import_hooks.when_imported(name, _register, after=["tensorflow"])


def _register(library: types.ModuleType) -> None:
    # Use the library's `__name__`, because a program may have stored tf_keras as `sys.modules["keras"]`.
    name = families.library_in(library.__name__)
    for (package, class_name), module in _REGISTERED.get(name, {}).items():
        if module not in sys.modules:
            library.saving.register_keras_serializable(package)(_deferred(library, package, class_name, module))


def _deferred(library: Any, package: str, class_name: str, module: str) -> type:
    """Return a placeholder for one of this package's classes. Its `from_config` imports the real class."""

    def from_config(config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        importlib.import_module(module)
        # Keras copied its registry when it began to load the file, before the class was imported.
        # `get_registered_object` searches this copy, and so would not find the class.
        cls = library.saving.get_custom_objects()[f"{package}>{class_name}"]
        return cls.from_config(config, custom_objects)

    # Both Keras libraries refuse to register a class without a `get_config` method.
    def get_config(self: Any) -> dict[str, Any]:
        return {}

    return type(class_name, (), {"from_config": staticmethod(from_config), "get_config": get_config})
