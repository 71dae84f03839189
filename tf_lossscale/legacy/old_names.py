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
| `strategy.experimental_run_v2`, which is `strategy.run` today | 1.14 and newer, but not 2.21 |

An attribute such as `tf.keras` and an import statement may lead to two different module objects. Each name is put into
both. The names that `compile` uses are in the table in `wrap_in_compile.py`.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from tf_lossscale.legacy import policy, stable
from tf_lossscale.legacy.changes import Change, Changes
from tf_lossscale.legacy.table import OLD, WRAPPERS_WITH_OLD_ARGUMENTS, Old, rows_in
from tf_lossscale.libraries import keras_versions, optional
from tf_lossscale.wrapper import registry


def names_in(module: str, library: str = "") -> dict[str, Any]:
    """Return the old names in a module and its submodules, with their replacements."""
    policies = policy.policies_of(library) if library else None
    names: dict[str, Any] = {}
    for name, old in rows_in(module).items():
        with optional.missing_names_reported(f"{module}.{name}"):
            names[name] = getattr(policies, name, None) or _value(old)
    below = {name[len(module) + 1 :].split(".")[0] for name in _modules() if name.startswith(f"{module}.")}
    return {**names, **{name: names_in(f"{module}.{name}", library) for name in sorted(below)}}


def _modules() -> set[str]:
    return {name.rpartition(".")[0] for name in OLD}


def _value(old: Old) -> Any:
    module, _, name = WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new).rpartition(".")
    return getattr(importlib.import_module(module), name)


def _put(canonical: str) -> Change:
    return lambda changes, module: changes.put(module, names_in(canonical))


def _replace(changes: Changes, module: types.ModuleType) -> None:
    changes.replace(module, names_in(module.__name__))


def _put_keras(changes: Changes, module: types.ModuleType) -> None:
    library = keras_versions.library_in(module.LossScaleOptimizer.__module__)
    # The adapters derive from the Keras library's own classes, so the adapters are imported before the names of these
    # classes are replaced. If the installed `keras` is Keras 2, this package has no adapters for the separate
    # `tf_keras` package.
    if not registry.wrapper_classes_of(library):
        return
    policies = policy.policies_of(library)
    of_policies = {"Policy": policies.StablePolicy, "set_global_policy": policies.set_global_policy}
    names = {name: value for name, value in of_policies.items() if hasattr(module, name)}
    changes.put(
        module, {"LossScaleOptimizer": stable.LossScaleOptimizer, "experimental": _experimental(library), **names}
    )


def _put_private_keras(changes: Changes, module: types.ModuleType) -> None:
    names = _experimental(keras_versions.keras_of_tensorflow())
    names["get_layer_policy"] = {"get_layer_policy": names["get_layer_policy"]}
    changes.put(module, {"experimental": names})


def _experimental(library: str) -> dict[str, Any]:
    names = names_in("keras.mixed_precision.experimental", library)
    # The `experimental` module never had `set_global_policy`. The table contains this name only for the codemod: a
    # program may assign `experimental` or `mixed_precision` to the same alias, depending on the TensorFlow version, and
    # call the function through the alias.
    del names["set_global_policy"]
    return names


def _replace_private_optimizer(changes: Changes, module: types.ModuleType) -> None:
    changes.replace(module, {"LossScaleOptimizer": stable.LossScaleOptimizer})


def _put_run(changes: Changes, module: types.ModuleType) -> None:
    # A property leaves it to each strategy's class which `run` is called, and AutoGraph sees TensorFlow's own method.
    if not hasattr(module.Strategy, "experimental_run_v2"):
        changes.put(module.Strategy, {"experimental_run_v2": property(lambda strategy: strategy.run)})


_API = "tensorflow._api.v2"
_ROOTS = ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2", f"{_API}.compat.v1", f"{_API}.compat.v2")
_KERAS = (
    "keras.mixed_precision",
    "keras._tf_keras.keras.mixed_precision",
    "tensorflow.keras.mixed_precision",
    "tensorflow.compat.v1.keras.mixed_precision",
    "tensorflow.compat.v2.keras.mixed_precision",
    "tf_keras.mixed_precision",
    # Up to TensorFlow 2.15, Keras 2 is the package "keras".
    *(f"{package}.api._{v}.keras.mixed_precision" for package in ("keras", "tf_keras") for v in ("v1", "v2")),
)


def places() -> dict[str, Change]:
    """Return a dict from each module to the function that changes it after its import. Some of them do not exist."""
    private = {name for name in _modules() if name.startswith("tensorflow.python.")}
    public = {name for name in _modules() if name.startswith("tensorflow.")} - private
    return {
        # What TensorFlow's own modules lack, such as `tf.contrib`.
        **dict.fromkeys(_ROOTS, _put("tensorflow")),
        **{f"{root}{name[len('tensorflow') :]}": _put(name) for root in (*_ROOTS, _API) for name in public},
        **dict.fromkeys(_KERAS, _put_keras),
        "tensorflow.python.keras.mixed_precision": _put_private_keras,
        "tensorflow.python.keras.mixed_precision.loss_scale_optimizer": _replace_private_optimizer,
        **dict.fromkeys(private, _replace),
        **dict.fromkeys((f"{_API}.distribute", f"{_API}.compat.v1.distribute"), _put_run),
    }
