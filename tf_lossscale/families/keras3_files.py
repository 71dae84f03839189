"""The values of a Keras 3 wrapper in `.keras` files and in checkpoints of Keras's own LossScaleOptimizer."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.libraries import keras_versions

keras: Any = keras_versions.keras_3()


def save(wrapper: Any, store: Any) -> None:
    """Write the values of a wrapper into a `.keras` file, in the order of Keras's own LossScaleOptimizer.

    Each of the two classes can therefore read the other's files. Keras writes an unused step count as the first value;
    this package stores the number of overflows that count towards the hysteresis there.
    """
    rule: Any = wrapper.scaler
    good, bad = (rule.good_steps, rule.bad_steps) if wrapper.dynamic else (0, 0)
    # Keras's class has a learning rate of its own, which is always 0.
    before = [0 if bad is None else bad, 0.0, good, rule._saved_scale()]
    values = [*before, *wrapper.weights, *_variables_of_own_rule(rule)]
    for i, value in enumerate(values):
        store[str(i)] = keras.ops.convert_to_numpy(value)


def load(wrapper: Any, store: Any) -> None:
    """Read the values that `save`, Keras's own LossScaleOptimizer or a plain optimizer wrote."""
    values = [store[str(i)] for i in range(len(store.keys()))]
    inner: list[Any] = wrapper.weights
    of_scale: list[tuple[Any, Any]] = []
    rule: list[Any] = []
    if _are_of_a_wrapper(values) and not same_shapes(values, inner):
        if wrapper.dynamic:
            of_scale.append((wrapper.scaler.good_steps, int(values[2][()])))
            of_scale.append((wrapper.scaler.current_loss_scale, float(values[3][()])))
            if wrapper.scaler.bad_steps is not None:
                of_scale.append((wrapper.scaler.bad_steps, int(values[0][()])))
        values, of_rule = values[4:], values[4 + len(inner) :]
        rule = _variables_of_own_rule(wrapper.scaler)
        if rule and same_shapes(of_rule, rule):
            of_scale += zip(rule, of_rule)
            values = values[: len(inner)]
        elif wrapper.built and same_shapes(values[: len(inner)], inner):
            if rule or of_rule:
                _warn_of_other_rule(wrapper.scaler, rule, of_rule)
            values = values[: len(inner)]
    if len(values) > len(inner) and not wrapper.built:
        # Without the slots, a step count would make Adam's first steps too small.
        logging.warning(
            "%s is not built, so the saved step count, learning rate and slots are not loaded%s. Build the "
            "optimizer before loading.",
            type(wrapper._optimizer).__name__,
            ", but the loss scale is" if of_scale else ", nor is the state of the loss scale" if rule else "",
        )
        inner = values = []
    inner = inner[: len(values)] if _are_unbuilt(values) else inner
    # The saved optimizer and this one have different numbers of variables if, for example, a layer was frozen after
    # the optimizer was saved. Keras logs a warning in this case, too.
    if len(values) != len(inner):
        warn_of_other_variables(wrapper._optimizer, len(values), bool(of_scale))
        inner = values = []
    for variable, value in [*zip(inner, values), *of_scale]:
        variable.assign(value)


def _are_unbuilt(values: list[Any]) -> bool:
    """Return whether an optimizer without slots saved these values: a step count of 0, and a learning rate if any."""
    return len(values) in (1, 2) and all(value.shape == () for value in values) and values[0][()] == 0


def note_checkpoint(wrapper: Any, path: str) -> None:
    """Record which optimizers a checkpoint contains, before TensorFlow restores a part of it.

    TensorFlow does not say which part of the checkpoint belongs to this optimizer.
    """
    wrapped, others = _optimizers_in(path)
    wrapper.__dict__.update(_keras_wrote=bool(wrapped and not others), _ambiguous=bool(wrapped and others))


def dependency(wrapper: Any, name: str, *args: Any) -> Any:
    """Return the object that receives the values of the child `name` in a checkpoint."""
    if vars(wrapper).get("_keras_wrote"):
        return _part_of_keras_wrapper(wrapper, name)
    found = wrapper._optimizer._lookup_dependency(name, *args)
    older = "_keras_wrote" not in vars(wrapper)
    if found is None and name == "inner_optimizer" and (older or wrapper._ambiguous):
        cause = f"TensorFlow {tf.__version__} is used" if older else "the checkpoint also contains other optimizers"
        raise ValueError(
            "keras.optimizers.LossScaleOptimizer wrote this optimizer's part of the checkpoint. It cannot be "
            f"restored with tf.train.Checkpoint, because {cause}. Nothing was restored. Restore it with "
            "tf_lossscale.migrate.restore(path, optimizer, variables, name=...)"
            + (", or use TensorFlow 2.17 or newer." if older else ".")
        )
    return found


def _variables_of_own_rule(loss_scale: Any) -> list[Any]:
    """Return the variables of a user's loss scale that this package's loss scales do not have."""
    known = [loss_scale._saved_scale(), *loss_scale._counters().values()]
    return [variable for variable in loss_scale.variables if not any(variable is other for other in known)]


def _optimizers_in(path: str) -> tuple[set[str], set[str]]:
    """Return the paths, in a checkpoint, of Keras's own LossScaleOptimizers and of other optimizers outside them."""
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    names = {f"/{name[: -len(suffix)]}" for name, _ in tf.train.list_variables(path) if name.endswith(suffix)}
    optimizers = {name.removesuffix("_iterations") for name in names if name.endswith("/_iterations")}
    wrappers = {
        optimizer for optimizer in optimizers if {f"{optimizer}dynamic_scale", f"{optimizer}step_counter"} <= names
    }
    inside = tuple(f"{wrapper}inner_optimizer/" for wrapper in wrappers)
    return wrappers, {each for each in optimizers - wrappers if not each.startswith(inside)}


# Checkpoints of Keras's LossScaleOptimizer contain values for which this package's wrapper may have no variable. This
# dict maps the names of these values to their dtypes. This package's wrapper never has variables for the first two
# values. If its scale is fixed, it has none for the last two either.
_DTYPES_IN_KERAS = {
    "_iterations": tf.int64,
    "_learning_rate": tf.float32,
    "dynamic_scale": tf.float32,
    "step_counter": tf.int64,
}


def _part_of_keras_wrapper(wrapper: Any, name: str) -> Any:
    """Return the object that receives the values of the child `name` in a checkpoint of Keras's LossScaleOptimizer."""
    parts = {"inner_optimizer": wrapper._optimizer}
    if wrapper.dynamic:
        parts["dynamic_scale"] = wrapper.scaler._lookup_dependency("current_loss_scale")
        parts["step_counter"] = wrapper.scaler.good_steps
    if name not in parts:
        dtype = _DTYPES_IN_KERAS.get(name)
        with tf.init_scope():
            parts[name] = (
                tf.__internal__.tracking.AutoTrackable()
                if dtype is None
                else tf.Variable(tf.zeros([], dtype), trainable=False)
            )
        # TensorFlow keeps only a weak reference to an object that it is restoring, so the wrapper keeps a strong one.
        wrapper.__dict__.setdefault("_meaningless", {})[name] = parts[name]
    return parts[name]


def name_of(value: Any) -> str | None:
    """Return the last part of the name of a variable or of a value in an .h5 file, or None if it has no name.

    The number by which Keras tells variables apart that were made without a name is left out.
    """
    name = getattr(value, "name", None)
    return name and re.sub(r"\Avariable_\d+\Z", "variable", name.rpartition("/")[2])


def same_shapes(values: list[Any], variables: list[Any]) -> bool:
    """Return whether values have the shapes of variables, one by one."""
    return [tuple(value.shape) for value in values] == [tuple(variable.shape) for variable in variables]


def warn_of_other_variables(inner: Any, saved: int, with_scale: bool) -> None:
    """Warn that a file has values for other variables than the inner optimizer's."""
    logging.warning(
        "The saved optimizer has %d variables, and this %s has %d, of other names or shapes, because other variables "
        "were trained, or because the saved loss scale had variables of its own. The saved variables are not loaded%s.",
        *(saved, type(inner).__name__, len(inner.variables)),
        ", but the loss scale is" if with_scale else "",
    )


def _warn_of_other_rule(loss_scale: Any, rule: list[Any], saved: list[Any]) -> None:
    own, others = ([tuple(each.shape) for each in some] for some in (rule, saved))
    logging.warning(
        "The state of the loss scale %s is not loaded: its own variables have the shapes %s, but the file has %s after "
        "the inner optimizer's values.",
        *(type(loss_scale).__name__, own, f"values of the shapes {others}" if others else "nothing"),
    )


def _are_of_a_wrapper(values: list[Any]) -> bool:
    """Return whether the values were saved by a loss scale wrapper: this package's or Keras's own.

    The first four values that such a wrapper saves are scalars, and the second of them is 0.
    """
    return len(values) >= 4 and all(value.shape == () for value in values[:4]) and values[1][()] == 0
