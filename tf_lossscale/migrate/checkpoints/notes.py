"""Notes about the differences between a saved optimizer and the optimizer that it is restored into."""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import Optimizer
from tf_lossscale.migrate.checkpoints.targets import Target
from tf_lossscale.writing import printable

# Hyperparameters that have no effect on the next steps of an optimizer whose slots are restored.
_WITHOUT_EFFECT = ("jit_compile", "is_legacy_optimizer", "initial_accumulator_value")
# Hyperparameters that have an effect only with `use_ema=True`.
_OF_AVERAGES = ("ema_momentum", "ema_overwrite_frequency")


@dataclasses.dataclass
class Notes:
    """Collects the notes about one call of `restore`."""

    texts: list[str]
    #: The values of the saved optimizer that have no place in the new one.
    lost: list[str] = dataclasses.field(default_factory=list)
    #: The values of the new optimizer that the saved one does not have.
    unset: list[str] = dataclasses.field(default_factory=list)
    #: The values that are rounded to a dtype of lower precision.
    rounded: list[str] = dataclasses.field(default_factory=list)

    def all(self) -> tuple[str, ...]:
        """Return all notes."""
        lost = "These values of the saved optimizer have no place in the new one and are not restored"
        unset = "The saved optimizer has no value for these parts of the new one, which do not change"
        rounded = "These values are rounded, because the dtypes of the new variables have a lower precision"
        listed = ((lost, self.lost), (unset, self.unset), (rounded, self.rounded))
        texts = [*self.texts, *(f"{what}: {', '.join(dict.fromkeys(values))}." for what, values in listed if values)]
        return tuple(map(printable, texts))

    def compare(self, saved: Optimizer, kind: str, target: Target) -> None:
        """Compare the classes, the hyperparameters and the learning rates."""
        self._compare_classes(saved, kind, target)
        ignored = {*_WITHOUT_EFFECT, *(() if saved.hyperparameters.get("use_ema", True) else _OF_AVERAGES)}
        for name, there in saved.hyperparameters.items():
            here = target.number(name)
            if name in ignored:
                continue
            if not isinstance(here, (int, float)):
                self.lost += [f"{name}={there:g}"] if there else []
            elif not np.isclose(here, there, 1e-6):
                self.texts.append(
                    f"The file was written with {name}={there:g}, but the optimizer keeps its own value, {here:g}."
                )
        if saved.learning_rate is not None and target.has_schedule:
            self.lost.append(f"learning_rate={saved.learning_rate:g}")
        elif saved.learning_rate is None and not saved.of_tf1 and not target.has_schedule:
            self.unset.append("learning_rate")
        self.lost += saved.others

    def _compare_classes(self, saved: Optimizer, kind: str, target: Target) -> None:
        given = type(target.inner).__name__
        # The files of tf_keras do not distinguish AdamW from Adam.
        alike = saved.family == "tf_keras" and {saved.name, given} == {"Adam", "AdamW"}
        name = saved.name
        if name is None and saved.slots:
            name = f"unknown (its first slot is {next(iter(saved.slots.values()))[0].tensor.name})"
        if name not in (None, given) and not alike:
            self.texts.append(
                f"The class of the saved optimizer is {name}, but the given optimizer is {given}. If the rules of the "
                "two classes differ, the next steps will differ."
            )
        momentum = saved.hyperparameters.get("momentum") or "momentum" in saved.slots
        other_library = not saved.of_tf1 and saved.slots_are_lists != target.slots_are_lists
        if other_library and kind in slot_names.OTHER_FORMULA and not (kind == "RMSprop" and momentum):
            self.texts.append(
                f"The current {kind} updates variables by another formula than the saved one, so the steps differ. "
                "docs/checkpoints.md says which arguments make them alike."
            )
