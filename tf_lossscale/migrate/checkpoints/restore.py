"""Restores the saved state of an optimizer, from any library or version, into a current optimizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_lossscale.families import registry as families
from tf_lossscale.migrate.checkpoints import matching
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.read import read
from tf_lossscale.migrate.checkpoints.saved import File, Optimizer
from tf_lossscale.migrate.checkpoints.targets import Target, target_of

if TYPE_CHECKING:
    from tf_lossscale.types import Optimizer as AnyOptimizer
    from tf_lossscale.types import Variable


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
        notes: the reasons why the next steps will differ numerically from the steps of the saved optimizer.
    """

    iterations: int | None
    loss_scale: float | None
    dynamic_counter: int | None
    notes: tuple[str, ...]


def restore(
    checkpoint_path: str | os.PathLike[str],
    optimizer: AnyOptimizer,
    variables: Iterable[Variable] | Mapping[str, Variable],
    *,
    name: str | None = None,
) -> Restored:
    """Restore variables, and the state of their optimizer, from a checkpoint written by another library or version.

    The slots of a TensorFlow 1, TensorFlow 2, tf_keras or Keras 3 optimizer are copied to the corresponding Keras 3 or
    tf_keras optimizer. If both optimizers are wrapped, the loss scale and its counter are copied to the wrapper. If the
    file does not match the optimizer or the variables, an error is raised and nothing changes.

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
        checkpoint_path: any file that `tf-lossscale inspect` reads: the prefix of a checkpoint from
            `tf.train.Checkpoint` or `tf.compat.v1.train.Saver`, a folder of checkpoints, a SavedModel, or a `.keras` or
            `.h5` file.
        optimizer: an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy, with or without a
            LossScaleOptimizer around it. If it has no slots yet, they are created for the trainable `variables`.
        variables: the variables to restore, as a list or a dict. A list such as `model.variables` is matched with the
            file by name, or by order and shape if the names differ. A dict maps names, as shown by `tf-lossscale
            inspect`, to variables.
        name: the optimizer's path in the file, as `tf-lossscale inspect` shows it; required if the file contains
            several optimizers.

    Returns:
        The restored values, and notes if the next steps will differ numerically from those of the saved optimizer.

    Raises:
        FileNotFoundError: there is no file at `checkpoint_path`.
        ValueError: the file is damaged, or does not match the optimizer or the variables. The message names the part
            that is damaged or does not match.
        TypeError: the optimizer is not a Keras 3 or tf_keras optimizer.
    """
    file = read(checkpoint_path)
    return restore_from(file, _chosen(file, name), optimizer, variables)


def restore_from(file: File, saved: Optimizer, optimizer: Any, variables: Any) -> Restored:
    """Restore variables and an optimizer's state, as `restore` does, from a file that has already been read.

    Args:
        file: the result of `read`.
        saved: one of the file's optimizers.
        optimizer: the optimizer to restore into, as in `restore`.
        variables: the variables to restore, as in `restore`.

    Returns:
        The restored values, in the form that `restore` returns.

    Raises:
        ValueError: the file does not match the optimizer or the variables.
        TypeError: the optimizer is not a Keras 3 or tf_keras optimizer.
    """
    inner = optimizer
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    target = target_of(inner)
    if target is None:
        raise TypeError(
            f"`optimizer` must be an optimizer from Keras 3, tf_keras or tf_keras.optimizers.legacy, but got: "
            f"{optimizer!r}. For an optimizer from tf.compat.v1.train, use "
            "tf.compat.v1.train.Saver(tf_lossscale.migrate.saver_names(path))."
        )
    kind = _class_of(file, saved, inner)
    saved = dataclasses.replace(saved, slots=slot_names.canonical(kind, saved.slots))
    pairs = matching.pairs(file, variables)
    notes = [*matching.notes(pairs), *_notes(saved, kind, inner, target)]
    iterations = _iterations(file, saved, inner, notes)
    _check_count(file, "iterations", iterations)
    _check_count(file, "the counter", saved.counter)
    values = [(variable, tensor.value()) for tensor, variable in pairs]
    planned = _planned_slots(file, saved, kind, pairs, inner, notes)
    family: Any = families.family_of(inner)
    if not family.is_built:
        builds = family if optimizer is inner else optimizer
        # Optimizers from tf_keras.optimizers.legacy, and Keras's own wrappers around them, have no `build`.
        build = getattr(builds, "build", None) or builds._create_all_weights
        build([variable for variable, _ in values if getattr(variable, "trainable", True)])
    values += _places(file, target, inner, kind, planned, values, notes)

    # All steps that can raise an error are done before this loop, so an error leaves all variables unchanged.
    for variable, value in values:
        variable.assign(value)
    if iterations is not None:
        target.set_iterations(iterations)
    if kind == "Nadam" and iterations is not None:
        attribute, decay = target.nadam_product
        getattr(inner, attribute).assign(slot_names.nadam_product(_number(inner, "beta_1"), iterations, decay))
    if saved.learning_rate is not None:
        rate = target.learning_rate()
        # If the given optimizer has a learning rate schedule, it keeps the schedule.
        if not callable(rate) or hasattr(rate, "assign"):
            inner.learning_rate = saved.learning_rate
    scale = _set_loss_scale(optimizer, saved)
    return Restored(iterations, scale, None if scale is None else saved.counter, tuple(notes))


def _check_count(file: File, what: str, count: float | None) -> None:
    if count is not None and not 0 <= count < 2**63:
        raise ValueError(f"{file.path}: {what} must be a number of steps from 0 to 2**63 - 1, but is {count:g}.")


def _chosen(file: File, name: str | None) -> Optimizer:
    named = [each for each in file.optimizers if name is None or each.path == name]
    if len(named) == 1:
        return named[0]
    if not file.optimizers:
        raise ValueError(f"{file.path}: the file has no optimizer, only {len(file.variables)} variables.")
    names = ", ".join(each.path or "(the root)" for each in file.optimizers)
    raise ValueError(f"{file.path}: the file has the optimizers {names}. Pass one of these as `name`.")


def _class_of(file: File, saved: Optimizer, inner: Any) -> str:
    kind = next((c.__name__ for c in type(inner).__mro__ if c.__name__ in slot_names.ATTRIBUTES), None)
    if kind is None:
        supported = ", ".join(slot_names.ATTRIBUTES)
        raise ValueError(f"{file.path}: cannot restore state into {type(inner).__name__}, only into {supported}.")
    what = saved.path or "the optimizer"
    if not slot_names.fits(saved.name, kind):
        raise ValueError(
            f"{file.path}: {what} is of class {saved.name}, but the given optimizer is {type(inner).__name__}. Create "
            "an optimizer of the same class as the one in the file."
        )
    there = set(slot_names.canonical(kind, saved.slots))
    lacking = slot_names.required(kind) - there
    if lacking and there:
        raise ValueError(
            f"{file.path}: {what} has the slots {_joined(there)}, but {type(inner).__name__} also needs "
            f"{_joined(lacking)}. Create an optimizer of the same class as the one in the file."
        )
    return kind


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _planned_slots(
    file: File, saved: Optimizer, kind: str, pairs: list[Any], inner: Any, notes: list[str]
) -> list[tuple[str, Any, Any]]:
    """Return (slot name, user's variable, value) for each slot in the file that belongs to a restored variable."""
    variable_of = {tensor.path: variable for tensor, variable in pairs}
    trained = [tensor for tensor, variable in pairs if getattr(variable, "trainable", True)]
    planned = []
    by_order: dict[str, None] = {}
    for slot, each in saved.slots.items():
        if slot not in slot_names.ATTRIBUTES[kind]:
            continue
        named = [owner for _, owner in matching.with_owners(each, file, [])]
        for (tensor, owner), sure in zip(matching.with_owners(each, file, trained), named):
            if owner is None:
                raise ValueError(
                    f"{file.path}: cannot tell which variable the slot {tensor.path} {tensor.shape} belongs to. Pass "
                    "all variables that the optimizer trained, in the order in which they were passed to its build()."
                )
            if owner.path not in variable_of:
                continue
            variable = variable_of[owner.path]
            if tensor.shape != tuple(variable.shape):
                raise ValueError(
                    f"{file.path}: the slot {tensor.path} has shape {tensor.shape}, but "
                    f"{matching.name_of(variable)} has {tuple(variable.shape)}."
                )
            value = tensor.value()
            if saved.of_tf1 and kind == "SGD":
                # TensorFlow 1's momentum slot is a sum of gradients; each step subtracts the learning rate times this
                # sum from the variable. Keras's momentum slot is a sum of gradients that are already multiplied by the
                # negative learning rate.
                value = np.float32(-_learning_rate_now(inner)) * value
            planned.append((slot, variable, value))
            if sure is None and [other.shape for other in trained].count(tensor.shape) > 1:
                by_order[matching.name_of(variable)] = None
    if by_order:
        notes.append(
            "The file does not say which variables the slots belong to. They were matched with `variables` in the "
            f"order of the optimizer's build(): {', '.join(by_order)}."
        )
    return planned


def _places(
    file: File, target: Target, inner: Any, kind: str, planned: list[Any], values: list[Any], notes: list[str]
) -> list[tuple[Any, Any]]:
    """Return (optimizer variable, new value) pairs for all slots and for the moving averages of the variables."""
    places, missing = [], set()
    try:
        for slot, variable, value in planned:
            place = target.slot(variable, slot, slot_names.ATTRIBUTES[kind][slot])
            if place is None:
                missing.add(slot)
            else:
                places.append((place, value))
        if getattr(inner, "use_ema", False):
            for variable, value in values:
                if getattr(variable, "trainable", True):
                    places.append((target.slot(variable, "", "_model_variables_moving_average"), value))
    except KeyError as error:
        raise ValueError(
            f"{file.path}: the given {type(inner).__name__} was not built for all of `variables`. Restore into a new "
            "optimizer, or pass the variables that this one was built for."
        ) from error
    if missing:
        notes.append(
            f"{type(inner).__name__} has no slots for the file's {', '.join(sorted(missing))}. Create it with the "
            "arguments that the saved one had (momentum, centered, amsgrad)."
        )
    return places


def _iterations(file: File, saved: Optimizer, inner: Any, notes: list[str]) -> int | None:
    if "beta1_power" in saved.powers:
        betas = (float(_number(inner, "beta_1")), float(_number(inner, "beta_2")))
        steps = slot_names.steps_of_powers(saved.powers, betas)
        if steps is not None:
            return steps
        fewest = slot_names.fewest_steps(saved.powers, betas)
        if fewest is not None and (saved.iterations or 0) < fewest:
            notes.append(
                f"The file does not hold the step count, and beta1_power and beta2_power are too small to compute it. "
                f"The optimizer continues from step {fewest}, which gives the same steps with a constant learning "
                "rate. For a learning rate schedule, assign the true step count to `optimizer.iterations`."
            )
            return fewest
    if saved.of_tf1 and saved.name == "Adam" and saved.iterations is None:
        raise ValueError(
            f"{file.path}: the file has several Adam optimizers, each with a beta1_power, but does not say which "
            "beta1_power belongs to which optimizer. Save each optimizer's variables in a separate file."
        )
    return saved.iterations


def _notes(saved: Optimizer, kind: str, inner: Any, target: Target) -> list[str]:
    notes = []
    old, new = not saved.slots_are_lists, target.slots_are_lists
    other = not saved.of_tf1 and old == new
    momentum = saved.hyperparameters.get("momentum") or "momentum" in saved.slots
    same = kind == "RMSprop" and momentum
    if other and not same and kind in slot_names.DIFFERENCES:
        notes.append(slot_names.DIFFERENCES[kind])
    if old and new and saved.hyperparameters.get("decay"):
        notes.append(
            f"The file's learning rate decays, with decay={saved.hyperparameters['decay']:g}. Pass the optimizer the "
            f"schedule InverseTimeDecay({saved.learning_rate:g}, 1, {saved.hyperparameters['decay']:g})."
        )
    for name, value in saved.hyperparameters.items():
        here = None if old and name == "weight_decay" else _number(inner, name)
        if (
            isinstance(here, (int, float))
            and name not in ("decay", "ema_momentum")
            and not np.isclose(here, value, 1e-6)
        ):
            notes.append(
                f"The file was written with {name}={value:g}, but the optimizer keeps its own value, {here:g}."
            )
    return notes


def _number(inner: Any, name: str) -> Any:
    value = getattr(inner, name, None)
    return value if value is None or not hasattr(value, "numpy") else value.numpy().item()


def _learning_rate_now(inner: Any) -> float:
    rate = inner.learning_rate
    return float(rate(inner.iterations) if callable(rate) and not hasattr(rate, "numpy") else rate)


def _set_loss_scale(optimizer: Any, saved: Optimizer) -> float | None:
    """Set the loss scale and its counter, and return the scale.

    If the file or the optimizer has no loss scale, change nothing and return None.
    """
    if saved.scale is None:
        return None
    state: Any = getattr(optimizer, "_loss_scale", None)
    # The counter is called `good_steps` in this package, and `counter` in tf_keras.
    for counter in ("good_steps", "counter"):
        if hasattr(state, "current_loss_scale") and hasattr(state, counter):
            state.current_loss_scale.assign(saved.scale)
            getattr(state, counter).assign(saved.counter or 0)
            return float(state.current_loss_scale.numpy())
    if hasattr(optimizer, "dynamic_scale"):
        optimizer.dynamic_scale.assign(saved.scale)
        optimizer.step_counter.assign(saved.counter or 0)
        return saved.scale
    return None
