"""Converts checkpoints and models with an old optimizer into checkpoints with a current optimizer."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
import secrets
import shutil
from typing import Any

import numpy as np

from tf_lossscale import LossScaleOptimizer, errors
from tf_lossscale.migrate.checkpoints import matching, slots
from tf_lossscale.migrate.checkpoints.read import read
from tf_lossscale.migrate.checkpoints.restore import Restored, restore_from
from tf_lossscale.migrate.checkpoints.saved import File, Optimizer
from tf_lossscale.wrapper import families
from tf_lossscale.writing import checkpoint_errors_are_os_errors, name_latest_checkpoint

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# A placeholder for the value of an optimizer argument that is missing from the file to convert.
_UNKNOWN = object()
_SAVED_AS = {"learning_rate": "schedule", "initial_scale": "loss scale"}


@dataclasses.dataclass(frozen=True)
class Converted:
    """Describes one converted optimizer: how to construct it, and the values that were restored into it."""

    #: The optimizer's path in the new checkpoint.
    path: str
    #: The Python code that constructs the optimizer.
    construct: str
    #: The paths of the trained variables, in the order in which they must be passed to the new optimizer's `build`.
    variables: tuple[str, ...]
    restored: Restored


def convert(
    path: str | os.PathLike[str], to: str, out: str | os.PathLike[str], learning_rate: float | None = None
) -> list[Converted]:
    """Convert a file to a `tf.train.Checkpoint` with the same variables and with Keras 3 or tf_keras optimizers.

    >>> import tempfile, tensorflow as tf, tf_keras
    >>> weight = tf.Variable([1.0], name="weight")
    >>> old = LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.1), initial_scale=64)
    >>> _ = old.minimize(lambda: tf.reduce_sum(weight**2), [weight])
    >>> folder = tempfile.mkdtemp()
    >>> prefix = tf.train.Checkpoint(optimizer=old, weight=weight).write(folder + "/old")
    >>> (converted,) = convert(prefix, "keras3", folder + "/new")
    >>> new = LossScaleOptimizer(tf.keras.optimizers.Adam(0.1))
    >>> checkpoint = tf.train.Checkpoint(optimizer=new, weight=weight)
    >>> new.build([weight])
    >>> _ = checkpoint.read(tf.train.latest_checkpoint(folder + "/new")).assert_consumed()
    >>> int(new.iterations), float(new.loss_scale)
    (1, 64.0)

    Args:
        path: a checkpoint or saved model of any kind that `read` accepts.
        to: the library of the new optimizers, `"keras3"` or `"tf_keras"`.
        out: the folder to write the checkpoint to. If it exists, it must be empty.
        learning_rate: the learning rate of the new optimizers. If None, it is read from the file. It is required for
            TensorFlow 1 optimizers, whose files do not contain it.

    Returns:
        A `Converted` object for each optimizer in the file.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        FileNotFoundError: there is no file at `path`.
        OSError: the checkpoint cannot be written to `out`; nothing was changed.
        ValueError: the file is damaged or has no optimizer; an optimizer has no equivalent in the new library;
            `learning_rate` is not a finite number above 0, or is None although the file has a TensorFlow 1 optimizer.
    """
    if learning_rate is not None:
        errors.positive_number("learning_rate", learning_rate, "Pass the learning rate with which training continues.")
    folder = pathlib.Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: this path is not an empty folder. Pass an empty folder or a new path.")
    file = read(path)
    if not file.optimizers:
        raise ValueError(f"{file.path}: the file has no optimizer, only {len(file.variables)} variables.")
    wrapper: Any = families.wrapper_class_in(to)
    family = wrapper._family_class
    parts, converted = _parts(file, family, learning_rate)
    try:
        _write(folder, _tree(file, parts, family))
    except OSError as error:
        raise OSError(f"{folder}: cannot write a checkpoint to this path ({error}). Nothing was changed.") from error
    return converted


def _parts(file: File, family: Any, learning_rate: float | None) -> tuple[dict[str, Any], list[Converted]]:
    """Return a dict that maps paths to variables or new optimizers, and the list of `Converted` objects."""
    import tensorflow as tf

    parts: dict[str, Any] = {}
    for tensor in [*file.variables, *file.others]:
        parts[tensor.path] = tf.Variable(tensor.value(), trainable=False, name=tensor.name)
    converted = []
    for saved in file.optimizers:
        if learning_rate is not None:
            saved.learning_rate = learning_rate
        options = _known_options(saved)
        inner, construct = _optimizer(file, saved, options, family)
        # Wrap the new optimizer only if the file contains a dynamic loss scale.
        optimizer = LossScaleOptimizer(inner) if saved.counter is not None and not saved.scale_is_fixed else inner
        names = _trained(file, saved)
        if not options.get("momentum"):
            # tf_keras's SGD and TensorFlow 1's RMSProp create momentum slots even if the momentum is 0. The new
            # optimizer does not need such slots.
            saved.slots.pop("momentum", None)
        trained = {name: tf.Variable(parts[name], name=parts[name].name.partition(":")[0]) for name in names}
        restored = restore_from(file, saved, optimizer, trained)
        restored = dataclasses.replace(restored, notes=(*restored.notes, *_notes(saved, options, family.optimizers)))
        parts.update(trained)
        path = saved.path if file.objects or len(file.optimizers) > 1 else ""
        path = path or "optimizer"
        parts[path] = optimizer
        converted.append(Converted(path, construct, tuple(trained), restored))
    return parts, converted


def _optimizer(file: File, saved: Optimizer, options: dict[str, Any], family: Any) -> tuple[Any, str]:
    """Return an optimizer from the new library with the saved options, and the code that constructs it."""
    library = family.optimizers
    # The class name is read from an untrusted file, so only known optimizer classes are called.
    cls = getattr(library, saved.name, None) if saved.name in slots.ATTRIBUTES else None
    if cls is None:
        part = saved.path or "the optimizer"
        why = f"{part} is of class {saved.name!r}, which is not one of {', '.join(slots.ATTRIBUTES)}"
        if not saved.name:
            why = (
                f"the file does not name the class of {part}. Construct the optimizer in code, and call "
                "tf_lossscale.migrate.restore"
            )
        raise ValueError(f"{file.path}: the optimizer cannot be converted, because {why}.")
    if saved.learning_rate is None and saved.of_tf1:
        raise ValueError(
            f"{file.path}: the file does not contain the learning rate, and the new checkpoint needs it. Pass it as "
            "--learning-rate."
        )
    taken = inspect.signature(cls).parameters
    # In older files, `weight_decay` is an option of TensorFlow Addons. It is not copied, because current optimizers
    # multiply it by the learning rate and TensorFlow Addons does not.
    unlike = set() if saved.slots_are_lists else {"weight_decay"}
    options = {name: value for name, value in options.items() if name in taken and name not in unlike}
    for name, value in options.items():
        if isinstance(value, (int, float)) and abs(value) > _FLOAT32_MAX:
            raise ValueError(
                f"{file.path}: {name} is {value:g}, which is too large for a float32. Use another copy of the file."
            )
    code = f"{family.optimizers_name}.{saved.name}({_shown(options)})"
    if options["learning_rate"] is _UNKNOWN:
        # The saved optimizer had a learning rate schedule, which is not read from the file. Any schedule gives the
        # same checkpoint, because an optimizer with a schedule has no variable for the learning rate.
        options["learning_rate"] = library.schedules.ExponentialDecay(1.0, 1, 1.0)
    if options.get("momentum") is _UNKNOWN:
        # Any nonzero momentum makes the optimizer create its momentum slots.
        options["momentum"] = 0.9
    return cls(**options), _in_wrapper(code, saved)


def _known_options(saved: Optimizer) -> dict[str, Any]:
    """Return the arguments of the inner optimizer that are in the file or can be inferred from the saved slots."""
    rate = _UNKNOWN if saved.learning_rate is None else saved.learning_rate
    options: dict[str, Any] = {"learning_rate": rate, **saved.hyperparameters}
    if not options.get("use_ema"):
        # Without `use_ema`, an optimizer ignores `ema_momentum` and the other options whose names contain "ema".
        options = {name: value for name, value in options.items() if "ema" not in name}
    options |= {slots.OPTIONAL[slot]: True for slot in ("vhat", "mg") if slot in saved.slots}
    moved = any(np.any(slot.tensor.value()) for slot in saved.slots.get("momentum", ()))
    if moved and "momentum" not in options:
        options["momentum"] = _UNKNOWN
    return options


def _in_wrapper(code: str, saved: Optimizer) -> str:
    """If the saved optimizer was wrapped, return `code` inside a call that wraps it with the saved arguments. Otherwise
    return `code`."""
    if saved.wrapper is None:
        return code
    usual = {"dynamic": True, "initial_scale": 2.0**15, "dynamic_growth_steps": 2000}
    given = {name: value for name, value in saved.wrapper_arguments.items() if usual.get(name) != value}
    if saved.scale_is_fixed:
        given = {"dynamic": False, "initial_scale": _UNKNOWN if saved.scale is None else saved.scale}
    return f"tf_lossscale.LossScaleOptimizer({code}{', ' if given else ''}{_shown(given)})"


def _shown(arguments: dict[str, Any]) -> str:
    """Return arguments as code, with float32 numbers in short form: 0.1, not 0.10000000149."""
    shown = {
        name: f"<its {_SAVED_AS.get(name, name)}>"
        if value is _UNKNOWN
        else repr(float(f"{value:.7g}") if isinstance(value, float) else value)
        for name, value in arguments.items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _notes(saved: Optimizer, options: dict[str, Any], library: Any) -> list[str]:
    """Return notes on settings of the saved optimizer that the file does not contain."""
    notes = []
    changes = saved.wrapper is not None and not saved.scale_is_fixed
    if changes and saved.counter is None:
        notes.append("The file does not hold the loss scale. It starts again from the initial scale.")
    if not saved.has_config:
        by_slots = {"amsgrad", "centered", "momentum"} if saved.iterations else set()
        taken = {name: inspect.signature(getattr(library, name)).parameters for name in slots.ATTRIBUTES}
        in_file = {*options, *by_slots, *set.intersection(*map(set, taken.values()))}
        named = [name for name in taken[str(saved.name)] if name not in in_file]
        named += ["weight_decay", "clipnorm", *(["dynamic_growth_steps"] if changes else [])]
        notes.append(
            f"The file does not hold all arguments of the optimizer ({', '.join(named)}, ...). Add those that were not "
            "at their defaults."
        )
    return notes


def _trained(file: File, saved: Optimizer) -> list[str]:
    """Return the paths of the variables that have slots, in the file's order."""
    owners = set()
    for each in saved.slots.values():
        for tensor, owner in matching.with_owners(each, file, file.ordered_variables):
            if owner is None:
                raise ValueError(
                    f"{file.path}: cannot tell which variable the slot {tensor.path} belongs to. Call "
                    "tf_lossscale.migrate.restore with the variables in the order in which they were passed to the "
                    "optimizer's build()."
                )
            owners.add(owner.path)
    return [tensor.path for tensor in file.variables if tensor.path in owners]


def _tree(file: File, parts: dict[str, Any], family: Any) -> Any:
    """Return the root object of the new checkpoint. Reproduce the object graph of the old file if it has one."""
    import tensorflow as tf

    objects = family.with_layer_names(file.objects) if file.objects else {"": {path: path for path in parts}}
    reached = {path for each in objects.values() for path in each.values()}
    objects[""] = {**objects.get("", {}), **{path: path for path in parts if path not in reached}}
    nodes = {path: tf.__internal__.tracking.AutoTrackable() for path in objects}
    for path, named in objects.items():
        for name, part in named.items():
            nodes[path]._track_trackable(parts[part] if part in parts else nodes[part], name)
    return nodes[""]


def _write(folder: pathlib.Path, root: Any) -> None:
    """Write the checkpoint to a temporary folder and rename that folder, so that `folder` never contains part of a
    checkpoint."""
    import tensorflow as tf

    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.absolute().parent / f".{folder.name}.{secrets.token_hex(4)}"
    unfinished.mkdir()
    try:
        with checkpoint_errors_are_os_errors():
            tf.train.Checkpoint(root).write(str(unfinished / "ckpt"))
        name_latest_checkpoint(unfinished, "ckpt")
        if folder.exists():
            # `rmdir` raises an error if another process has written to the folder in the meantime.
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
