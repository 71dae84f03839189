"""The table of `install`: which name goes into which module.

| name | TensorFlow |
|---|---|
| `tf.keras.mixed_precision.LossScaleOptimizer`, and `.Policy` with a `loss_scale` | 2.0 and newer |
| `tf.keras.mixed_precision.set_global_policy`, which refuses a mixed policy beside the graph rewrite | 2.4 and newer |
| `tf.keras.mixed_precision.experimental` | 1.15 to 2.8 |
| `tf.mixed_precision.experimental` | 2.0 to 2.8 |
| `tf.train.experimental`, `tf.compat.v1.train.experimental` | 1.14 and newer |
| `tf.compat.v1.mixed_precision` and its `.experimental` | 2.0 and newer |
| `tf.contrib.mixed_precision` | 1.13 to 1.15 |
| `tensorflow.python...`: private paths that programs import all the same | 1.14 and newer |

Each is put into the modules that attributes lead to, and into those that import statements make of the same files.
What `compile` uses is in the table of `wrap_in_compile.py`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from tf_lossscale.legacy import contrib, experimental, graph_rewrite, loss_scale, policy, stable
from tf_lossscale.legacy.patches import Namespace, Patches, Put
from tf_lossscale.wrapper import families

_LOSS_SCALES: Mapping[str, Any] = {
    "LossScale": loss_scale.LossScale,
    "FixedLossScale": loss_scale.FixedLossScale,
    "DynamicLossScale": loss_scale.DynamicLossScale,
}
_GRAPH_REWRITE: Mapping[str, Any] = {
    "MixedPrecisionLossScaleOptimizer": graph_rewrite.MixedPrecisionLossScaleOptimizer,
    "enable_mixed_precision_graph_rewrite": graph_rewrite.enable_mixed_precision_graph_rewrite,
    "disable_mixed_precision_graph_rewrite": graph_rewrite.disable_mixed_precision_graph_rewrite,
}
_MANAGERS: Mapping[str, Any] = {
    "LossScaleManager": contrib.LossScaleManager,
    "FixedLossScaleManager": contrib.FixedLossScaleManager,
    "ExponentialUpdateLossScaleManager": contrib.ExponentialUpdateLossScaleManager,
}
_CONTRIB_OPTIMIZER: Mapping[str, Any] = {"LossScaleOptimizer": contrib.LossScaleOptimizer}


def _names(names: Mapping[str, Any]) -> Put:
    return lambda patches, module: patches.put(module, names)


def _copy_with(names: Mapping[str, Any]) -> Put:
    return lambda patches, module: patches.replace(module, names)


# TensorFlow. --------------------------------------------------------------------------------------------------------


def _tf_1(patches: Patches, tf: types.ModuleType) -> None:
    python = {
        "loss_scale_manager": Namespace("loss_scale_manager", _MANAGERS),
        "loss_scale_optimizer": Namespace("loss_scale_optimizer", _CONTRIB_OPTIMIZER),
    }
    names = {**_MANAGERS, **_CONTRIB_OPTIMIZER, "python": Namespace("python", python)}
    patches.put(tf, {"contrib": Namespace("contrib", {"mixed_precision": Namespace("mixed_precision", names)})})


def _tf_2(patches: Patches, tf: types.ModuleType) -> None:
    _tf_1(patches, tf)
    scales = Namespace("experimental", _LOSS_SCALES)
    patches.put(tf, {"mixed_precision": Namespace("mixed_precision", {"experimental": scales})})


# Keras. -------------------------------------------------------------------------------------------------------------


def _keras_mixed_precision(patches: Patches, module: types.ModuleType) -> None:
    library = families.library_in(module.LossScaleOptimizer.__module__)
    # The adapters are derived from the classes whose names are about to become ours. A second Keras 2 has none.
    if not families.load_all(library):
        return
    names = {"LossScaleOptimizer": stable.LossScaleOptimizer, "experimental": _experimental(library)}
    policies = policy.policies_of(library)
    of_policies = {"Policy": policies.StablePolicy, "set_global_policy": policies.set_global_policy}
    names.update({name: value for name, value in of_policies.items() if hasattr(module, name)})
    patches.put(module, names)


def _experimental(library: str) -> Namespace:
    policies = policy.policies_of(library)
    names = {name: getattr(policies, name) for name in ("Policy", "global_policy", "set_policy", "get_layer_policy")}
    return Namespace("experimental", {**names, "LossScaleOptimizer": experimental.LossScaleOptimizer})


# Private paths. -----------------------------------------------------------------------------------------------------


def _private_keras(patches: Patches, module: types.ModuleType) -> None:
    public = vars(_experimental(families.keras_of_tensorflow()))
    parts = {
        "loss_scale_optimizer": {"LossScaleOptimizer": public["LossScaleOptimizer"]},
        "loss_scale": {"get": loss_scale.get, **_LOSS_SCALES},
        "policy": {**public, "PolicyV1": public["Policy"]},
        "get_layer_policy": {"get_layer_policy": public["get_layer_policy"]},
    }
    names = {name: Namespace(name, values) for name, values in parts.items()}
    patches.put(module, {"experimental": Namespace("experimental", {**names, "Policy": public["Policy"]})})


_API = "tensorflow._api.v2.compat"
_KERAS_2 = ("keras", "tf_keras")  # the former up to TensorFlow 2.15

#: Module -> what is done with it once it is imported. Modules that do not exist are never imported.
PLACES: dict[str, Put] = {
    "tensorflow": _tf_2,
    "tensorflow.compat.v2": _tf_2,
    f"{_API}.v2": _tf_2,
    "tensorflow.compat.v1": _tf_1,
    f"{_API}.v1": _tf_1,
    **dict.fromkeys(
        [
            "tensorflow.train.experimental",
            "tensorflow._api.v2.train.experimental",
            "tensorflow.compat.v1.train.experimental",
            f"{_API}.v1.train.experimental",
            "tensorflow.compat.v2.train.experimental",
            f"{_API}.v2.train.experimental",
            "tensorflow.compat.v1.mixed_precision",
            f"{_API}.v1.mixed_precision",
        ],
        _names({**_LOSS_SCALES, **_GRAPH_REWRITE}),
    ),
    "tensorflow.compat.v1.mixed_precision.experimental": _names(_LOSS_SCALES),
    f"{_API}.v1.mixed_precision.experimental": _names(_LOSS_SCALES),
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
    "tensorflow.python.keras.mixed_precision.loss_scale_optimizer": _copy_with(
        {"LossScaleOptimizer": stable.LossScaleOptimizer}
    ),
    "tensorflow.python.training.experimental.loss_scale": _copy_with({**_LOSS_SCALES, "get": loss_scale.get}),
    "tensorflow.python.training.experimental.loss_scale_optimizer": _copy_with(
        {"MixedPrecisionLossScaleOptimizer": graph_rewrite.MixedPrecisionLossScaleOptimizer}
    ),
    "tensorflow.python.training.experimental.mixed_precision": _copy_with(
        {
            **_GRAPH_REWRITE,
            "enable_mixed_precision_graph_rewrite_v1": graph_rewrite.enable_mixed_precision_graph_rewrite,
            "disable_mixed_precision_graph_rewrite_v1": graph_rewrite.disable_mixed_precision_graph_rewrite,
        }
    ),
}
