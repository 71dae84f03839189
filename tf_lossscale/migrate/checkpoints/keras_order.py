"""Finds the order of the variables in a `.keras` file, which stores them in folders and not in Keras's order."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

Shape = tuple[int, ...]
# The folder in which each version of Keras stores the layers of a sequential or functional model.
_LAYERS = ("layers", "_layer_checkpoint_dependencies")


@dataclasses.dataclass
class Order:
    """The variables of a layer or model, in the order in which Keras lists them."""

    #: Maps each variable's path in the file to its shape.
    shapes: dict[str, Shape]
    #: Whether the file tells the order. If it is False, variables of one shape may be in another order.
    is_known: bool
    #: The paths of variables that an optimizer does not train, as far as the config says.
    untrained: set[str] = dataclasses.field(default_factory=set)


def order_of(shapes: dict[str, Shape], config: dict[str, Any]) -> Order:
    """Return the order of the variables of a layer or model.

    The config of a sequential or functional model lists its layers. In other layers and models, the folders are named
    after attributes, and their order is unknown.

    >>> dense = {"class_name": "Dense"}
    >>> shapes = {f"layers/{folder}/vars/0": (4,) for folder in ("dense", "dense_1", "dense_10", "dense_2")}
    >>> order_of(shapes, {"config": {"layers": [dense] * 11}}).is_known
    True
    >>> list(order_of(shapes, {"config": {"layers": [dense] * 11}}).shapes)[2:]
    ['layers/dense_2/vars/0', 'layers/dense_10/vars/0']

    Args:
        shapes: maps the path of each variable to its shape. The paths are relative to the folder of the layer.
        config: the layer's config, or an empty dict if it is unknown.

    Returns:
        The order, with the same paths.
    """
    own, folders = _split(shapes)
    parts = [dataclasses.replace(own, untrained=_untrained(list(own.shapes), config))]
    for name, inside in folders.items():
        layers = _layers(inside, config) if name in _LAYERS else None
        parts.append(_below(name, order_of(inside, {}) if layers is None else _joined(layers)))
    joined = _joined(parts)
    times = collections.Counter(shape for part in parts for shape in set(part.shapes.values()))
    joined.is_known = joined.is_known and all(count == 1 for count in times.values())
    if _settings(config).get("trainable") is False and "layers" not in _settings(config):
        joined.untrained = set(joined.shapes)
    return joined


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    settings = config.get("config")
    return settings if isinstance(settings, dict) else {}


def _untrained(own: list[str], config: dict[str, Any]) -> set[str]:
    """Return the moving averages among the own variables of a BatchNormalization layer."""
    if not str(config.get("class_name")).endswith("BatchNormalization"):
        return set()
    trained = sum(_settings(config).get(name, True) for name in ("center", "scale"))
    return set(own[trained:])


def _split(shapes: dict[str, Shape]) -> tuple[Order, dict[str, dict[str, Shape]]]:
    """Return a layer's own variables in the order of their numbers, and its folders."""
    own = {}
    folders: dict[str, dict[str, Shape]] = {}
    for path in sorted(shapes, key=lambda path: (len(path), path)):
        first, _, rest = path.partition("/")
        if first == "vars" or not rest:
            own[path] = shapes[path]
        else:
            folders.setdefault(first, {})[rest] = shapes[path]
    return Order(own, True), folders


def _layers(shapes: dict[str, Shape], config: dict[str, Any]) -> list[Order] | None:
    """Return the layers of a model in the order of its config, or None if the config does not list them."""
    _, folders = _split(shapes)
    layers = _settings(config).get("layers")
    ordered = []
    counts: collections.Counter[str] = collections.Counter()
    for layer in layers if isinstance(layers, list) else []:
        if not isinstance(layer, dict):
            return None
        name = _in_snake_case(str(layer.get("class_name")).rpartition(">")[2])
        folder = f"{name}_{counts[name]}" if counts[name] else name
        counts[name] += 1
        if folder in folders:
            ordered.append(_below(folder, order_of(folders.pop(folder), layer)))
    return None if folders else ordered


def _below(folder: str, order: Order) -> Order:
    shapes = {f"{folder}/{path}": shape for path, shape in order.shapes.items()}
    return Order(shapes, order.is_known, {f"{folder}/{path}" for path in order.untrained})


def _joined(parts: Iterable[Order]) -> Order:
    parts = list(parts)
    shapes = {path: shape for part in parts for path, shape in part.shapes.items()}
    return Order(shapes, all(part.is_known for part in parts), {path for part in parts for path in part.untrained})


def _in_snake_case(name: str) -> str:
    """Return the name that Keras gives to the folder of a layer of class `name`.

    >>> _in_snake_case("LayerNormalization"), _in_snake_case("Conv2D"), _in_snake_case("LSTM")
    ('layer_normalization', 'conv2d', 'lstm')
    """
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
