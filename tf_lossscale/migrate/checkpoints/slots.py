"""Names of the optimizers' slots in each library, and differences between the libraries' update formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Maps each class to a dict. Its keys are slot names in TensorFlow 2.0 to 2.10 and tf_keras.optimizers.legacy. Its
# values are the attributes that hold these slots in Keras 3 and tf_keras.
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
# Maps the name of each optional slot to the name of the argument that makes an optimizer create this slot.
OPTIONAL = {"momentum": "momentum", "mg": "centered", "vhat": "amsgrad"}

# Maps each optimizer class in `tf.compat.v1.train` to the possible lists of its slots. Files written by
# `tf.compat.v1.train.Saver` contain numbers instead of slot names. The numbers follow the order of these lists.
SAVER_SUFFIXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Adam": (("m", "v"),),
    "Momentum": (("momentum",),),
    "RMSProp": (("rms", "momentum"), ("rms", "mg", "momentum")),
    "Adagrad": (("accumulator",),),
    "Adadelta": (("accum_grad", "accum_var"),),
    "Ftrl": (("accumulator", "linear"),),
}
# Lower-case names of optimizers that are not supported, although their slots have the same names as the slots of an
# optimizer in `ATTRIBUTES`.
_OF_NO_KNOWN_CLASS = {"lion", "sgdw"}
# Maps classes in `tf.compat.v1.train`, without the suffix "Optimizer", to the current classes that replaced them.
_TODAY = {"GradientDescent": "SGD", "Momentum": "SGD", "RMSProp": "RMSprop"}

# Powers of Adam's betas that are smaller than this number are too inaccurate to compute the step count from them.
_SMALLEST_POWER = 1e-35

# Maps each class whose update formula is not the same in all libraries to a note for the user of `restore`. The note
# says how the restored optimizer's steps may differ from the saved optimizer's steps.
DIFFERENCES = {
    "RMSprop": (
        "RMSprop without momentum: the saved optimizer divides by sqrt(v) + epsilon, the current one by "
        "sqrt(v + epsilon). Pass the square of the old epsilon: the relative difference of a step is then "
        "epsilon / sqrt(v)."
    ),
    "Adagrad": (
        "Adagrad: the saved optimizer divides by sqrt(a) + epsilon, the current one by sqrt(a + epsilon). Pass the "
        "square of the old epsilon: the relative difference of a step is then epsilon / sqrt(a)."
    ),
    "AdamW": (
        "AdamW: TensorFlow Addons subtracts weight_decay times the variable, the current optimizer learning_rate times "
        "weight_decay times the variable. Divide the old weight_decay by the learning rate."
    ),
    "Nadam": (
        "Nadam: the momentum schedule of the current optimizer warms up 250 times as fast, so the steps differ. The "
        "moments are restored, and the product of momenta is computed from the current schedule."
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
    """Infer an optimizer's class from its slots. If several classes have these slots, use the given names as well.

    >>> class_of({"m", "v"}, {"beta_1"}, ["Adamax/beta_1"])
    'Adamax'

    Args:
        slots: the names that TensorFlow 2 uses for the optimizer's slots.
        others: the names of the optimizer's other variables.
        names: names that contain the optimizer's own name, such as names of its variables.
        of_tf1: whether the optimizer is from `tf.compat.v1.train`, which has no AdamW and no Adamax.

    Returns:
        A key of `ATTRIBUTES`, or None if the class is unknown.
    """
    if "momentum_cache" in others:
        return "Nadam"
    if not slots:
        # In TensorFlow 2, only SGD and RMSprop have a hyperparameter `momentum`, and only RMSprop also has `rho`.
        return "SGD" if of_tf1 or ("momentum" in others and not others & {"rho"}) else None
    fitting = [name for name in ATTRIBUTES if required(name) <= slots <= set(ATTRIBUTES[name]) and name != "Nadam"]
    if of_tf1:
        fitting = [name for name in fitting if name not in ("AdamW", "Adamax")]
    return _told_by_names(fitting, names)


def class_of_lists(attributes: set[str], others: set[str], names: Iterable[str]) -> str | None:
    """Return the class of a Keras 3 or tf_keras optimizer from its lists of slots.

    >>> class_of_lists({"_momentums", "_velocities"}, set(), ["rmsprop"])
    'RMSprop'

    Args:
        attributes: the names of the optimizer's nonempty lists of variables.
        others: the names of all attributes of the optimizer that are in the file.
        names: names that may contain the name of the class, for example the optimizer's own name.

    Returns:
        A key of `ATTRIBUTES`, or None if the class is unknown.
    """
    if "_u_product" in others:
        return "Nadam"
    fitting = [
        name
        for name, slots in ATTRIBUTES.items()
        if {slots[slot] for slot in required(name)} <= attributes <= set(slots.values()) and name != "Nadam"
    ]
    if not attributes:
        # Before its first step, no optimizer has slots. After the first step, only SGD without momentum has none.
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
    return ATTRIBUTES[name].keys() - OPTIONAL.keys()


def canonical(name: str | None, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Rename slots from their attribute names in Keras 3 and tf_keras to their names in TensorFlow 2.

    >>> canonical("Adamax", {"_m": 1, "_u": 2})
    {'m': 1, 'v': 2}

    Args:
        name: the optimizer's class, a key of `ATTRIBUTES`. If None, the names are not changed.
        slots: a dict whose keys are the names of slots. Keys that are already TensorFlow 2's names are not changed.
    """
    back = {attribute: slot for slot, attribute in ATTRIBUTES.get(name or "", {}).items()}
    return {back.get(attribute, attribute): each for attribute, each in slots.items()}


def fits(saved: str | None, wanted: str) -> bool:
    """Return whether class `wanted` can take over the slots of class `saved`. An unknown class fits every class.

    >>> fits("Adam", "AdamW"), fits("Adam", "SGD"), fits(None, "SGD")
    (True, False, True)
    """
    return saved is None or saved == wanted or {saved, wanted} == {"Adam", "AdamW"}


def order_in_lists(name: str | None, family: str, config: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return the order of slots in files that hold an optimizer's variables as a list.

    >>> order_in_lists("Adam", "keras3", {}), order_in_lists("Adam", "tf_keras_legacy", {})
    ([('m', 'v')], [('m',), ('v',)])

    Args:
        name: the optimizer's class.
        family: the optimizer's library, as in `Optimizer.family`.
        config: the optimizer's config.

    Returns:
        Groups of slots, in the order of the file. Within a group the file lists all slots of the first variable, then
        all slots of the second variable, and so on. The list is empty for an unknown class.
    """
    # tf_keras's SGD creates its momentum slots even if the momentum is 0.
    always = name == "SGD" and family == "tf_keras"
    order = [
        slot for slot in ATTRIBUTES.get(name or "", {}) if always or slot not in OPTIONAL or config.get(OPTIONAL[slot])
    ]
    together = name == "Ftrl" if family == "tf_keras_legacy" else name != "RMSprop"
    if not together:
        return [(slot,) for slot in order]
    first = tuple(slot for slot in order if slot != "vhat")
    return [group for group in (first, ("vhat",) if "vhat" in order else ()) if group]


def steps_of_powers(powers: Mapping[str, float], betas: tuple[float, float] = (0.9, 0.999)) -> int | None:
    """Compute the step count of TensorFlow 1's Adam from the powers of its betas.

    >>> steps_of_powers({"beta1_power": 0.9**8, "beta2_power": 0.999**8})
    7

    Args:
        powers: the values of the variables `beta1_power` and `beta2_power`.
        betas: the optimizer's `beta1` and `beta2`.

    Returns:
        The number of steps, or None if it cannot be computed from either power. After many steps, both powers are too
        small to be accurate.
    """
    for power, beta in zip((powers.get("beta2_power"), powers.get("beta1_power")), reversed(betas)):
        if power is not None and _SMALLEST_POWER < power < 1.0 and 0.0 < beta < 1.0:
            return round(math.log(power) / math.log(beta)) - 1
    return None


def fewest_steps(powers: Mapping[str, float], betas: tuple[float, float] = (0.9, 0.999)) -> int | None:
    """Compute a lower bound of the step count of TensorFlow 1's Adam, for powers from which it cannot be computed.

    >>> fewest_steps({"beta1_power": 0.0, "beta2_power": 1e-36})
    80551

    Args:
        powers: the values of the variables `beta1_power` and `beta2_power`.
        betas: the optimizer's `beta1` and `beta2`.

    Returns:
        The number of steps after which both powers are so small that Adam's bias corrections are 1, or None if the
        powers are larger, or are not in the file.
    """
    small = [0.0 <= powers.get(name, 1.0) <= _SMALLEST_POWER for name in ("beta1_power", "beta2_power")]
    if not all(small):
        return None
    return max((math.ceil(math.log(_SMALLEST_POWER) / math.log(beta)) for beta in betas if 0.0 < beta < 1.0), default=1)


def nadam_product(beta_1: float, iterations: int, decay: float = 1.0) -> float:
    """Return Nadam's product of momenta after a number of steps.

    >>> round(nadam_product(0.9, 1), 3)
    0.468

    Args:
        beta_1: the optimizer's `beta_1`.
        iterations: the number of steps taken.
        decay: the decay in the optimizer's momentum schedule: 1 in Keras 3 and tf_keras, and 0.004 in
            tf_keras.optimizers.legacy.

    Returns:
        The product, or 0 if it is smaller than 1e-37.
    """
    product = 1.0
    for step in range(1, iterations + 1):
        product *= beta_1 * (1.0 - 0.5 * 0.96 ** (decay * step))
        if product < 1e-37:
            return 0.0
    return product
