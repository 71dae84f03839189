"""Checks state dicts in PyTorch's format before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_lossscale.optimizers.adafactor_rule import moment_shapes
from tf_lossscale.optimizers.groups import check


def checked(state_dict: Mapping[str, Any], parameters: Sequence[Sequence[Any]]) -> list[list[dict[str, Any]]]:
    """Check a state dict, and return the state of every parameter as NumPy arrays."""
    groups = state_dict["param_groups"]
    if len(groups) != len(parameters):
        raise ValueError(
            f"The loaded state dict has {len(groups)} parameter groups, but the optimizer has {len(parameters)}. "
            "First create the optimizer with the same groups."
        )
    for i, (group, variables) in enumerate(zip(groups, parameters)):
        if len(group["params"]) != len(variables):
            raise ValueError(
                f"The loaded state dict has {len(group['params'])} parameters in group {i}, which doesn't match the "
                f"size of the optimizer's group: {len(variables)}. First create the optimizer with the same variables, "
                "or call build() with them."
            )
        check(group)
    # JSON turns integer keys into strings.
    states = {
        int(key) if isinstance(key, str) and key.isdigit() else key: state for key, state in state_dict["state"].items()
    }
    return [
        [_checked_state(v, number, states.get(number) or {}) for v, number in zip(variables, group["params"])]
        for group, variables in zip(groups, parameters)
    ]


def _checked_state(variable: Any, number: Any, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not entry:
        return {}
    shapes = moment_shapes(variable.shape)
    for name in shapes:
        if entry.get(name) is None:
            raise AssertionError(
                f"The loaded state of parameter {number}, of shape {tuple(variable.shape)}, must have "
                f"{' and '.join(shapes)}, but it has only: {sorted(entry)}. Load a state dict that Adafactor saved."
            )
    if "step" not in entry:
        raise KeyError(f"The loaded state of parameter {number} must have 'step', but it has only: {sorted(entry)}.")
    arrays = {name: _as_array(entry[name]) for name in ("step", *shapes)}
    for name, shape in {"step": (), **shapes}.items():
        if arrays[name].size == 1 and not shape:
            arrays[name] = arrays[name].reshape(())
        if arrays[name].shape != shape:
            raise ValueError(
                f"The loaded {name} of parameter {number} has shape {arrays[name].shape}, but a parameter of shape "
                f"{tuple(variable.shape)} needs {shape}. Pass the variables in the order in which they were saved."
            )
    return arrays


def _as_array(value: Any) -> np.ndarray:
    # The value may be a PyTorch tensor. NumPy cannot convert a bfloat16 tensor.
    if hasattr(value, "detach"):
        value = value.detach().cpu().float() if "bfloat16" in str(value.dtype) else value.detach().cpu()
    return np.asarray(value)
