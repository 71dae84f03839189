"""Matches the variables of a file with the user's variables."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from tf_lossscale.migrate.checkpoints.saved import File, FileError, Tensor


def pairs(file: File, variables: Any) -> tuple[list[tuple[Tensor, Any]], list[str]]:
    """Pair each of the user's variables with a variable in the file. Return the pairs and notes about them.

    The variables in a list are matched by name if the file contains each name exactly once. Otherwise they are matched
    by their order, if the shapes agree and the file tells the order of variables that have the same shape.
    """
    if isinstance(variables, Mapping):
        return [(_named(file, name, variable), variable) for name, variable in variables.items()], []
    matched = _by_names(file.variables, variables)
    if matched is not None:
        return list(zip(matched, variables)), []
    matched = _by_order(file.variables, variables)
    if matched is None:
        raise FileError(
            f"{file.path}: `variables` matches the file's variables neither by name nor by order and shape. The file "
            f"has: {_listed([(t.path, t.shape) for t in file.variables])}. `variables` has: "
            f"{_listed([(name_of(v), tuple(v.shape)) for v in variables])}. Pass a dict {{name in the file: variable}}."
        )
    shapes = collections.Counter(tensor.shape for tensor in matched)
    alike = [(tensor.path, tensor.shape) for tensor in matched if shapes[tensor.shape] > 1]
    if alike and not file.order_is_known:
        raise FileError(
            f"{file.path}: `variables` cannot be matched with the file's variables. Their names differ, and the file "
            f"does not tell the order of the variables that have the same shape: {_listed(alike)}. Pass a dict {{name "
            "in the file: variable}, in the order in which the variables were passed to the optimizer's build()."
        )
    matches = list(zip(matched, variables))
    if all(shapes[tensor.shape] == 1 or _same_name(tensor, name_of(variable)) for tensor, variable in matches):
        return matches, []
    return matches, [f"The variables have other names in the file, so these were matched by order: {_listed(alike)}."]


def name_of(variable: Any) -> str:
    """Return a variable's full name, including its name scopes, as it is stored in a checkpoint."""
    return getattr(variable, "path", None) or variable.name.partition(":")[0]


def _named(file: File, name: str, variable: Any) -> Tensor:
    named = [tensor for tensor in file.variables if name == tensor.path]
    named = named or [tensor for tensor in file.variables if name == tensor.name]
    if len(named) > 1:
        paths = ", ".join(tensor.path for tensor in named)
        raise FileError(f"{file.path}: the file has several variables {name!r}. Pass one of their paths: {paths}.")
    if not named:
        names = _listed([(tensor.path, tensor.shape) for tensor in file.variables])
        raise FileError(f"{file.path}: the file has no variable {name!r}, only: {names}.")
    if named[0].shape != tuple(variable.shape):
        raise FileError(
            f"{file.path}: the variable {name!r} has shape {named[0].shape}, but yours has {tuple(variable.shape)}."
        )
    return named[0]


def _by_names(tensors: list[Tensor], variables: list[Any]) -> list[Tensor] | None:
    matched: list[Tensor] = []
    for variable in variables:
        name = name_of(variable)
        same = [tensor for tensor in tensors if name in (tensor.name, tensor.path)]
        same = same or [tensor for tensor in tensors if _same_name(tensor, name)]
        if len(same) != 1 or same[0].shape != tuple(variable.shape) or same[0] in matched:
            return None
        matched += same
    return matched


def _same_name(tensor: Tensor, name: str) -> bool:
    # In Keras 3, variable names begin with the name of the model. Either the name in the file or the given name may
    # lack this prefix.
    return name == tensor.path or f"/{name}".endswith(f"/{tensor.name}") or tensor.name.endswith(f"/{name}")


def _by_order(tensors: list[Tensor], variables: list[Any]) -> list[Tensor] | None:
    for candidates in (tensors, [tensor for tensor in tensors if not tensor.is_counter]):
        if [tensor.shape for tensor in candidates] == [tuple(variable.shape) for variable in variables]:
            return list(candidates)
    return None


def _listed(named: list[tuple[str, tuple[int, ...]]]) -> str:
    shown = ", ".join(f"{name} {shape}" for name, shape in named[:12])
    return f"{shown}, and {len(named) - 12} more" if len(named) > 12 else shown or "none"
