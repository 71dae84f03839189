"""The names of slots in each library, and the differences between the libraries' formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Class -> slot name of TensorFlow 2's optimizers (tf_keras legacy) -> attribute in Keras 3 and tf_keras.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "SGD": {"momentum": "momentums"},
    "Adam": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
    "AdamW": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
    "Nadam": {"m": "_momentums", "v": "_velocities"},
    "Adamax": {"m": "_m", "v": "_u"},
    "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
    "Adagrad": {"accumulator": "_accumulators"},
    "Adadelta": {"accum_grad": "_accumulated_grads", "accum_var": "_accumulated_delta_vars"},
    "Ftrl": {"accumulator": "_accumulators", "linear": "_linears"},
}
# Slots that an optimizer of the class has only with some arguments.
OPTIONAL = {"SGD": {"momentum"}, "Adam": {"vhat"}, "AdamW": {"vhat"}, "RMSprop": {"momentum", "mg"}}

# Class -> suffixes of the slots in files of `tf.compat.v1.train.Saver`, in order of creation.
SAVER_SUFFIXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Adam": (("m", "v"),),
    "Momentum": (("momentum",),),
    "RMSProp": (("rms", "momentum"), ("rms", "mg", "momentum")),
    "Adagrad": (("accumulator",),),
    "Adadelta": (("accum_grad", "accum_var"),),
    "Ftrl": (("accumulator", "linear"),),
}
# Lower-case names of other optimizers with the slot names of a class above.
_OF_NO_KNOWN_CLASS = {"lion", "sgdw"}
# Class of `tf.compat.v1.train`, without "Optimizer" -> today's.
_TODAY = {"GradientDescent": "SGD", "Momentum": "SGD", "RMSProp": "RMSprop"}

# Numerical differences between the libraries, which `restore` and docs/migration.md report.
DIFFERENCES = {
    "RMSprop": (
        "RMSprop without momentum: the file's divides by sqrt(v) + epsilon, today's by sqrt(v + epsilon). Take the old "
        "epsilon squared: steps then differ by epsilon / sqrt(v), relatively."
    ),
    "Adagrad": (
        "Adagrad: the file's divides by sqrt(a) + epsilon, today's by sqrt(a + epsilon). Take the old epsilon squared: "
        "steps then differ by epsilon / sqrt(a), relatively."
    ),
    "AdamW": (
        "AdamW: TensorFlow Addons' subtracts weight_decay times the variable, today's learning_rate times that. Divide "
        "the old weight_decay by the learning rate."
    ),
    "Nadam": (
        "Nadam: today's schedule of the momentum warms up 250 times as fast, so the steps are other ones. The moments "
        "are taken over, and the product of momenta is what today's schedule makes it."
    ),
}


def of_tf1(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the slots of a `tf.compat.v1.train` optimizer to TensorFlow 2's names.

    >>> of_tf1({"accum": 1, "linear": 2})
    {'accumulator': 1, 'linear': 2}
    """
    names = {"accum": "accumulator" if "linear" in slots else "accum_grad", "accum_update": "accum_var"}
    return {names.get(name, name): each for name, each in slots.items()}


def today(name: str) -> str:
    """Return the current class that replaced an optimizer of `tf.compat.v1.train`.

    >>> today("MomentumOptimizer")
    'SGD'
    """
    name = name.removesuffix("Optimizer")
    return _TODAY.get(name, name)


def class_of(slots: set[str], others: set[str], names: Iterable[str], of_tf1: bool = False) -> str | None:
    """Return the class of an optimizer with these slots. If several classes have them, the names decide.

    >>> class_of({"m", "v"}, {"beta_1"}, ["Adamax/beta_1"])
    'Adamax'

    Args:
        slots: names of slots, as TensorFlow 2 has them.
        others: names of its other variables.
        names: names of its variables, which include the optimizer's own name.
        of_tf1: whether it is a `tf.compat.v1.train` optimizer, of which there are fewer classes.

    Returns:
        A key of `ATTRIBUTES`; None if the class is unknown.
    """
    if "momentum_cache" in others:
        return "Nadam"
    if not slots:
        # In TensorFlow 2 only SGD can have a hyperparameter `momentum` and no slots.
        return "SGD" if of_tf1 or ("momentum" in others and not others & {"rho"}) else None
    fitting = [name for name in ATTRIBUTES if required(name) <= slots <= set(ATTRIBUTES[name]) and name != "Nadam"]
    if of_tf1:
        fitting = [name for name in fitting if name not in ("AdamW", "Adamax")]
    return _told_by_names(fitting, names)


def class_of_lists(attributes: set[str], others: set[str], names: Iterable[str]) -> str | None:
    """Return the class of a Keras 3 or tf_keras optimizer with these lists of slots.

    >>> class_of_lists({"_momentums", "_velocities"}, set(), ["rmsprop"])
    'RMSprop'

    Args:
        attributes: names of its lists of variables, without the empty ones.
        others: names of its other variables.
        names: the optimizer's own name, or parts of it.

    Returns:
        A key of `ATTRIBUTES`; None if the class is unknown.
    """
    if "momentum_cache" in others:
        return "Nadam"
    fitting = [
        name
        for name, slots in ATTRIBUTES.items()
        if {slots[slot] for slot in required(name)} <= attributes <= set(slots.values()) and name != "Nadam"
    ]
    if not attributes:
        # Before its first step any optimizer lacks slots; afterwards only SGD without momentum does.
        fitting = ["SGD"] if "momentums" in others else [*ATTRIBUTES]
    return _told_by_names(fitting, names)


def _told_by_names(fitting: list[str], names: Iterable[str]) -> str | None:
    parts = {part.lower() for name in names for part in re.split(r"[/:]", name)}
    parts |= {re.sub(r"_\d+$", "", part).replace("_", "") for part in parts}
    named = {name for name in fitting if name.lower() in parts}
    if named:
        return named.pop() if len(named) == 1 else None
    return fitting[0] if len(fitting) == 1 and not parts & _OF_NO_KNOWN_CLASS else None


def required(name: str) -> set[str]:
    """Return the slots that every optimizer of a class has.

    >>> sorted(required("RMSprop"))
    ['rms']
    """
    return set(ATTRIBUTES[name]) - OPTIONAL.get(name, set())


def canonical(name: str | None, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the slots of an optimizer of this class to TensorFlow 2's names.

    >>> canonical("Adamax", {"_m": 1, "_u": 2})
    {'m': 1, 'v': 2}

    Args:
        name: a key of `ATTRIBUTES`; None to keep the names.
        slots: by TensorFlow 2's names, or by the attributes of Keras 3 and tf_keras.
    """
    back = {attribute: slot for slot, attribute in ATTRIBUTES.get(name or "", {}).items()}
    return {back.get(attribute, attribute): each for attribute, each in slots.items()}


def fits(saved: str | None, wanted: str) -> bool:
    """Return whether two classes have the same slots. An unknown class fits every class.

    >>> fits("Adam", "AdamW"), fits("Adam", "SGD"), fits(None, "SGD")
    (True, False, True)
    """
    return saved is None or saved == wanted or {saved, wanted} == {"Adam", "AdamW"}


def order_in_lists(name: str | None, family: str, config: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return the order of slots in files that hold an optimizer's variables as a list.

    >>> order_in_lists("Adam", "keras3", {}), order_in_lists("Adam", "tf_keras_legacy", {})
    ([('m', 'v')], [('m',), ('v',)])

    Args:
        name: the class.
        family: the library.
        config: the optimizer's config.

    Returns:
        Groups of slots. A file lists the slots of one group together, variable by variable. Empty for an unknown class.
    """
    there = set(required(name)) if name in ATTRIBUTES else set()
    if config.get("momentum") or (name == "SGD" and family == "tf_keras"):
        there.add("momentum")
    there |= {slot for slot, option in (("mg", "centered"), ("vhat", "amsgrad")) if config.get(option)}
    order = [slot for slot in ATTRIBUTES.get(name or "", {}) if slot in there]
    together = name == "Ftrl" if family == "tf_keras_legacy" else name != "RMSprop"
    if not together:
        return [(slot,) for slot in order]
    first = tuple(slot for slot in order if slot != "vhat")
    return [group for group in (first, ("vhat",) if "vhat" in order else ()) if group]


def steps_of_powers(powers: Mapping[str, float], betas: tuple[float, float] = (0.9, 0.999)) -> int | None:
    """Compute the number of steps that TensorFlow 1's Adam took from the powers of its betas.

    >>> steps_of_powers({"beta1_power": 0.9**8, "beta2_power": 0.999**8})
    7

    Args:
        powers: `beta1_power` and `beta2_power`.
        betas: the bases of the powers.

    Returns:
        The number; None if neither power determines it.
    """
    for power, beta in zip((powers.get("beta2_power"), powers.get("beta1_power")), reversed(betas)):
        if power is not None and 1e-35 < power < 1.0 and 0.0 < beta < 1.0:
            return round(math.log(power) / math.log(beta)) - 1
    return None


def nadam_product(beta_1: float, iterations: int, decay: float = 1.0) -> float:
    """Return the product of momenta that Nadam has after a number of steps.

    >>> round(nadam_product(0.9, 1), 3)
    0.468

    Args:
        beta_1: the optimizer's `beta_1`.
        iterations: steps taken.
        decay: 1 for Keras 3 and tf_keras; 0.004 for TensorFlow 2's, tf_keras legacy.

    Returns:
        The product, at least 0.
    """
    product = 1.0
    for step in range(1, iterations + 1):
        product *= beta_1 * (1.0 - 0.5 * 0.96 ** (decay * step))
        if product < 1e-37:
            return 0.0
    return product
