"""Adafactor's config: its options and parameter groups. A group names its variables by their positions."""

from __future__ import annotations

from typing import Any

from tf_lossscale.optimizers.parameter_groups import ParameterGroup


class GroupConfigs:
    """The part of Adafactor that writes and reads its config."""

    # What the optimizer's class provides. -----------------------------------------------------------------------

    hyperparameter_names: tuple[str, ...]
    _groups: list[ParameterGroup]

    def _key(self, variable: Any) -> Any:
        raise NotImplementedError

    def _add_group(self, given: dict[str, Any]) -> None:
        raise NotImplementedError

    def _file(self, group: ParameterGroup) -> None:
        raise NotImplementedError

    def _built_for(self) -> list[Any]:
        """Return the variables in the order in which the optimizer was built, or will be built, for them."""
        raise NotImplementedError

    @classmethod
    def _serialized_schedule(cls, schedule: Any) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def _deserialized_schedule(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None) -> Any:
        raise NotImplementedError

    # The positions of each group's variables, in an optimizer that was created from a config and is not built.
    _positions: list[list[int]] | None

    # ------------------------------------------------------------------------------------------------------------

    def _own_config(self) -> dict[str, Any]:
        first = self._groups[0]
        config = {name: first[name] for name in self.hyperparameter_names}
        config.update(eps=list(first["eps"]), learning_rate=self._serialized_rate(first))
        if len(self._groups) > 1:
            config["param_groups"] = [{**self._group_config(group), "params": p} for group, p in self._placed()]
        return config

    def _placed(self) -> list[tuple[ParameterGroup, list[int]]]:
        """Return each group with the positions of its variables in the list of the optimizer's variables."""
        positions = self._positions
        if positions is None:
            order = {self._key(variable): i for i, variable in enumerate(self._built_for())}
            positions = [[order[self._key(variable)] for variable in group["params"]] for group in self._groups]
        return list(zip(self._groups, positions))

    def _group_config(self, group: ParameterGroup) -> dict[str, Any]:
        config = {name: value for name, value in group.items() if name not in ("lr", "params")}
        return {**config, "eps": list(config["eps"]), "lr": self._serialized_rate(group), "own": sorted(group.own)}

    def _serialized_rate(self, group: ParameterGroup) -> Any:
        rate = group["lr"]
        if not callable(rate):
            value = group.rate.number()
            return value if isinstance(value, float) else value.item()
        return self._serialized_schedule(rate)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Create an optimizer from a config. Its groups get their variables when it is built.

        Args:
            config: a dict.
            custom_objects: user-defined learning rate schedules, a dict from names to classes or functions.
        """

        def ready(options: dict[str, Any], rate: str) -> dict[str, Any]:
            value = options[rate]
            value = cls._deserialized_schedule(value, custom_objects) if isinstance(value, dict) else value
            return {**options, "eps": tuple(options["eps"]), rate: value}

        config = dict(config)
        groups = [ready(group, "lr") for group in config.pop("param_groups", [])]
        optimizer: Any = cls(**ready(config, "learning_rate"))
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

    def _place_by_config(self, variables: list[Any]) -> None:
        """Put the variables into the groups that were created from a config, by their positions."""
        if self._positions is not None:
            for group, positions in zip(self._groups, self._positions):
                group["params"] = [variables[i] for i in positions]
                self._file(group)
            self._positions = None
