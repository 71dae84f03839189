"""Adafactor's Keras config: options and parameter groups. A config refers to variables by position and by name."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tf_lossscale.optimizers.groups import ParameterGroup


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return the entries that Adafactor adds to the config of Keras's base class, or replaces in it."""
    first = optimizer._groups[0]
    config = {name: first[name] for name in optimizer.hyperparameter_names}
    config.update(eps=list(first["eps"]), learning_rate=_rate_config(optimizer, first))
    if optimizer._is_built:
        variables = optimizer._built_for()
        names, positions = _names_of(variables), _positions_of(optimizer, variables)
    else:
        names, positions = optimizer._names, optimizer._positions
    if names is not None:
        config["variable_names"] = names
    if positions is not None:
        config["param_groups"] = [
            {**_group_config(optimizer, group), "params": of_group}
            for group, of_group in zip(optimizer._groups, positions)
        ]
    elif len(optimizer._groups) > 1:
        raise ValueError(
            "The config of an Adafactor with several parameter groups refers to variables by their positions in the "
            "list passed to build(), but this optimizer is not built. Call build(variables) first."
        )
    return config


def _names_of(variables: Sequence[Any]) -> list[str]:
    return [str(getattr(variable, "path", variable.name)) for variable in variables]


def _positions_of(optimizer: Any, variables: Sequence[Any]) -> list[list[int]] | None:
    """For each group, return the positions of its variables in `variables`. Return None if one group has them all."""
    order = {optimizer._var_key(variable): i for i, variable in enumerate(variables)}
    positions = [[order[optimizer._var_key(variable)] for variable in group["params"]] for group in optimizer._groups]
    return None if positions == [list(range(len(variables)))] else positions


def in_saved_order(optimizer: Any, variables: list[Any]) -> list[Any]:
    """Return the variables in the order that they had in the optimizer whose config was saved.

    That order may be different from the order of the variables in the model, because `step` and `load_state_dict`
    build an optimizer in the order of its groups. If there is one group and the names of the variables do not determine
    the order, the variables are returned as they are.
    """
    saved, names = optimizer._names, _names_of(variables)
    if saved is None or saved == names:
        return variables
    first = _positions_by_name(saved, names)
    if first is not None:
        return [variables[i] for i in [*first, *sorted(set(range(len(variables))) - set(first))]]
    if optimizer._positions is not None:
        raise ValueError(
            f"The names of the variables passed to Adafactor.build(), {names}, do not match the names in the config, "
            f"{list(saved)}, so the parameter group of each variable is unknown. Give the layers the names "
            "of the saved model (Keras numbers layers within a process: load the model in a new process), or create a "
            "new optimizer with these groups."
        )
    return variables


def _positions_by_name(saved: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return the position of each saved name in `names`, or None if the names do not match one to one.

    When Keras 3 loads a model, it leaves out the names of the enclosing models: "sequential/dense/kernel" becomes
    "dense/kernel". Names therefore match if one of them ends with the other.
    """
    by_name, by_ending = collections.defaultdict(list), collections.defaultdict(list)
    for i, name in enumerate(names):
        by_name[name].append(i)
        for ending in _endings(name):
            by_ending[ending].append(i)
    found = [next((by_name[each] for each in _endings(name) if each in by_name), by_ending[name]) for name in saved]
    positions = [at[0] for at in found if len(at) == 1]
    return positions if len(set(positions)) == len(saved) else None


def _endings(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[i:]) for i in range(len(parts))]


def _group_config(optimizer: Any, group: ParameterGroup) -> dict[str, Any]:
    config = {name: value for name, value in group.items() if name not in ("lr", "params")}
    return {**config, "eps": list(config["eps"]), "lr": _rate_config(optimizer, group), "own": sorted(group.own)}


def _rate_config(optimizer: Any, group: ParameterGroup) -> Any:
    rate = group["lr"]
    if callable(rate):
        return optimizer._schedules.serialize(rate)
    value = group.rate.number()
    return value if isinstance(value, float) else value.item()


def optimizer_of(cls: Any, config: dict[str, Any], custom_objects: dict[str, Any] | None) -> Any:
    """Create an `Adafactor` from a config. The parameter groups get their variables when the optimizer is built."""

    def ready(options: dict[str, Any], rate: str) -> dict[str, Any]:
        value = options[rate]
        value = cls._schedules.deserialize(value, custom_objects) if isinstance(value, dict) else value
        return {**options, "eps": tuple(options["eps"]), rate: value}

    config = dict(config)
    names = config.pop("variable_names", None)
    groups = [ready(group, "lr") for group in config.pop("param_groups", [])]
    optimizer = cls(**ready(config, "learning_rate"))
    for i, group in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in ("params", "own")}
        if i:
            optimizer._add_group({"params": [], **options})
        else:
            optimizer._groups[0].update(options)
        optimizer._groups[i].own = frozenset(group["own"])
    optimizer._names = names
    if groups:
        optimizer._positions = [group["params"] for group in groups]
    return optimizer
