"""Functions for Keras 3 layers and models: compute dtypes, names in checkpoints, `compile`, metrics and losses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from tf_lossscale.core import replicas
from tf_lossscale.libraries import keras_versions

keras = library = keras_versions.keras_3()
# The private `keras.src.losses.loss` module defines `scale_loss_for_distribution`, which Keras's losses call.
_losses = keras_versions.keras_3("src.losses.loss")

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


def compile_as_given(model: Any, **arguments: Any) -> None:
    """Compile a model without wrapping the optimizer, even under the `mixed_float16` policy.

    >>> model = keras.Sequential([keras.layers.Dense(2)])
    >>> compile_as_given(model, optimizer=keras.optimizers.SGD())
    >>> type(model.optimizer).__name__
    'SGD'

    Args:
        model: a Keras 3 model.
        **arguments: the arguments for the model's `compile` method.
    """
    # Without this assignment, a call of `compile` without metrics keeps the metrics of the call before it.
    model._compile_metrics = None
    model.compile(auto_scale_loss=False, **arguments)


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


def rename_metric(metric: Any, name: str) -> None:
    """Set the name of a metric.

    >>> metric = keras.metrics.Mean()
    >>> rename_metric(metric, "Error")
    >>> metric.name
    'Error'

    Args:
        metric: a Keras 3 metric object.
        name: the new name, which appears in logs and in the result of `evaluate`.
    """
    metric.name = name


def note_steps(model: Any, steps: int) -> None:
    """Do nothing, because Keras 3's progress bar counts the steps itself.

    >>> note_steps(keras.Sequential(), 3)

    Args:
        model: a model that is trained without Keras's `fit`.
        steps: the number of steps in the epoch that has just ended.
    """
    del model, steps


@contextlib.contextmanager
def noting_divided_losses() -> Iterator[list[bool]]:
    """Record whether Keras divides a loss by the number of replicas, as Keras 3 does in a replica context.

    >>> with noting_divided_losses() as divided:
    ...     _ = keras.losses.MeanSquaredError()([[1.0]], [[0.0]])
    >>> bool(divided)
    True

    Yields:
        A list that stays empty until Keras divides a loss.
    """
    divided: list[bool] = []
    # Older Keras 3 versions lack this function and do not divide losses by the number of replicas.
    divide = getattr(_losses, "scale_loss_for_distribution", lambda loss: loss)

    def noting(loss: Any) -> Any:
        divided.append(True)
        return divide(loss)

    with replicas.overriding(_losses, scale_loss_for_distribution=noting):
        yield divided
