"""Reads the state of a live optimizer, such as the optimizer of a model that was loaded from a `.keras` file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_lossscale.core.variables import as_number
from tf_lossscale.migrate.checkpoints import configs, matching
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Slot, Tensor
from tf_lossscale.migrate.checkpoints.targets import Target
from tf_lossscale.wrapper import registry


def read(source: Target, variables: Mapping[str, Any]) -> File:
    """Read an optimizer's state, and the values of its variables."""
    optimizer = source.optimizer
    made = configs.of_config({"class_name": type(optimizer).__name__, "config": optimizer.get_config()}, source.library)
    kind = slot_names.known_class(source.inner)
    made.wrapper = made.wrapper if source.is_wrapped else None
    tensors = {path: _tensor(variable, path) for path, variable in variables.items()}
    owners = {source.key(variable): tensors[path] for path, variable in variables.items()}
    owners.pop(None, None)
    known = registry.family_of(source.inner).known_variables()
    if known and not owners:
        owners = {i: _tensor(variable, str(i)) for i, variable in enumerate(known)}
        tensors = {tensor.path: tensor for tensor in owners.values()}
    # A legacy optimizer that has not been used has no variables.
    made.iterations = as_number(source.iterations()) if source.variables() else None
    product = source.nadam_product()
    made.nadam_product = None if product is None else as_number(product)
    places = [source.iterations(), product]
    for name, attribute in slot_names.ATTRIBUTES.get(kind or "", {}).items():
        of_slot = source.slots(name, attribute)
        places += of_slot.values()
        slots = [Slot(_tensor(place, matching.name_of(place)), owners.get(key)) for key, place in of_slot.items()]
        made.slots |= {name: slots} if slots else {}
    made.others += source.remaining(places)
    scale: Any = getattr(optimizer, "_loss_scale", None)
    counts = {name: as_number(variable) for name, variable in source.scale_variables().items()}
    made.scale_state = scale.state() if hasattr(scale, "state") else counts or made.scale_state
    name, notes = f"the given {type(optimizer).__name__}", []
    if not owners:
        notes.append("The saved optimizer was not built for `variables`, so the values of `variables` do not change.")
    return File(name, "live optimizer", LIBRARIES[source.library], [*tensors.values()], [made], notes=notes)


def _tensor(variable: Any, path: str) -> Tensor:
    name = matching.name_of(variable)
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return Tensor(path, name, tuple(variable.shape), dtype, lambda: np.asarray(variable))
