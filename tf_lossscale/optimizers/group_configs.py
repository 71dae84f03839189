"""Adafactor's Keras config: options and parameter groups. In a config, variables are referred to by position."""

from __future__ import annotations

from typing import Any

from tf_lossscale.optimizers.parameter_groups import ParameterGroup


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return the entries that Adafactor adds to the config of Keras's base class, or replaces in it.

    >>> from tf_lossscale.optimizers import Adafactor
    >>> config_of(Adafactor(eps=(None, 0.01)))["eps"]
    [None, 0.01]

    Args:
        optimizer: an `Adafactor`.
    """
    first = optimizer._groups[0]
    config = {name: first[name] for name in optimizer.hyperparameter_names}
    config.update(eps=list(first["eps"]), learning_rate=_rate_config(optimizer, first))
    if len(optimizer._groups) > 1:
        config["param_groups"] = [
            {**_group_config(optimizer, group), "params": positions}
            for group, positions in zip(optimizer._groups, _positions_of(optimizer))
        ]
    return config


def _positions_of(optimizer: Any) -> list[list[int]]:
    """For each group, return the positions of its variables in the list of the optimizer's variables."""
    if optimizer._positions is not None:
        return optimizer._positions
    if not optimizer._is_built:
        raise ValueError(
            "The config of an Adafactor with several parameter groups refers to variables by their positions in the "
            "list passed to build(), but this optimizer is not built. Call build(variables) first."
        )
    order = {optimizer._var_key(variable): i for i, variable in enumerate(optimizer._built_for())}
    return [[order[optimizer._var_key(variable)] for variable in group["params"]] for group in optimizer._groups]


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
    """Create an `Adafactor` from a config. The parameter groups get their variables when the optimizer is built.

    >>> from tf_lossscale.optimizers import Adafactor
    >>> optimizer_of(Adafactor, Adafactor(d=2.0).get_config(), None).d
    2.0

    Args:
        cls: the class to instantiate: one of the two `Adafactor` classes.
        config: a dict as returned by `get_config`.
        custom_objects: a dict that maps the names of user-defined learning rate schedules to classes or functions.
    """

    def ready(options: dict[str, Any], rate: str) -> dict[str, Any]:
        value = options[rate]
        value = cls._schedules.deserialize(value, custom_objects) if isinstance(value, dict) else value
        return {**options, "eps": tuple(options["eps"]), rate: value}

    config = dict(config)
    groups = [ready(group, "lr") for group in config.pop("param_groups", [])]
    optimizer = cls(**ready(config, "learning_rate"))
    for i, group in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in ("params", "own")}
        if i:
            optimizer._add_group({"params": [], **options})
        else:
            optimizer._groups[0].update(options)
        optimizer._groups[i].own = frozenset(group["own"])
    if groups:
        optimizer._positions = [group["params"] for group in groups]
    return optimizer
