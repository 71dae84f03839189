"""Notes about the differences between a saved optimizer and the optimizer that it is restored into."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_lossscale.core.rules import KEYWORDS
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import Optimizer
from tf_lossscale.migrate.checkpoints.targets import Target
from tf_lossscale.writing import printable

# Hyperparameters that have no effect on the next steps of an optimizer whose slots are restored.
_WITHOUT_EFFECT = ("jit_compile", "is_legacy_optimizer", "initial_accumulator_value")


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
        texts = [*self.texts, *(f"{what}: {', '.join(values)}." for what, values in listed if values)]
        return tuple(map(printable, texts))

    def compare(self, saved: Optimizer, kind: str, target: Target) -> None:
        """Compare the classes, the hyperparameters and the learning rates."""
        self._compare_classes(saved, kind, target)
        ignored = {*_WITHOUT_EFFECT}
        if not saved.hyperparameters.get("use_ema", True):
            ignored |= {"ema_momentum", "ema_overwrite_frequency"}
        if target.slots_are_lists and not saved.slots_are_lists:
            # A note explains that TensorFlow Addons uses AdamW's weight_decay in another way.
            ignored |= {"decay", "weight_decay"} if kind == "AdamW" else {"decay"}
            if decay := saved.hyperparameters.get("decay"):
                rate = "learning_rate" if saved.learning_rate is None else f"{saved.learning_rate:g}"
                self.texts.append(
                    f"The file has decay={decay:g}, which in Nadam belongs to the momentum, not to the learning rate."
                    if kind == "Nadam"
                    else f"The file's learning rate decays, with decay={decay:g}. Pass the optimizer the schedule "
                    f"InverseTimeDecay({rate}, 1, {decay:g})."
                )
        for name, value in saved.hyperparameters.items():
            if name not in ignored:
                self._compare(name, value, target.number(name))
        if target.scale_variables() and not saved.scale_is_fixed:
            here = {**KEYWORDS, **target.config()}
            for name, value in saved.wrapper_arguments.items():
                self._compare(name, value, here.get(name))
        if target.has_schedule:
            self.lost += [] if saved.learning_rate is None else [f"learning_rate={saved.learning_rate:g}"]
        elif saved.learning_rate is None and not saved.of_tf1:
            self.unset.append("learning_rate")
        self.lost += saved.others

    def _compare_classes(self, saved: Optimizer, kind: str, target: Target) -> None:
        given = type(target.inner).__name__
        # The files of tf_keras do not distinguish AdamW from Adam.
        alike = saved.family == "tf_keras" and {saved.name, given} == {"Adam", "AdamW"}
        if saved.name is None and saved.slots:
            first = next(iter(saved.slots.values()))[0].tensor.name
            self.texts.append(
                f"The file does not name the class of the saved optimizer. Its slots {', '.join(saved.slots)} (the "
                f"first is {first}) are restored as the slots of {kind}. If its class is another one, the next steps "
                "will differ."
            )
        elif saved.name not in (None, given) and not alike:
            self.texts.append(
                f"The saved optimizer is of class {saved.name}, but the given optimizer is {given}. If the rules of "
                "the two classes differ, the next steps will differ."
            )
        momentum = saved.hyperparameters.get("momentum") or "momentum" in saved.slots
        other_rule = not saved.of_tf1 and saved.slots_are_lists != target.slots_are_lists
        if other_rule and kind in slot_names.DIFFERENCES and not (kind == "RMSprop" and momentum):
            self.texts.append(slot_names.DIFFERENCES[kind])

    def _compare(self, name: str, there: float, here: Any) -> None:
        if not isinstance(here, (int, float)):
            self.lost += [f"{name}={there:g}"] if there else []
        elif not np.isclose(here, there, 1e-6):
            self.texts.append(
                f"The file was written with {name}={there:g}, but the optimizer keeps its own value, {here:g}."
            )
