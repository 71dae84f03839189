"""Reads the state of a live optimizer, such as the optimizer of a model that was loaded from a `.keras` file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_lossscale.families import registry as families
from tf_lossscale.migrate.checkpoints import listed, matching
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import LIBRARIES, File, Tensor
from tf_lossscale.migrate.checkpoints.targets import Target


def read(source: Target, variables: Mapping[str, Any]) -> File:
    """Read an optimizer's state, and the values of its variables."""
    optimizer = source.optimizer
    made = listed.of_config({"class_name": type(optimizer).__name__, "config": optimizer.get_config()}, source.library)
    kind = slot_names.known_class(source.inner)
    made.wrapper = made.wrapper if source.is_wrapped else None
    attributes = slot_names.ATTRIBUTES.get(kind or "", {})
    trained = {path: _tensor(variable, path) for path, variable in variables.items()}
    owners, known = {}, families.family_of(source.inner).known_variables()
    for path, variable in variables.items():
        for name, attribute in attributes.items():
            try:
                owners[id(source.slot(variable, name, attribute))] = trained[path]
            # The optimizer was not built for this variable, which may also be a variable of another library.
            except (KeyError, AttributeError):
                break
            known = None
    if known:
        trained = {str(i): _tensor(variable, str(i)) for i, variable in enumerate(known)}
    stored = [(variable, _tensor(variable, matching.name_of(variable))) for variable in source.variables()]
    of_slot = {id(tensor): owners[id(variable)] for variable, tensor in stored if id(variable) in owners}
    listed.fill(made, [tensor for _, tensor in stored], kind, list(trained.values()), of_slot)
    made.others += map(matching.name_of, source.variables_of_own_rule())
    scale: Any = getattr(optimizer, "_loss_scale", None)
    counts = {name: np.asarray(variable).item() for name, variable in source.scale_variables().items()}
    made.scale_state = scale.state() if hasattr(scale, "state") else counts or made.scale_state
    name, notes = f"the given {type(optimizer).__name__}", []
    if not owners and not known:
        notes.append("The saved optimizer was not built for `variables`, so the values of `variables` do not change.")
    return File(name, "live optimizer", LIBRARIES[source.library], [*trained.values()], [made], notes=notes)


def _tensor(variable: Any, path: str) -> Tensor:
    name = matching.name_of(variable)
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return Tensor(path, name, tuple(variable.shape), dtype, lambda: np.asarray(variable))
