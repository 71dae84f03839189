"""Reads the state of a live optimizer, such as the optimizer of a model that was loaded from a `.keras` file."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_lossscale.core.variables import as_number
from tf_lossscale.migrate.checkpoints import configs, matching
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Slot, Tensor
from tf_lossscale.migrate.checkpoints.targets import Target
from tf_lossscale.wrapper import registry


def read(source: Target, variables: list[Any]) -> File:
    """Read an optimizer's state, and the values of the variables that it was built for."""
    optimizer = source.optimizer
    made = configs.of_config({"class_name": type(optimizer).__name__, "config": source.config()}, source.library)
    kind = slot_names.known_class(source.inner)
    made.wrapper = made.wrapper if source.is_wrapped else None
    known = [(_tensor(variable, i), variable) for i, variable in enumerate(variables)]
    owners = {key: tensor for tensor, variable in known if (key := source.key(variable)) is not None}
    is_built_for_variables = bool(owners)
    listed = registry.family_of(source.inner).known_variables()
    if listed and not owners:
        owners = {i: _tensor(variable, i) for i, variable in enumerate(listed)}
    # A legacy optimizer that has not been used has no variables.
    made.iterations = as_number(source.iterations()) if source.variables() else None
    product = source.nadam_product()
    made.nadam_product = None if product is None else as_number(product)
    places = [source.iterations(), product]
    for name, attribute in slot_names.ATTRIBUTES.get(kind or "", {}).items():
        of_slot = source.slots(name, attribute)
        places += of_slot.values()
        for key, place in of_slot.items():
            slot = _tensor(place)
            if key not in owners:
                # The name of a variable that is not among `variables` is known from its slot's name.
                text = slot_names.variable_in(slot.name, source.library, made.scope) or slot.name
                path = f"{len(known) + len(owners)}/{text}"
                owners[key] = Tensor(path, text, slot.shape, slot.dtype, None)
            made.slots.setdefault(name, []).append(Slot(slot, owners[key]))
    made.trained = [*owners.values()]
    made.others += source.remaining(places)
    scale: Any = getattr(optimizer, "_loss_scale", None)
    counts = {name: as_number(variable) for name, variable in source.scale_variables().items()}
    made.scale_state = scale.state() if hasattr(scale, "state") else counts or made.scale_state
    notes = []
    if not is_built_for_variables:
        which = "variables that it did not train" if listed else "`variables`"
        notes.append(f"The saved optimizer was not built for `variables`, so the values of {which} do not change.")
    is_known = is_built_for_variables or not owners
    name, writer = f"the given {type(optimizer).__name__}", LIBRARIES[source.library]
    file = File(name, "live optimizer", writer, made.trained, [made], notes=notes)
    file.known = known if is_known else None
    return file


def _tensor(variable: Any, number: int | None = None) -> Tensor:
    name = matching.name_of(variable)
    path = name if number is None else f"{number}/{name}"
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return Tensor(path, name, tuple(variable.shape), dtype, lambda: np.asarray(variable))
