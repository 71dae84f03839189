"""Reads files written by `tf.compat.v1.train.Saver`, which contain only the names and values of variables."""

from __future__ import annotations

import re
from typing import Any

from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, SCALE_NAMES, File, Optimizer, Slot, Tensor, scale_values

MIXED_PRECISION = "MixedPrecisionLossScaleOptimizer, or tf_lossscale"
_POWERS = ("beta1_power", "beta2_power")
_STATE = {*_POWERS, *(name for names in SCALE_NAMES.values() for name in names)}


def read(path: str, names: list[str], tensor: Any) -> File:
    """Read a checkpoint whose keys are the names of variables."""
    tensors = {name: tensor(name, name, name) for name in sorted(names)}
    state = {name: each for name, each in tensors.items() if last_part(name) in _STATE and not each.shape}
    # Maps each optimizer's name and the number of a slot, as in `w0/Adam_1`, to the slots with this name and number.
    found: dict[str, dict[int, list[Slot]]] = {}
    for name, each in tensors.items():
        of = None if name in state else _slot_of(name, tensors)
        if of is not None:
            variable, optimizer, number = of
            found.setdefault(optimizer, {}).setdefault(number, []).append(Slot(each, tensors.get(variable)))
    optimizers = [_optimizer(*item) for item in found.items()]
    scaled = any(last_part(name) in SCALE_NAMES["loss_scale"] for name in state)
    # An optimizer without slots leaves nothing in the file except its loss scale.
    if scaled and not optimizers:
        optimizers = [Optimizer(path="", family="tf1", name="SGD")]
    for each in optimizers:
        _state(each, state, tensors)
    slots = {slot.tensor.name for each in optimizers for several in each.slots.values() for slot in several}
    variables = [each for name, each in tensors.items() if name not in slots and name not in state]
    writer = LIBRARIES["tf1"] if optimizers else "TensorFlow"
    return File(path, "tf.compat.v1.train.Saver", writer, variables, optimizers, order_is_known=False)


def last_part(name: str) -> str:
    """Return a variable's name without name scopes and without a numeric suffix such as `_1`."""
    return re.sub(r"_\d+$", "", name.rpartition("/")[2])


def _slot_of(name: str, tensors: dict[str, Tensor]) -> tuple[str, str, int] | None:
    """Split a slot's name, such as `w0/Adam_1`, into the variable's name, the optimizer's name and a number."""
    variable, _, last = name.rpartition("/")
    match = re.fullmatch(r"(.+?)(?:_(\d+))?", last)
    if not variable or not match:
        return None
    is_slot = variable in tensors and tensors[variable].shape == tensors[name].shape
    # The file may lack the variable. A variable whose name only ends with the same parts is another one.
    return (variable, match[1], int(match[2] or 0)) if is_slot or match[1] in slot_names.SAVER_SUFFIXES else None


def _optimizer(name: str, found: dict[int, list[Slot]]) -> Optimizer:
    numbers = sorted(found)
    fitting = [each for each in slot_names.SAVER_SUFFIXES.get(name, ()) if len(each) == len(numbers)]
    called = fitting[0] if fitting else [f"{name}_{number}" for number in numbers]
    slots = {slot: found[number] for slot, number in zip(called, numbers)}
    return Optimizer(name, "tf1", slot_names.today(name) if fitting else None, slots=slots)


def _state(optimizer: Optimizer, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    values: dict[str, set[float]] = {}
    for name, tensor in state.items():
        values.setdefault(last_part(name), set()).add(tensor.number())
    # If variables of one kind, such as `beta1_power`, have different values, all of them are ignored. The file does not
    # say which of them belongs to which optimizer.
    agreed = {name: next(iter(each)) for name, each in values.items() if len(each) == 1}
    optimizer.powers = {name: value for name, value in agreed.items() if name.endswith("_power")}
    steps, is_exact = slot_names.steps_of_powers(optimizer.powers)
    differ = any(len(each) > 1 for name, each in values.items() if name in _POWERS)
    if is_exact:
        optimizer.iterations = steps
    elif "global_step" in tensors and not differ:
        optimizer.iterations = tensors["global_step"].number()
    optimizer.others = [name for name in state if last_part(name) not in {*agreed, *_POWERS}]
    optimizer.scale_state = scale_values(agreed.get)
    if optimizer.scale_state:
        optimizer.wrapper = "contrib's LossScaleOptimizer" if "loss_scale" in agreed else MIXED_PRECISION
