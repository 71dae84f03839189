"""Restores the saved state of an optimizer, from any library or version, into a current optimizer."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tf_lossscale.migrate.checkpoints import live, matching, values
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.notes import Notes
from tf_lossscale.migrate.checkpoints.read import read
from tf_lossscale.migrate.checkpoints.saved import File, FileError, Optimizer
from tf_lossscale.migrate.checkpoints.targets import Target, target_of
from tf_lossscale.wrapper import registry

if TYPE_CHECKING:
    from tf_lossscale.types import Model, Variable
    from tf_lossscale.types import Optimizer as AnyOptimizer


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
    variables: Iterable[Variable] | Mapping[str, Any] | Model,
    *,
    name: str | None = None,
    match: Literal["name", "order"] = "name",
    partial: bool = False,
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
    >>> restored = migrate.restore(path, new, {"weight": weight})
    >>> restored.iterations, restored.loss_scale, restored.dynamic_counter
    (1, 64.0, 1)

    Args:
        source: any file that `tf-lossscale inspect` reads: the prefix of a checkpoint from `tf.train.Checkpoint` or
            `tf.compat.v1.train.Saver`, a folder of checkpoints, a SavedModel, or an `.h5` file. Or an optimizer, such
            as the `optimizer` of a model that its own library has loaded from a `.keras` file.
        optimizer: an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy, with or without a
            LossScaleOptimizer around it. If it has no slots yet, they are created for the trainable `variables`.
        variables: the objects to restore: a model, or a dict of models and variables under the names that they have in
            the file, as in `tf.train.Checkpoint(**variables)`. They are matched by their paths in a checkpoint or
            SavedModel, and in other files by names. Or a list of variables, which is matched by unique names. If
            `source` is an optimizer, these are the variables that it trained.
        name: the optimizer's path in the file, as `tf-lossscale inspect` shows it; required if the file contains
            several optimizers.
        match: pass "order" to match a list, and slots whose variables the file does not name, by their order: that of
            the old optimizer's `build`, or else that of the file, as `tf-lossscale inspect` shows it. A note lists the
            pairs.
        partial: whether a model and the file may have variables that the other lacks. A note lists them.

    Returns:
        The restored values, and notes about values that were not restored and about steps that will differ numerically.

    Raises:
        FileNotFoundError: there is no file at `source`.
        ValueError: the file is damaged, or does not match the optimizer or the variables. The message names the part
            that is damaged or does not match.
        TypeError: `source` or `optimizer` is not a Keras 3 or tf_keras optimizer, or `variables` contains something
            other than models and variables.
    """
    target = _target("optimizer", optimizer)
    given = _given(variables)
    everything = matching.variables_in(given)
    file = read(source) if isinstance(source, (str, os.PathLike)) else live.read(_target("source", source), everything)
    saved = _chosen(file, name)
    kind = _class_of(file, saved, target.inner)
    saved = dataclasses.replace(saved, slots=slot_names.canonical(kind, saved.slots))
    pairs, of_pairs = matching.pairs(file, saved, given, match, partial)
    notes = Notes([*file.notes, *of_pairs])
    notes.compare(saved, kind, target)
    steps = _steps(file, saved, target, notes)
    counts = {key: count for key, count in saved.scale_state.items() if key != "loss_scale" and target.is_wrapped}
    values.check_counts(file, {**counts, "iterations": steps or 0})
    product = None
    if steps is not None:
        micro_steps = _micro_steps(saved, steps, target, notes)
        steps = int(micro_steps // target.micro_steps)
        product = _nadam_product(file, saved, steps, target, notes) if kind == "Nadam" else None
    weights = [
        (variable, values.fitting(file, tensor.path, tensor.value(), variable, notes))
        for tensor, variable in pairs
        if tensor.read is not None
    ]
    trained = matching.variables_in(given, trained=True)
    rate_of_tf1 = target.rate_at(steps or 0) if saved.of_tf1 and kind == "SGD" else 0.0
    slots = _slots(file, saved, kind, pairs, trained if match == "order" else [], rate_of_tf1, notes)
    family: Any = registry.family_of(target.inner)
    if trained and not family._is_built:
        # A wrapper also builds its own variables. Keras's own wrappers around legacy optimizers have no `build`.
        build = getattr(optimizer if target.is_wrapped else family, "build", family.build)
        build(trained)
    if getattr(target.inner, "use_ema", False):
        # An average that was not saved starts at its variable's value.
        new = {id(variable): value for variable, value in weights}
        slots = [*(("average", each, new.get(id(each), np.asarray(each))) for each in trained), *slots]
    places = _places(file, target, kind, slots, notes)
    if steps is not None:
        places.append((target.iterations(), micro_steps))
    if product is not None and target.nadam_product() is None:
        # An optimizer that trains nothing is not built.
        notes.lost.append(f"Nadam's product of momenta ({product:g})")
    elif product is not None:
        places.append((target.nadam_product(), product))
    scale = _scale(saved, target, notes)
    places += target.scale_places(scale)
    notes.unset += target.remaining([variable for variable, _ in places])
    rate = None if target.has_schedule else saved.learning_rate
    rate_is_variable = hasattr(target.learning_rate(), "assign")
    if rate is not None and rate_is_variable:
        places.append((target.learning_rate(), rate))
    values.assign(
        [*weights, *((place, values.fitting(file, matching.name_of(place), value, place)) for place, value in places)]
    )
    if rate is not None and not rate_is_variable:
        target.inner.learning_rate = rate
    if steps is not None and hasattr(target.inner, "_u_product_counter"):
        # In eager mode, tf_keras's Nadam compares this number with `iterations` to update its product once per step.
        target.inner._u_product_counter = steps + 1
    return Restored(steps, scale.get("loss_scale"), scale.get("dynamic_counter"), notes.all())


def _target(argument: str, optimizer: Any) -> Target:
    target = target_of(optimizer)
    if target is None:
        raise TypeError(
            f"`{argument}` must be an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy"
            f"{', or a path' if argument == 'source' else ''}, but got: {optimizer!r}. For an optimizer from "
            "tf.compat.v1.train, use tf.compat.v1.train.Saver(tf_lossscale.migrate.saver_names(path))."
        )
    return target


def _given(variables: Any) -> Any:
    """Return variables as a list, and leave a model, and a dict of models and variables, as they are."""
    if isinstance(variables, Mapping):
        return dict(variables)
    if hasattr(variables, "assign"):
        return [variables]
    is_model = hasattr(variables, "weights") or hasattr(variables, "variables")
    is_several = isinstance(variables, (list, tuple)) or (not is_model and isinstance(variables, Iterable))
    # A variable that a list contains twice counts once.
    return matching.variables_in(list(variables)) if is_several else variables


def _chosen(file: File, name: str | None) -> Optimizer:
    named = [optimizer for optimizer in file.optimizers if name is None or optimizer.path == name]
    if len(named) == 1:
        return named[0]
    if not file.optimizers:
        raise FileError(f"{file.path}: the file has no optimizer, only {len(file.variables)} variables.")
    names = ", ".join(optimizer.path or "(the root)" for optimizer in file.optimizers)
    raise FileError(f"{file.path}: the file has the optimizers {names}. Pass one of these as `name`.")


def _class_of(file: File, saved: Optimizer, inner: Any) -> str:
    kind = slot_names.known_class(inner)
    if kind is None:
        supported = ", ".join(slot_names.ATTRIBUTES)
        raise FileError(f"{file.path}: cannot restore state into {type(inner).__name__}, only into {supported}.")
    given, slots, needed = type(inner).__name__, set(slot_names.canonical(kind, saved.slots)), slot_names.required(kind)
    fits = saved.name in (None, given, kind) or {saved.name, kind} == {"Adam", "AdamW"}
    if not fits or (slots and not needed <= slots):
        there, needed_there = (", ".join(sorted(each)) or "none" for each in (slots, needed))
        raise FileError(
            f"{file.path}: {saved.path or 'the optimizer'} is of class {saved.name or '(unknown)'}, but the given "
            f"optimizer is {given}. The slots in the file are {there}, and {given} needs {needed_there}. Create an "
            "optimizer of the same class as the one in the file."
        )
    return kind


def _slots(
    file: File, saved: Optimizer, kind: str, pairs: list[Any], in_order: list[Any], rate: float, notes: Notes
) -> list[tuple[str, Any, Any]]:
    """Return (slot name, user's variable, value) for each slot in the file that belongs to a restored variable.

    The slots whose variables the file does not tell belong to `in_order`, the user's variables in their order.
    """
    variable_of = {tensor.path: variable for tensor, variable in pairs}
    tensor_of = {id(variable): tensor for tensor, variable in pairs}
    ordered = [tensor_of.get(id(variable)) for variable in in_order]
    found, unknown, by_order = [], [], []
    for name, slots in saved.slots.items():
        if name not in slot_names.ATTRIBUTES[kind]:
            notes.lost.append(f"the slots {name}")
            continue
        fits = [slot.tensor.shape for slot in slots] == [each.shape for each in ordered if each]
        owners = [slot.owner or other for slot, other in zip(slots, ordered if fits else [None] * len(slots))]
        for (tensor, named), owner in zip(slots, owners):
            if owner is None:
                unknown.append(tensor.name)
            elif owner.path not in variable_of:
                notes.lost.append(f"the slots of {owner.path}")
            elif owners.count(owner) > 1 or owner.shape != tensor.shape:
                raise FileError(
                    f"{file.path}: {owner.path} {owner.shape} has {owners.count(owner)} slots {name}, one of which is "
                    f"{tensor.path} {tensor.shape}. Use another copy of the file."
                )
            else:
                variable = variable_of[owner.path]
                value = values.fitting(file, tensor.path, tensor.value(), variable, notes)
                if saved.of_tf1 and kind == "SGD":
                    # TensorFlow 1's momentum slot is a sum of gradients; each step subtracts the learning rate times
                    # this sum from the variable. Keras's momentum slot is a sum of gradients that are already
                    # multiplied by the negative learning rate.
                    value = np.float32(-rate) * value
                found.append((name, variable, value))
                by_order += [] if named else [f"{tensor.name} -> {owner.path}"]
    notes.lost = list(dict.fromkeys(notes.lost))
    if by_order:
        notes.texts.append(f"These slots were matched by order, as asked: {', '.join(by_order)}.")
    if unknown:
        notes.texts.append(
            "The file does not say which variables these slots belong to, so they are not restored: "
            f"{', '.join(unknown)}. If `variables` is in the order of the old optimizer's build(), pass match='order'."
        )
    return found


def _places(
    file: File, target: Target, kind: str, slots: list[tuple[str, Any, Any]], notes: Notes
) -> list[tuple[Any, Any]]:
    """Return (optimizer variable, new value) pairs for the slots."""
    there = {slot: target.slots(slot, attribute) for slot, attribute in slot_names.ATTRIBUTES[kind].items()}
    places: dict[int, tuple[Any, Any]] = {}
    missing: dict[str, None] = {}
    for slot, variable, value in slots:
        key = target.key(variable)
        if key is None and not getattr(variable, "trainable", True):
            missing[f"the slots of {matching.name_of(variable)}, which is not trained"] = None
            continue
        if key is None:
            raise FileError(
                f"{file.path}: the given {type(target.inner).__name__} was not built for all of `variables`. Restore "
                "into a new optimizer, or pass the variables that this one was built for."
            )
        place = there[slot].get(key)
        if place is None:
            missing[f"the slots {slot}"] = None
        else:
            places[id(place)] = place, value
    notes.lost += missing
    return list(places.values())


def _steps(file: File, saved: Optimizer, target: Target, notes: Notes) -> int | None:
    """Return the saved step count. Compute it from the powers of the betas if the file contains them."""
    if "beta1_power" in saved.powers:
        betas = (target.number("beta_1"), target.number("beta_2"))
        steps, is_exact = slot_names.steps_of_powers(saved.powers, betas)
        if steps is not None and not is_exact and (saved.iterations or 0) < steps:
            notes.texts.append(
                f"The file does not hold the step count, and beta1_power and beta2_power are too small to compute it. "
                f"The optimizer continues from step {steps}, which gives the same steps with a constant learning "
                "rate. For a learning rate schedule, assign the true step count to `optimizer.iterations`."
            )
            return steps
        if is_exact:
            return steps
    if saved.of_tf1 and saved.name == "Adam" and saved.iterations is None:
        raise FileError(
            f"{file.path}: the file has several Adam optimizers, each with a beta1_power, but does not say which "
            "beta1_power belongs to which optimizer. Save each optimizer's variables in a separate file."
        )
    return saved.iterations


def _micro_steps(saved: Optimizer, steps: int, target: Target, notes: Notes) -> int:
    """Return the new value of the optimizer's step count. In Keras 3, it counts the micro-steps of an accumulation."""
    if "gradient_accumulator" not in saved.slots:
        return steps * target.micro_steps
    there = saved.hyperparameters.get("gradient_accumulation_steps")
    if there is None or not there >= 1:
        notes.texts.append(
            f"The file counts {steps} micro-steps, but does not say how many of them make a step. With the "
            f"optimizer's own value, {target.micro_steps}, these are {steps // target.micro_steps} steps."
        )
    elif there != target.micro_steps:
        del saved.slots["gradient_accumulator"]
        notes.lost.append(f"the slots gradient_accumulator of {steps % there:g} micro-steps")
        return int(steps // there) * target.micro_steps
    return steps


def _nadam_product(file: File, saved: Optimizer, steps: int, target: Target, notes: Notes) -> float:
    """Return the saved product of momenta, or compute it if the optimizers have different momentum schedules."""
    has_schedule_of_target = saved.slots_are_lists == target.slots_are_lists
    if saved.nadam_product is None or not has_schedule_of_target:
        if has_schedule_of_target:
            notes.texts.append(
                "The file does not contain Nadam's product of momenta. It is computed from the step count, which may "
                "include skipped steps."
            )
        # Only legacy optimizers have a decay of the momentum schedule. In newer ones, it is always 1.
        return slot_names.nadam_product(target.number("beta_1"), steps, getattr(target.inner, "_initial_decay", 1.0))
    if not 0 <= saved.nadam_product <= 1:
        raise FileError(
            f"{file.path}: Nadam's product of momenta must be a number from 0 to 1, but is {saved.nadam_product:g}."
        )
    return saved.nadam_product


def _scale(saved: Optimizer, target: Target, notes: Notes) -> dict[str, Any]:
    """Return the new values of the loss scale and its counts."""
    here, places, state = target.scale(), target.scale_variables(), saved.scale_state
    if saved.scale_is_fixed and not places and here is not None and state.get("loss_scale") == here:
        state = {key: value for key, value in state.items() if key != "loss_scale"}
        notes.lost += _named(state)
        return {}
    known = {} if saved.scale_is_fixed else {key: value for key, value in state.items() if key in places}
    lost = _named({key: value for key, value in state.items() if key not in known})
    notes.lost += [f"a fixed loss scale ({', '.join(lost) or 'without its value'})"] if saved.scale_is_fixed else lost
    if "loss_scale" in known and not (known["loss_scale"] > 0 and math.isfinite(np.float32(known["loss_scale"]))):
        # A loss scale that has reached infinity or 0 must not stop the restored optimizer as well.
        notes.texts.append(
            f"The saved loss scale is {known.pop('loss_scale'):g}, but must be a finite float32 number above 0. "
            f"The loss scale stays at {here:g}."
        )
    if not known:
        notes.unset += [] if here is None else [f"the loss scale ({here:g})"]
        return {}
    # An optimizer that does not count overflows has counted none.
    notes.unset += [] if "dynamic_counter" in known else ["the counter of the loss scale"]
    return known if "bad_steps" in known or "bad_steps" not in places else {**known, "bad_steps": 0}


def _named(state: Mapping[str, float]) -> list[str]:
    """Return the values of a loss scale with their names, without counts of 0."""
    return [f"{key}={value:g}" for key, value in state.items() if value or key == "loss_scale"]
