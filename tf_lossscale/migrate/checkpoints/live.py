"""Reads the state of a live optimizer, such as the optimizer of a model that was loaded from a `.keras` file."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_lossscale.core.variables import as_number
from tf_lossscale.migrate.checkpoints import configs
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Slot, Tensor
from tf_lossscale.migrate.checkpoints.targets import Target
from tf_lossscale.wrapper.checks import name_of


def read(source: Target, variables: dict[str, Any] | list[Any]) -> File:
    """Read an optimizer's state, and the values of the variables that it trained."""
    optimizer = source.optimizer
    made = configs.of_config({"class_name": type(optimizer).__name__, "config": optimizer.get_config()}, source.library)
    named = variables if isinstance(variables, dict) else {f"{i}/{name_of(v)}": v for i, v in enumerate(variables)}
    tensors = {path: _tensor(variable, path) for path, variable in named.items()}
    owners = {source.key(variable): tensors[path] for path, variable in named.items()}
    owners.pop(None, None)
    # A legacy optimizer that has not been used has no variables.
    made.iterations = as_number(source.iterations()) if source.variables() else None
    product = source.nadam_product()
    made.nadam_product = None if product is None else as_number(product)
    places = [source.iterations(), product]
    for name, of_slot in source.slots().items():
        places += of_slot.values()
        if of_slot:
            made.slots[name] = [Slot(_tensor(place, name_of(place)), owners.get(key)) for key, place in of_slot.items()]
    made.others += source.remaining(places)
    counts = {name: as_number(variable) for name, variable in source.scale_variables().items()}
    made.scale_state = counts or made.scale_state
    name, notes = f"the given {type(optimizer).__name__}", []
    if not owners:
        notes.append("The saved optimizer was not built for `variables`, so the values of `variables` do not change.")
    return File(name, "live optimizer", LIBRARIES[source.library], [*tensors.values()], [made], notes=notes)


def _tensor(variable: Any, path: str) -> Tensor:
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return Tensor(path, name_of(variable), tuple(variable.shape), dtype, lambda: np.asarray(variable))
