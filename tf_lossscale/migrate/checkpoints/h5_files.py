"""Reads Keras's `.h5` models."""

from __future__ import annotations

import functools
import json
from typing import Any

from tf_lossscale.migrate.checkpoints import configs
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import (
    File,
    FileError,
    Optimizer,
    Slot,
    Tensor,
    explaining_damage,
    scale_values,
)


def read(path: str) -> File:
    """Read an `.h5` model, or the weights of a model in the same format."""
    with explaining_damage(path, "the HDF5 file"):
        file = _h5(path)
        version = _text(file.attrs.get("keras_version", ""))
        weights = file.get("model_weights", file)
        if "layer_names" not in weights.attrs:
            raise FileError(
                f"{path}: the HDF5 file is not a Keras model in the .h5 format. If it is a .weights.h5 file, load it "
                "into a compiled model with `model.load_weights(path)`. To restore its optimizer into another one, "
                "pass `model.optimizer` to migrate.restore in place of the path."
            )
    with explaining_damage(path, "training_config"):
        config = json.loads(_text(file.attrs.get("training_config", "{}"))).get("optimizer_config")
        optimizers = [] if not isinstance(config, dict) else [configs.of_config(config, _family(config, version))]
    with explaining_damage(path, "the weights"):
        # The variables of a model itself, as opposed to its layers', have a group of their own.
        groups = ["top_level_model_weights", *map(_text, weights.attrs["layer_names"])]
        variables = [tensor for each in groups if each in weights for tensor in _tensors(path, weights[each])]
    with explaining_damage(path, "optimizer_weights"):
        if optimizers and "optimizer_weights" in file:
            stored = _tensors(path, file["optimizer_weights"])
            _fill(optimizers[0], _without_scale(optimizers[0], stored), variables)
    writer = f"Keras {version}" if version.startswith("3.") else f"TensorFlow or tf_keras, Keras {version}"
    return File(path, ".h5", writer, variables, optimizers)


def _family(config: dict[str, Any], version: str) -> str:
    if version.startswith("3."):
        return "keras3"
    names = configs.inner_config(config)["config"].keys()
    return "tf_keras" if names & {"is_legacy_optimizer", "jit_compile"} else "tf_keras_legacy"


def _without_scale(optimizer: Optimizer, stored: list[Tensor]) -> list[Tensor]:
    """Read the loss scale and its counts by their names. Return the remaining variables."""
    if not optimizer.wrapper:
        return stored
    named = {each.name.rpartition("/")[2]: each for each in stored}
    of_scale = scale_values(named.get)
    optimizer.scale_state |= {key: tensor.number() for key, tensor in of_scale.items()}
    if "dynamic_scale" in named:
        # Keras 3's own wrapper saves a step count and a learning rate that it does not use.
        stored = stored[2:]
    return [tensor for tensor in stored if tensor not in of_scale.values()]


def _fill(optimizer: Optimizer, stored: list[Tensor], variables: list[Tensor]) -> None:
    """Store an optimizer's variables as its step count and slots. Their order shows which variable is which."""
    if stored and not stored[0].shape:
        optimizer.iterations = stored[0].number()
        stored = stored[1:]
    if stored and not stored[0].shape and optimizer.family == "keras3":
        # Skip the learning rate, which is also in the config.
        stored = stored[1:]
    if optimizer.name == "Nadam":
        # Keras 3 saves its product of momenta last, legacy optimizers save it first, and tf_keras does not save it.
        place = {"keras3": -1, "tf_keras_legacy": 0}.get(optimizer.family)
        if stored and place is not None and not stored[place].shape:
            optimizer.nadam_product = stored.pop(place).number()
    groups = slot_names.order_in_lists(optimizer.name, optimizer.family, optimizer.hyperparameters)
    count, left = divmod(len(stored), sum(map(len, groups)) or 1)
    if left or not groups:
        groups, count = [("variables",)], len(stored)
    for group in groups if stored else ():
        part, stored = stored[: count * len(group)], stored[count * len(group) :]
        for i, slot in enumerate(group):
            optimizer.slots[slot] = [Slot(tensor, None) for tensor in part[i :: len(group)]]


def _h5(path: str) -> Any:
    """Open an HDF5 file. Raise an error if an entry could refer to another file on this machine."""
    # h5py is always installed, because Keras depends on it.
    import h5py

    file = h5py.File(path, "r")

    def elsewhere(name: bytes, link: Any) -> str | None:
        item = file[name] if link.type == h5py.h5l.TYPE_HARD else None
        leads_elsewhere = item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual))
        return name.decode(errors="replace") if leads_elsewhere else None

    # The search ends at the first entry for which the function does not return None.
    found = file.id.links.visit(elsewhere, info=True)
    if found is not None:
        raise FileError(
            f"{path}: /{found} is a link or refers to another file. Keras never writes such an entry, so nothing was "
            "read. Get a new copy of the file from its author."
        )
    return file


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _tensors(path: str, group: Any) -> list[Tensor]:
    """Return the variables that a group lists in its attribute `weight_names`."""

    def value(name: str) -> Any:
        with explaining_damage(path, f"the variable {name}"):
            return group[name][()]

    def tensor(name: str) -> Tensor:
        plain, dataset = name.removesuffix(":0"), group[name]
        return Tensor(plain, plain, tuple(dataset.shape), str(dataset.dtype), functools.partial(value, name))

    return [tensor(_text(name)) for name in group.attrs["weight_names"]]
