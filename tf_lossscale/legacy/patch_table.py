"""The old names that `install` restores, and the modules that it puts them into.

| name or module | TensorFlow versions that have it |
|---|---|
| `tf.keras.mixed_precision.LossScaleOptimizer`, and `.Policy` with a `loss_scale` | 2.0 and newer |
| `tf.keras.mixed_precision.set_global_policy`, which rejects mixed policies if graph rewriting is on | 2.4 and newer |
| `tf.keras.mixed_precision.experimental` | 1.15 to 2.8 |
| `tf.mixed_precision.experimental` | 2.0 to 2.8 |
| `tf.train.experimental`, `tf.compat.v1.train.experimental` | 1.14 and newer |
| `tf.compat.v1.mixed_precision` and its `.experimental` | 2.0 and newer |
| `tf.contrib.mixed_precision` | 1.13 to 1.15 |
| `tensorflow.python...`: private modules that programs import nevertheless | 1.14 and newer |

An attribute such as `tf.keras` and an import statement may lead to two different module objects. Each name is put into
both. The names that `compile` uses are in the table in `wrap_in_compile.py`.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from tf_lossscale.families import registry as families
from tf_lossscale.legacy import loss_scale, policy, stable
from tf_lossscale.legacy.patches import Namespace, Patches, Put
from tf_lossscale.legacy.table import OLD, WRAPPERS_WITH_OLD_ARGUMENTS, Old, rows_in


def _names_in(module: str) -> dict[str, Any]:
    """Return a dict from each old name in a module to its replacement."""
    return {name: _value(old) for name, old in rows_in(module).items()}


def _value(old: Old) -> Any:
    module, _, name = WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new).rpartition(".")
    new = getattr(importlib.import_module(module), name)
    return _with_old_arguments(new, old.renamed) if old.renamed else new


def _with_old_arguments(new: Callable[..., Any], renamed: Mapping[str, str]) -> Callable[..., Any]:
    @functools.wraps(new, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **{renamed.get(keyword, keyword): value for keyword, value in kwargs.items()})

    return call


def _put_names(canonical: str) -> Put:
    return lambda patches, module: patches.put(module, _names_in(canonical))


# TensorFlow. --------------------------------------------------------------------------------------------------------


def _put_missing(patches: Patches, tf: types.ModuleType) -> None:
    """Restore the modules that this version of TensorFlow lacks, such as `tf.contrib` and `tf.mixed_precision`."""
    missing = {name for name in (module.split(".")[1] for module in _PUBLIC) if not hasattr(tf, name)}
    patches.put(tf, {name: _namespace(f"tensorflow.{name}") for name in sorted(missing)})


def _namespace(module: str) -> Namespace:
    """Return a new module object with the old names that belong in `module` and, recursively, in its submodules."""
    below = {name[len(module) + 1 :].split(".")[0] for name in _MODULES if name.startswith(f"{module}.")}
    inner = {name: _namespace(f"{module}.{name}") for name in sorted(below)}
    return Namespace(module.rpartition(".")[2], {**_names_in(module), **inner})


_MODULES = sorted({name.rpartition(".")[0] for name in OLD})
_PRIVATE = [name for name in _MODULES if name.startswith("tensorflow.python.")]
_PUBLIC = [name for name in _MODULES if name.startswith("tensorflow.") and name not in _PRIVATE]


# Keras. -------------------------------------------------------------------------------------------------------------


def _keras_mixed_precision(patches: Patches, module: types.ModuleType) -> None:
    library = families.library_in(module.LossScaleOptimizer.__module__)
    # The adapters derive from the Keras library's own classes, so the adapters are imported before the names of these
    # classes are replaced. If the installed `keras` is Keras 2, this package has no adapters for the separate
    # `tf_keras` package.
    if not families.wrapper_classes_of(library):
        return
    names = {"LossScaleOptimizer": stable.LossScaleOptimizer, "experimental": _experimental(library)}
    policies = policy.policies_of(library)
    of_policies = {"Policy": policies.StablePolicy, "set_global_policy": policies.set_global_policy}
    names.update({name: value for name, value in of_policies.items() if hasattr(module, name)})
    patches.put(module, names)


def _experimental(library: str) -> Namespace:
    policies = policy.policies_of(library)
    rows = rows_in("keras.mixed_precision.experimental")
    # The `experimental` module never had `set_global_policy`. The table contains this name only for the codemod: a
    # program may assign `experimental` or `mixed_precision` to the same alias, depending on the TensorFlow version, and
    # call the function through the alias.
    names = {
        name: getattr(policies, name, None) or _value(old) for name, old in rows.items() if name != "set_global_policy"
    }
    return Namespace("experimental", names)


# Private paths. -----------------------------------------------------------------------------------------------------


def _private_keras(patches: Patches, module: types.ModuleType) -> None:
    public = vars(_experimental(families.keras_of_tensorflow()))
    parts = {
        "loss_scale_optimizer": {"LossScaleOptimizer": public["LossScaleOptimizer"]},
        "loss_scale": {"get": loss_scale.get, **_names_in("tensorflow.mixed_precision.experimental")},
        "policy": {**public, "PolicyV1": public["Policy"]},
        "get_layer_policy": {"get_layer_policy": public["get_layer_policy"]},
    }
    names = {name: Namespace(name, values) for name, values in parts.items()}
    patches.put(module, {"experimental": Namespace("experimental", {**names, "Policy": public["Policy"]})})


_API = "tensorflow._api.v2"
_ROOTS = ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2", f"{_API}.compat.v1", f"{_API}.compat.v2")
# Up to TensorFlow 2.15, Keras 2 is the package "keras".
_KERAS_2 = ("keras", "tf_keras")

#: Maps each module to the function that patches it after its import. Modules that do not exist are ignored.
PLACES: dict[str, Put] = {
    **dict.fromkeys(_ROOTS, _put_missing),
    **{f"{root}{name[len('tensorflow') :]}": _put_names(name) for root in (*_ROOTS, _API) for name in _PUBLIC},
    **dict.fromkeys(
        [
            "keras.mixed_precision",
            "keras._tf_keras.keras.mixed_precision",
            "tensorflow.keras.mixed_precision",
            "tensorflow.compat.v1.keras.mixed_precision",
            "tensorflow.compat.v2.keras.mixed_precision",
            "tf_keras.mixed_precision",
            *(f"{package}.api._{v}.keras.mixed_precision" for package in _KERAS_2 for v in ("v1", "v2")),
        ],
        _keras_mixed_precision,
    ),
    "tensorflow.python.keras.mixed_precision": _private_keras,
    "tensorflow.python.keras.mixed_precision.loss_scale_optimizer": lambda patches, module: patches.replace(
        module, {"LossScaleOptimizer": stable.LossScaleOptimizer}
    ),
    **dict.fromkeys(_PRIVATE, lambda patches, module: patches.replace(module, _names_in(module.__name__))),
}
