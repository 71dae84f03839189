"""Imports Keras 2 and Keras 3. The `keras` package is Keras 2 up to TensorFlow 2.15, and Keras 3 from 2.16 on."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from tf_lossscale.libraries import optional


def package_of_keras_2() -> str:
    """Return the package name of Keras 2: "keras" with TensorFlow 2.15, and "tf_keras" with newer releases."""
    # No import is needed: if the `keras` package is Keras 2, importing TensorFlow has already imported it.
    loaded = sys.modules.get("keras")
    is_keras_2 = getattr(loaded, "__version__", "").startswith("2.")
    return "keras" if is_keras_2 and not _is_replaced() else "tf_keras"


# If tf.keras is Keras 2, optimizers from the separate `tf_keras` package are not supported. `library_in` then returns
# this name for that package.
SECOND_KERAS_2 = "tf_keras beside a Keras 2"

#: Maps each Keras library to the name of this package's modules for it, such as `families/keras3.py`.
MODULES = {"keras": "keras3", "tf_keras": "tf_keras"}


def library_in(module: str) -> str:
    """Return the library that a module belongs to: "keras" is Keras 3, and "tf_keras" is Keras 2."""
    package = module.partition(".")[0]
    if package in ("keras", "tf_keras") and package_of_keras_2() == "keras":
        # If the `keras` package is Keras 2, the adapters derive from that package's classes. They then cannot wrap
        # optimizers from the separate `tf_keras` package.
        return "tf_keras" if package == "keras" else SECOND_KERAS_2
    return package


def keras_of_tensorflow() -> str:
    """Return which library `tf.keras` refers to: "keras" (Keras 3) or "tf_keras" (Keras 2)."""
    import tensorflow as tf

    return library_in(tf.keras.optimizers.Optimizer.__module__)


def keras_2(module: str = "") -> Any:
    """Import and return Keras 2, or one of its modules."""
    return optional.load(_dotted(package_of_keras_2(), module), "tf-keras")


def keras_3(module: str = "") -> Any:
    """Import and return Keras 3, or one of its modules."""
    if package_of_keras_2() == "keras":
        raise ImportError("This feature needs Keras 3, but Keras 2 is installed. Install TensorFlow 2.16 or newer.")
    if not _is_replaced():
        return optional.load(_dotted("keras", module), "")
    return functools.reduce(_submodule, filter(None, module.split(".")), _replaced())


def own_class(base: type, name: str) -> Any:
    """Return a class of a library, even if the program has put a different class under the class's public name."""
    package = base.__module__.partition(".")[0]
    each: Any
    for each in base.__subclasses__():
        if each.__name__ == name and each.__module__.partition(".")[0] == package:
            return each
    raise ImportError(f"{base.__module__} has no class {name}, which this version of tf_lossscale needs.")


def _is_replaced() -> bool:
    """Return whether the program has stored a different package as `sys.modules["keras"]`, for example tf_keras."""
    return getattr(sys.modules.get("keras"), "__name__", "keras") != "keras"


@functools.cache
def _replaced() -> Any:
    """Import and return Keras 3 even though `sys.modules["keras"]` is a different package.

    The import reuses the Keras 3 modules that TensorFlow has already loaded.
    """
    replacement = sys.modules.pop("keras")
    try:
        return importlib.import_module("keras")
    except ImportError as error:
        raise ImportError(
            f"This feature needs Keras 3, but `sys.modules['keras']` is {replacement.__name__}, and Keras 3 cannot be "
            "imported alongside it. Import tf_lossscale before `sys.modules['keras']` is replaced, or use "
            "tf_keras optimizers."
        ) from error
    finally:
        sys.modules["keras"] = replacement


def _submodule(package: Any, name: str) -> Any:
    # If a package is imported a second time, submodules that were loaded before do not become its attributes.
    return getattr(package, name, None) or sys.modules[f"{package.__name__}.{name}"]


def _dotted(package: str, module: str) -> str:
    return f"{package}.{module}" if module else package
