"""Reads Keras's file formats: `.keras` archives, `.h5` models and `.weights.h5` files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import sys
import zipfile
from typing import Any

from tf_lossscale.core.rules import KEYWORDS, Rules
from tf_lossscale.migrate.checkpoints import keras_order
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import File, Optimizer, Slot, Tensor, UnreadableError, explaining_damage
from tf_lossscale.wrapper.saving import STATE as _STATE
from tf_lossscale.wrapper.saving import from_tf23


def read_archive(path: str) -> File:
    """Read a `.keras` file.

    Args:
        path: the path of the file.

    Returns:
        The contents of the file.

    Raises:
        ValueError: the file is damaged, or Keras did not write it.
    """
    parts = {member: _member(path, member) for member in ("metadata.json", "config.json", "model.weights.h5")}
    with explaining_damage(path, "metadata.json"):
        version = _json(parts["metadata.json"])["keras_version"]
    with explaining_damage(path, "config.json"):
        model = _json(parts["config.json"])
        config = (model.get("compile_config") or {}).get("optimizer")
        optimizers = [] if not isinstance(config, dict) else [_of_config(config, version)]
    with explaining_damage(path, "model.weights.h5"):
        variables, stored, order = _weights(path, _h5(path, io.BytesIO(parts["model.weights.h5"])), model)
        trainable = [variable for variable in variables if variable.path not in order.untrained]
        for optimizer in optimizers:
            stored = _without_scale_by_place(optimizer, stored, config)
            _fill_from_list(optimizer, stored, variables, trainable if order.is_known else [])
    return File(path, ".keras", _writer(version), variables, optimizers, order_is_known=order.is_known)


def read_h5(path: str) -> File:
    """Read an `.h5` model or a `.weights.h5` file.

    Args:
        path: the path of the file.

    Returns:
        The contents of the file.

    Raises:
        ValueError: the file is damaged, or Keras did not write it.
    """
    with explaining_damage(path, "the HDF5 file"):
        file = _h5(path, path)
        version = _text(file.attrs.get("keras_version", ""))
        if "model_weights" not in file and "layers" not in file and "layer_names" not in file.attrs:
            raise UnreadableError(f"{path}: the HDF5 file is not a Keras model.")
    if "model_weights" not in file:
        with explaining_damage(path, "the weights"):
            variables, _, order = _weights(path, file, {})
        writer = _writer(version) if version else "Keras"
        return File(path, ".weights.h5", writer, variables, [], order_is_known=order.is_known)
    with explaining_damage(path, "training_config"):
        config = _json(_text(file.attrs.get("training_config", "{}"))).get("optimizer_config")
        optimizers = [] if not isinstance(config, dict) else [_of_config(config, version)]
    with explaining_damage(path, "model_weights"):
        variables = []
        for layer in file["model_weights"].attrs["layer_names"]:
            group = file["model_weights"][_text(layer)]
            variables += [_tensor(path, group, _text(name)) for name in group.attrs["weight_names"]]
    with explaining_damage(path, "optimizer_weights"):
        if optimizers and "optimizer_weights" in file:
            group = file["optimizer_weights"]
            stored = [_tensor(path, group, _text(name)) for name in group.attrs["weight_names"]]
            _fill_from_list(optimizers[0], _without_scale_by_name(optimizers[0], stored), variables, variables)
    return File(path, ".h5", _writer(version), variables, optimizers)


def _member(path: str, member: str) -> bytes:
    with explaining_damage(path, "the archive"), zipfile.ZipFile(path) as archive:
        if member in archive.namelist():
            with explaining_damage(path, member):
                return archive.read(member)
    raise UnreadableError(f"{path}: the archive has no {member}, so it is not a Keras model.")


def _json(text: str | bytes) -> Any:
    """Parse JSON. Raise OverflowError if a number is too large for a float."""
    return json.loads(text, parse_int=functools.partial(_parsed, int), parse_float=functools.partial(_parsed, float))


def _parsed(kind: type[Any], digits: str) -> Any:
    number = kind(digits)
    if abs(number) > sys.float_info.max:
        shown = digits if len(digits) < 20 else f"{digits[:20]}..."
        raise OverflowError(f"this number is too large for a float: {shown}")
    return number


def _h5(path: str, source: Any) -> Any:
    """Open an HDF5 file. Raise an error if an entry could refer to another file on this machine."""
    # h5py is always installed, because Keras depends on it.
    import h5py

    file = h5py.File(source, "r")
    waiting, seen = [file], set()
    while waiting:
        group = waiting.pop()
        if h5py.h5o.get_info(group.id).addr in seen:
            continue
        seen.add(h5py.h5o.get_info(group.id).addr)
        for name in group:
            link = group.get(name, getlink=True)
            item = group[name] if isinstance(link, h5py.HardLink) else None
            if isinstance(item, h5py.Group):
                waiting.append(item)
            elif item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
                raise UnreadableError(
                    f"{path}: {group.name.rstrip('/')}/{name} is a link or refers to another file. Keras never "
                    "writes such an entry, so nothing was read. Get a new copy of the file from its author."
                )
    return file


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _writer(version: str) -> str:
    if version.startswith("3."):
        return f"Keras {version}"
    return f"TensorFlow or tf_keras, Keras {version}"


def _tensor(path: str, group: Any, name: str) -> Tensor:
    dataset = group[name]

    def value() -> Any:
        with explaining_damage(path, f"the variable {name}"):
            return dataset[()]

    plain = name.removesuffix(":0")
    return Tensor(plain, plain, tuple(dataset.shape), str(dataset.dtype), value)


def _weights(path: str, file: Any, config: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], keras_order.Order]:
    """Return the variables of the layers, the variables of the optimizer, and the order of the layers' variables."""
    shapes = {}

    def visit(name: str, item: Any) -> None:
        if hasattr(item, "shape") and not name.startswith(("optimizer/", "metrics/")):
            shapes[name] = tuple(item.shape)

    file.visititems(visit)
    order = keras_order.order_of(shapes, config)
    variables = []
    for name in order.shapes:
        number = name.rpartition("/")[2]
        layer = _text(file[name].parent.attrs.get("name", "")) or name.removesuffix(f"/vars/{number}")
        variables.append(dataclasses.replace(_tensor(path, file, name), name=f"{layer}/{number}"))
    group = file.get("optimizer/vars", {})
    return variables, [_tensor(path, group, name) for name in sorted(group, key=int)], order


def _of_config(config: dict[str, Any], version: str) -> Optimizer:
    inner = _inner_config(config)
    wrapper = None if inner is config else config["class_name"]
    settings = inner["config"]
    if version.startswith("3."):
        family = "keras3"
    else:
        family = "tf_keras" if settings.keys() & {"is_legacy_optimizer", "jit_compile"} else "tf_keras_legacy"
    numbers = _numbers(settings)
    rate = numbers.pop("learning_rate", None)
    name = inner["class_name"].rpartition(">")[2]
    made = Optimizer("optimizer", family, name, wrapper, learning_rate=rate, hyperparameters=numbers, has_config=True)
    if wrapper:
        made.wrapper_arguments = _arguments_of_wrapper(config["config"])
        made.scale = made.wrapper_arguments.get("initial_scale") if made.scale_is_fixed else None
    if _STATE in inner:
        state = _numbers(inner[_STATE])
        made.scale, made.counter = float(state["loss_scale"]), int(state["dynamic_counter"])
    return made


def _arguments_of_wrapper(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the config of a wrapper of any version into arguments of the current wrapper."""
    arguments = dict(settings)
    if "loss_scale" in settings:
        # `from_tf23` raises a ValueError for a user-defined loss scale class.
        with contextlib.suppress(ValueError):
            arguments = from_tf23(settings["loss_scale"])
    names = ("dynamic", "initial_scale", "dynamic_growth_steps", *KEYWORDS)
    return {name: arguments[name] for name in names if isinstance(arguments.get(name), (int, float))}


def _inner_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the inner optimizer. If the optimizer is not wrapped, return `config` unchanged."""
    values = config.get("config", {})
    parts = (values.get(name) for name in ("optimizer", "inner_optimizer"))
    return next((part for part in parts if isinstance(part, dict)), config)


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if isinstance(value, (int, float))}


def _without_scale_by_name(optimizer: Optimizer, stored: list[Tensor]) -> list[Tensor]:
    """Read the loss scale and its counter by their names in an `.h5` file. Return the remaining variables."""
    if not optimizer.wrapper:
        return stored
    named = {tensor.name.rpartition("/")[2]: tensor for tensor in stored}
    if "dynamic_scale" in named:
        return _without_keras_3s_wrapper(optimizer, stored)
    if "current_loss_scale" in named:
        optimizer.scale = float(named["current_loss_scale"].value())
        optimizer.counter = int(named["good_steps"].value())
    ours = [named.get(name) for name in ("current_loss_scale", "good_steps", "bad_steps")]
    return [tensor for tensor in stored if tensor not in ours]


def _without_scale_by_place(optimizer: Optimizer, stored: list[Tensor], config: Any) -> list[Tensor]:
    """Read the loss scale and its counter by their positions in a `.keras` file. Return the remaining variables."""
    if optimizer.wrapper and optimizer.family == "keras3" and len(stored) >= 4:
        return _without_keras_3s_wrapper(optimizer, stored)
    if optimizer.family == "tf_keras" and _STATE in _inner_config(config):
        # This file was written with tf_lossscale. Its last variables are the loss scale, the counter and, with
        # hysteresis, the number of overflows. `_of_config` has already read the loss scale and the counter from the
        # config.
        rules = Rules(**{name: config["config"][name] for name in KEYWORDS if name in config["config"]})
        return stored[: -3 if rules.counts_overflows else -2]
    return stored


def _without_keras_3s_wrapper(optimizer: Optimizer, stored: list[Tensor]) -> list[Tensor]:
    # Keras 3 wrappers (Keras's own and this package's) first save an unused step count and learning rate, then the
    # counter and the scale.
    optimizer.counter, optimizer.scale = int(stored[2].value()), float(stored[3].value())
    return stored[4:]


def _fill_from_list(
    optimizer: Optimizer, stored: list[Tensor], variables: list[Tensor], trainable: list[Tensor]
) -> None:
    """Store saved variables as the optimizer's step count and slots. Their order shows which variable is which.

    Args:
        optimizer: the optimizer to change.
        stored: the optimizer's variables in the file.
        variables: the variables of the layers.
        trainable: the variables that the optimizer may have trained, in Keras's order, or an empty list if the order is
            unknown.
    """
    if stored and not stored[0].shape:
        optimizer.iterations = int(stored[0].value())
        stored = stored[1:]
    if stored and not stored[0].shape and optimizer.family == "keras3":
        # Skip the learning rate, which is also in the config.
        stored = stored[1:]
    stored = [tensor for tensor in stored if tensor.shape or any(not v.shape for v in variables)]
    groups = slot_names.order_in_lists(optimizer.name, optimizer.family, optimizer.hyperparameters)
    count = len(stored) // (sum(map(len, groups)) or 1)
    if not stored:
        return
    if not groups or len(stored) != count * sum(map(len, groups)):
        optimizer.slots = {"variables": [Slot(tensor, None, "") for tensor in stored]}
        return
    for group in groups:
        part, stored = stored[: count * len(group)], stored[count * len(group) :]
        for i, slot in enumerate(group):
            tensors = part[i :: len(group)]
            owners = [_named_in(tensor, variables) for tensor in tensors]
            if not any(owners):
                owners = _only_owners(tensors, trainable)
            optimizer.slots[slot] = [
                Slot(tensor, owner, owner.name if owner else "") for tensor, owner in zip(tensors, owners)
            ]


def _named_in(slot: Tensor, variables: list[Tensor]) -> Tensor | None:
    """Return the variable whose name is part of the slot's name, such as `Adam/m/dense/kernel` in an `.h5` file."""

    def parts(name: str) -> str:
        # Keras 3 joins the parts of a variable's name with underscores.
        return f"_{name.replace('/', '_')}_"

    named = [each for each in variables if each.shape == slot.shape and parts(each.name) in parts(slot.name)]
    longest = max((len(each.name) for each in named), default=0)
    named = [each for each in named if len(each.name) == longest]
    return named[0] if len(named) == 1 else None


def _only_owners(slots: list[Tensor], trainable: list[Tensor]) -> list[Tensor | None]:
    """Return the variable of each slot, or None if the shapes leave several variables to choose from.

    The slots are in the order of the variables, but some of the variables may have no slot. A slot's variable is
    certain if it is both the first and the last one that the shapes allow.
    """
    first = _first_owners(slots, trainable)
    last = _first_owners(slots[::-1], trainable[::-1])[::-1]
    return [a if a == b else None for a, b in zip(first, last)]


def _first_owners(slots: list[Tensor], variables: list[Tensor]) -> list[Tensor | None]:
    following = iter(variables)
    return [next((each for each in following if each.shape == slot.shape), None) for slot in slots]
