"""Restores the saved state of an optimizer, from any library or version, into a current optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_lossscale.migrate.checkpoints import live, matching
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.notes import Notes
from tf_lossscale.migrate.checkpoints.read import read
from tf_lossscale.migrate.checkpoints.saved import File, FileError, Optimizer, Tensor
from tf_lossscale.migrate.checkpoints.targets import Target, target_of
from tf_lossscale.wrapper import registry
from tf_lossscale.wrapper.checks import name_of

if TYPE_CHECKING:
    from tf_lossscale.types import Optimizer as AnyOptimizer
    from tf_lossscale.types import Variable

# Powers of Adam's betas that are smaller than this number are too inaccurate to compute the step count from them.
_SMALLEST_POWER = 1e-35


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `restore`. A value is None if the file does not contain it or the optimizer cannot hold it.

    >>> restored = Restored(iterations=3, loss_scale=128.0, dynamic_counter=3, notes=())
    >>> restored.loss_scale
    128.0

    Args:
        iterations: the number of steps taken.
        loss_scale: the loss scale.
        dynamic_counter: the number of finite steps that count towards the next growth of the scale.
        notes: the values that could not be restored, and the other reasons why the next steps will differ numerically
            from the steps of the saved optimizer.
    """

    iterations: int | None
    loss_scale: float | None
    dynamic_counter: int | None
    notes: tuple[str, ...]


def restore(
    source: str | os.PathLike[str] | AnyOptimizer,
    optimizer: AnyOptimizer,
    variables: Iterable[Variable] | Mapping[str, Variable],
    *,
    name: str | None = None,
) -> Restored:
    """Restore variables, and the state of their optimizer, from a checkpoint written by another library or version.

    The slots of a TensorFlow 1, TensorFlow 2, tf_keras or Keras 3 optimizer are copied to the corresponding Keras 3 or
    tf_keras optimizer. If both optimizers are wrapped, the loss scale and its counts are copied to the wrapper. If the
    file does not match the optimizer or the variables, an error is raised and no variable changes. Each value that only
    one of the two optimizers has is named in a note.

    >>> import tempfile, tensorflow as tf, tf_keras
    >>> import tf_lossscale
    >>> from tf_lossscale import migrate
    >>> weight = tf.Variable(1.0, name="weight")
    >>> old = tf_lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.1), initial_scale=64)
    >>> _ = old.minimize(lambda: weight**2, [weight])
    >>> path = tf.train.Checkpoint(optimizer=old, weight=weight).write(tempfile.mkdtemp() + "/ckpt")
    >>> new = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(0.1))
    >>> restored = migrate.restore(path, new, [weight])
    >>> restored.iterations, restored.loss_scale, restored.dynamic_counter
    (1, 64.0, 1)

    Args:
        source: any file that `tf-lossscale inspect` reads: the prefix of a checkpoint from `tf.train.Checkpoint` or
            `tf.compat.v1.train.Saver`, a SavedModel, or an `.h5` file. Or an optimizer, such as the `optimizer` of a
            model that its own library has loaded from a `.keras` file.
        optimizer: an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy, with or without a
            LossScaleOptimizer around it. If it has no slots yet, they are created for the trainable `variables`.
        variables: the variables to restore, as a list or a dict. A list such as `model.variables` is matched with the
            file by name, or by order and shape if the names differ. A dict maps names, as shown by `tf-lossscale
            inspect`, to variables. If `source` is an optimizer, these are the variables that it trained.
        name: the optimizer's path in the file, as `tf-lossscale inspect` shows it; required if the file contains
            several optimizers.

    Returns:
        The restored values, and notes about values that were not restored and about steps that will differ numerically.

    Raises:
        FileNotFoundError: there is no file at `source`.
        ValueError: the file is damaged, or does not match the optimizer or the variables. The message names the part
            that is damaged or does not match.
        TypeError: `source` or `optimizer` is not a Keras 3 or tf_keras optimizer, or `variables` contains something
            other than variables.
    """
    target = _target("optimizer", optimizer)
    variables = dict(variables) if isinstance(variables, Mapping) else list(variables)
    for variable in variables.values() if isinstance(variables, dict) else variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                f"`variables` must contain variables only, but got: {variable!r}. Pass the variables themselves, such "
                "as model.variables, and not their values."
            )
    file = read(source) if isinstance(source, (str, os.PathLike)) else live.read(_target("source", source), variables)
    return _Restoration(file, _chosen(file, name), target, variables).run()


def _target(argument: str, optimizer: Any) -> Target:
    target = target_of(optimizer)
    if target is None:
        raise TypeError(
            f"`{argument}` must be an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy"
            f"{', or a path' if argument == 'source' else ''}, but got: {optimizer!r}. For an optimizer from "
            "tf.compat.v1.train, use tf.compat.v1.train.Saver(tf_lossscale.migrate.saver_names(path))."
        )
    return target


def _chosen(file: File, name: str | None) -> Optimizer:
    named = [optimizer for optimizer in file.optimizers if name is None or optimizer.path == name]
    if len(named) == 1:
        return named[0]
    if not file.optimizers:
        raise FileError(f"{file.path}: the file has no optimizer, only {len(file.variables)} variables.")
    names = ", ".join(optimizer.path or "(the root)" for optimizer in file.optimizers)
    raise FileError(f"{file.path}: the file has the optimizers {names}. Pass one of these as `name`.")


class _Restoration:
    """One call of `restore`. All values are read and checked before the first variable changes."""

    def __init__(self, file: File, saved: Optimizer, target: Target, variables: Any):
        self.file, self.saved, self.target = file, saved, target
        self.kind = self._class()
        saved.slots = slot_names.canonical(self.kind, saved.slots)
        self.pairs, of_pairs = matching.pairs(file, variables)
        self.trained = [(tensor, each) for tensor, each in self.pairs if getattr(each, "trainable", True)]
        self.notes = Notes([*file.notes, *of_pairs])
        self.changes: list[tuple[Any, np.ndarray]] = []

    def run(self) -> Restored:
        """Collect all changes, and make them."""
        saved, target = self.saved, self.target
        self.notes.compare(saved, self.kind, target)
        steps = self._steps()
        self._check_counts(steps)
        self.changes = [(variable, self._rounded(tensor, variable)) for tensor, variable in self.pairs]
        slots = self._slots()
        self._build()
        self._set_slots(slots, steps)
        self._set(target.iterations(), None if steps is None else steps * target.micro_steps)
        self._set(target.nadam_product(), self._nadam_product(steps))
        scale = self._scale()
        for key, value in scale.items():
            self._set(target.scale_variables()[key], value)
        self.notes.unset += target.remaining([variable for variable, _ in self.changes])
        if not target.has_schedule:
            self._set(target.learning_rate(), saved.learning_rate)
        _assign(self.changes)
        if steps is not None and hasattr(target.inner, "_u_product_counter"):
            # In eager mode, tf_keras's Nadam compares this number with `iterations`, to update its product once a step.
            target.inner._u_product_counter = steps + 1
        return Restored(steps, scale.get("loss_scale"), scale.get("dynamic_counter"), self.notes.all())

    def _set(self, variable: Any, value: Any) -> None:
        """Add a change. A value of None means that the file does not contain the value."""
        if value is not None:
            self.changes.append((variable, self._fitting(name_of(variable), value, variable)))

    def _check_counts(self, steps: int | None) -> None:
        """Raise an error if a count is not a number of steps."""
        counts = {"iterations": steps or 0} | ({} if self.target.scale() is None else self.saved.scale_state)
        for name, count in counts.items():
            # Beyond 2**53, a float64 does not hold every count, and further steps might exceed an int64.
            if name != "loss_scale" and not (0 <= count <= 2**53 and count == int(count)):
                raise FileError(
                    f"{self.file.path}: {name} must be a number of steps from 0 to 2**53, but is {count:g}."
                )

    def _class(self) -> str:
        """Return the name of the target's class. Raise an error if it cannot hold the saved slots."""
        path, saved, given = self.file.path, self.saved, type(self.target.inner).__name__
        kind = slot_names.known_class(self.target.inner)
        if kind is None:
            supported = ", ".join(slot_names.ATTRIBUTES)
            raise FileError(f"{path}: cannot restore state into {given}, only into {supported}.")
        slots, needed = set(slot_names.canonical(kind, saved.slots)), slot_names.required(kind)
        fits = saved.name in (None, given, kind) or {saved.name, kind} == {"Adam", "AdamW"}
        if not fits or (slots and not needed <= slots):
            there, needed_there = (", ".join(sorted(each)) or "none" for each in (slots, needed))
            raise FileError(
                f"{path}: {saved.path or 'the optimizer'} is of class {saved.name or '(unknown)'}, but the given "
                f"optimizer is {given}. The slots in the file are {there}, and {given} needs {needed_there}. Create an "
                "optimizer of the same class as the one in the file."
            )
        return kind

    def _fitting(self, name: str, value: Any, variable: Any) -> np.ndarray:
        """Convert a value to the dtype of a variable. Raise an error if the variable cannot hold it.

        A value may be rounded, but a finite value must stay finite, and an integer must not change.
        """
        value, dtype = np.asarray(value), tf.as_dtype(variable.dtype)
        # NumPy would parse text, and drop the imaginary part of a complex number.
        is_number = value.dtype.kind not in ("OSU" if dtype.is_complex else "OSUc") and dtype.name != "string"
        if is_number and value.shape == tuple(variable.shape):
            with np.errstate(all="ignore"):
                converted = value.astype(dtype.as_numpy_dtype, copy=False)
            alike = (converted, value) if dtype.is_integer or dtype.is_bool else map(np.isfinite, (converted, value))
            if np.array_equal(*alike):
                return converted
        raise FileError(
            f"{self.file.path}: {name} is of dtype {tf.as_dtype(value.dtype).name} and shape {value.shape}, and its "
            f"values do not fit into {name_of(variable)} of dtype {dtype.name} and shape {tuple(variable.shape)}. Pass "
            "a variable of the same dtype and shape."
        )

    def _rounded(self, tensor: Tensor, variable: Any) -> np.ndarray:
        """Convert a tensor to the dtype of a variable, and note if its values are rounded."""
        value = tensor.value()
        fitting = self._fitting(tensor.path, value, variable)
        if not np.array_equal(fitting, value, equal_nan=fitting.dtype.kind in "fc"):
            self.notes.rounded.append(tensor.path)
        return fitting

    def _steps(self) -> int | None:
        """Return the number of steps. With gradient accumulation, Keras 3 counts micro-steps."""
        saved = self.saved
        if saved.of_tf1:
            return self._steps_of_tf1()
        if saved.iterations is None or "gradient_accumulator" not in saved.slots:
            return saved.iterations
        del saved.slots["gradient_accumulator"]
        # A checkpoint does not contain the number of micro-steps in a step.
        there = int(saved.hyperparameters.get("gradient_accumulation_steps") or self.target.micro_steps)
        steps, rest = divmod(saved.iterations, there)
        self.notes.lost.append(
            f"the slots gradient_accumulator, with {rest} of {there} micro-steps of an unfinished step"
        )
        return steps

    def _steps_of_tf1(self) -> int | None:
        """Return the step count of a TensorFlow 1 optimizer. Adam saves only the powers of its betas."""
        count, power = self.saved.iterations, self.saved.beta2_power
        if self.saved.name != "Adam":
            return count
        if power is None or not 0.0 <= power < 1.0:
            if count is None:
                raise FileError(
                    f"{self.file.path}: the file does not say which step count belongs to this Adam optimizer. If it "
                    "has several optimizers with a beta2_power, save each optimizer's variables in a separate file."
                )
            return count
        steps = round(math.log(max(power, _SMALLEST_POWER)) / math.log(self.target.number("beta_2"))) - 1
        if power > _SMALLEST_POWER:
            return steps
        if count is None:
            self.notes.texts.append(
                "The file does not hold the step count, and beta2_power is too small to compute it. The optimizer "
                f"continues from step {steps}, which gives the same steps with a constant learning rate. For a "
                "learning rate schedule, assign the true step count to `optimizer.iterations`."
            )
        return max(steps, count or 0)

    def _nadam_product(self, steps: int | None) -> float | None:
        """Return the saved product of momenta, or compute it if the optimizers have different momentum schedules."""
        saved, target = self.saved, self.target
        if self.kind != "Nadam" or steps is None:
            return None
        has_schedule_of_target = saved.slots_are_lists == target.slots_are_lists
        if saved.nadam_product is not None and has_schedule_of_target:
            return saved.nadam_product
        if has_schedule_of_target:
            self.notes.texts.append(
                "The file does not contain Nadam's product of momenta. It is computed from the step count, which may "
                "include skipped steps."
            )
        # Only legacy optimizers have a decay of the momentum schedule. In newer ones, it is always 1.
        return slot_names.nadam_product(target.number("beta_1"), steps, getattr(target.inner, "_initial_decay", 1.0))

    def _slots(self) -> list[tuple[str, Tensor, Any]]:
        """Return (slot name, tensor, user's variable) for each saved slot that belongs to a restored variable."""
        variable_of = {tensor.path: variable for tensor, variable in self.pairs}
        shapes = [tensor.shape for tensor, _ in self.trained]
        found: list[tuple[str, Tensor, Any]] = []
        by_order: list[str] = []
        for slot, each in self.saved.slots.items():
            if slot not in slot_names.ATTRIBUTES[self.kind]:
                self.notes.lost.append(f"the slots {slot}")
                continue
            in_order = [tensor for tensor, _ in self.trained] if len(self.trained) == len(each) else [None] * len(each)
            for (tensor, named), other in zip(each, in_order):
                owner = named or other
                if owner is None or (named is None and owner.shape != tensor.shape):
                    raise FileError(
                        f"{self.file.path}: cannot tell which variable the slot {tensor.path} {tensor.shape} belongs "
                        "to. Pass all variables that the optimizer trained, in the order in which they were passed to "
                        "its build()."
                    )
                if owner.path not in variable_of:
                    self.notes.lost.append(f"the slots of {owner.path}")
                    continue
                variable = variable_of[owner.path]
                found.append((slot, tensor, variable))
                if named is None and shapes.count(tensor.shape) > 1:
                    by_order.append(name_of(variable))
        if by_order:
            self.notes.texts.append(
                "The file does not say which variables the slots belong to. They were matched with `variables` in the "
                f"order of the optimizer's build(): {', '.join(dict.fromkeys(by_order))}."
            )
        if getattr(self.target.inner, "use_ema", False) and "average" not in self.saved.slots:
            # An average that was not saved starts at its variable's value.
            found += [("average", tensor, variable) for tensor, variable in self.trained]
        return found

    def _build(self) -> None:
        """Create the slots of an optimizer that is not built yet."""
        target = self.target
        family: Any = registry.family_of(target.inner)
        if not family._is_built:
            # A wrapper also builds its own variables. Keras's own wrappers around legacy optimizers have no `build`.
            build = (
                family.build if target.optimizer is target.inner else getattr(target.optimizer, "build", family.build)
            )
            build([variable for _, variable in self.trained])

    def _set_slots(self, slots: list[tuple[str, Tensor, Any]], steps: int | None) -> None:
        target, places = self.target, self.target.slots()
        for slot, tensor, variable in slots:
            key = target.key(variable)
            if key is None:
                raise FileError(
                    f"{self.file.path}: the given {type(target.inner).__name__} was not built for all of `variables`. "
                    "Restore into a new optimizer, or pass the variables that this one was built for."
                )
            if key not in places[slot]:
                self.notes.lost.append(f"the slots {slot}")
                continue
            value = self._rounded(tensor, places[slot][key])
            if self.saved.of_tf1 and self.kind == "SGD":
                # TensorFlow 1's momentum slot is a sum of gradients; each step subtracts the learning rate times this
                # sum from the variable. Keras's momentum slot is a sum of gradients that are already multiplied by the
                # negative learning rate.
                value = np.float32(-target.rate_at(steps or 0)) * value
            self.changes.append((places[slot][key], value))

    def _scale(self) -> dict[str, Any]:
        """Return the new values of the loss scale and its counts."""
        saved, target, notes = self.saved, self.target, self.notes
        here, places = target.scale(), target.scale_variables()
        state = {} if saved.scale_is_fixed else {key: each for key, each in saved.scale_state.items() if key in places}
        lost = [
            f"{key}={each:g}"
            for key, each in saved.scale_state.items()
            if key not in state and (each or key == "loss_scale")
        ]
        if not saved.scale_is_fixed:
            notes.lost += lost
        elif places or saved.scale_state.get("loss_scale") != here:
            notes.lost.append(f"a fixed loss scale ({', '.join(lost) or 'without its value'})")
        else:
            return {}
        if not state:
            notes.unset += [] if here is None else [f"the loss scale ({here:g})"]
            return {}
        if not (state["loss_scale"] > 0 and math.isfinite(np.float32(state["loss_scale"]))):
            # A loss scale that has reached infinity or 0 must not stop the restored optimizer as well.
            notes.texts.append(
                f"The saved loss scale is {state.pop('loss_scale'):g}, but must be a finite float32 number above 0. "
                f"The loss scale stays at {here:g}."
            )
        # A count that was not saved has not begun.
        return {**{key: 0 for key in places if key != "loss_scale"}, **state}


def _assign(changes: list[tuple[Any, np.ndarray]]) -> None:
    """Assign a value to each variable. After an error or an interrupt, give the variables their old values again."""
    before = []
    try:
        for variable, value in changes:
            before.append((variable, tf.convert_to_tensor(variable)))
            variable.assign(value)
    except BaseException:
        for variable, value in before:
            # The variable whose assignment failed may fail again.
            with contextlib.suppress(Exception):
                variable.assign(value)
        raise
