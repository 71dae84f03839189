"""Names of the optimizers' slots in each library, and differences between the libraries' update formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Maps the slots that an optimizer of any class in Keras 3 or tf_keras may have to the attributes that hold them.
_OF_ANY_CLASS = {"average": "_model_variables_moving_average", "gradient_accumulator": "_accumulated_gradients"}
# Maps each class to a dict. Its keys are slot names in TensorFlow 2.0 to 2.10 and tf_keras.optimizers.legacy. Its
# values are the attributes that hold these slots in Keras 3 and tf_keras.
ATTRIBUTES: dict[str, dict[str, str]] = {
    name: {**attributes, **_OF_ANY_CLASS}
    for name, attributes in {
        "SGD": {"momentum": "momentums"},
        "Adam": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
        "AdamW": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
        "Nadam": {"m": "_momentums", "v": "_velocities"},
        "Adamax": {"m": "_m", "v": "_u"},
        "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
        "Adagrad": {"accumulator": "_accumulators"},
        "Adadelta": {"accum_grad": "_accumulated_grads", "accum_var": "_accumulated_delta_vars"},
        "Ftrl": {"accumulator": "_accumulators", "linear": "_linears"},
    }.items()
}
# Maps the name of each optional slot to the name of the argument that makes an optimizer create this slot.
OPTIONAL = {
    "momentum": "momentum",
    "mg": "centered",
    "vhat": "amsgrad",
    "average": "use_ema",
    "gradient_accumulator": "gradient_accumulation_steps",
}

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
# Maps classes in `tf.compat.v1.train`, without the suffix "Optimizer", to the current classes that replaced them.
_TODAY = {"GradientDescent": "SGD", "Momentum": "SGD", "RMSProp": "RMSprop"}

# The parts of slots' full names that tell the slot in Keras 3 and tf_keras. Each regular expression matches a slot's
# full name, and its group is the full name of the slot's variable. Keras 3 replaces "/" in it with "_".
_WORDS = (
    "accumulated_delta_var|accumulated_grad|accumulator|average|average_gradient|gradient_accumulator|linear|m|momentum"
    "|norm|u|v|velocity|velocity_hat|vhat"
)
_SLOT = {
    "keras3": rf"(?:.+/)?([^/]+?)_(?:{_WORDS})",
    "tf_keras": rf"(?:(?!(?:{_WORDS})/)[^/]+/)*(?:{_WORDS})/(.+)",
    "tf_keras_legacy": r"(?:(?:.*?/)?{scope}(?:_\d+)?/)?(.+)/[^/]+",
}

# Powers of Adam's betas that are smaller than this number are too inaccurate to compute the step count from them.
_SMALLEST_POWER = 1e-35

# Maps each class whose update formula is not the same in all libraries to a note for the user of `restore`. The note
# says how the restored optimizer's steps may differ from the saved optimizer's steps.
DIFFERENCES = {
    **{
        name: f"{name}: the saved optimizer divides by sqrt(v) + epsilon, the current one by sqrt(v + epsilon). Pass "
        "the square of the old epsilon: the relative difference of a step is then epsilon / sqrt(v)."
        for name in ("RMSprop", "Adagrad")
    },
    "AdamW": (
        "AdamW: TensorFlow Addons subtracts weight_decay times the variable, the current optimizer learning_rate times "
        "weight_decay times the variable. Divide the old weight_decay by the learning rate."
    ),
    "Nadam": (
        "Nadam: the momentum schedule of the current optimizer warms up 250 times as fast, so the steps differ. The "
        "moments are restored. The product of momenta is computed with the current schedule from the step count, "
        "which may include skipped steps."
    ),
}


def of_tf1(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the slots of a `tf.compat.v1.train` optimizer to TensorFlow 2's names."""
    names = {"accum": "accumulator" if "linear" in slots else "accum_grad", "accum_update": "accum_var"}
    return {names.get(name, name): each for name, each in slots.items()}


def variable_in(slot: str, family: str, scope: str) -> str | None:
    """Return the part of a slot's full name that is the full name of its variable.

    A legacy optimizer usually creates its slots in a name scope with its own name, `scope`.
    """
    found = re.fullmatch(_SLOT.get(family, "(?!)").replace("{scope}", re.escape(scope)), slot)
    return found and found[1]


def today(name: str) -> str:
    """Return the current class that replaced an optimizer of `tf.compat.v1.train`."""
    name = name.removesuffix("Optimizer")
    return _TODAY.get(name, name)


def class_of(slots: set[str], names: Iterable[str], is_nadam: bool = False) -> str | None:
    """Find an optimizer's class by its slots and by the names of its variables."""
    if is_nadam:
        return "Nadam"
    parts = {part.lower() for name in names for part in re.split(r"[/:]", name)}
    parts |= {re.sub(r"_\d+$", "", part).replace("_", "") for part in parts}
    canonical_names = {name: canonical(name, dict.fromkeys(slots)).keys() for name in ATTRIBUTES}
    fitting = [n for n, each in canonical_names.items() if not slots or required(n) <= each <= ATTRIBUTES[n].keys()]
    named = [name for name in fitting if name.lower() in parts]
    return named[0] if len(named) == 1 else None


def known_class(optimizer: Any) -> str | None:
    """Return the name of an optimizer's class, or of its base class, that is a key of `ATTRIBUTES`, or None."""
    return next((each.__name__ for each in type(optimizer).__mro__ if each.__name__ in ATTRIBUTES), None)


def required(name: str) -> set[str]:
    """Return the slots that every optimizer of a class has."""
    return ATTRIBUTES[name].keys() - OPTIONAL.keys()


def canonical(name: str | None, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Rename slots from their attribute names in Keras 3 and tf_keras to their names in TensorFlow 2."""
    back = {attribute: slot for slot, attribute in ATTRIBUTES.get(name or "", {}).items()}
    return {back.get(attribute, attribute): each for attribute, each in slots.items()}


def order_in_lists(name: str | None, family: str, config: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return the order of slots in files that hold an optimizer's variables as a list."""
    if name not in ATTRIBUTES:
        return []
    # tf_keras's SGD creates its momentum slots even if the momentum is 0.
    config = {**config, "momentum": True} if name == "SGD" and family == "tf_keras" else config
    slots = [slot for slot in ATTRIBUTES[name] if slot not in OPTIONAL or config.get(OPTIONAL[slot])]
    interleaved = name == "Ftrl" if family == "tf_keras_legacy" else name != "RMSprop"
    of_any, own = ([slot for slot in slots if (slot in _OF_ANY_CLASS) == each] for each in (True, False))
    together = tuple(slot for slot in own if interleaved and slot != "vhat")
    alone = [slot for slot in own if slot not in together]
    return [group for group in (*zip(of_any), together, *zip(alone)) if group]


def steps_of_powers(powers: Mapping[str, float], betas: tuple[float, float] = (0.9, 0.999)) -> tuple[int | None, bool]:
    """Compute the step count of TensorFlow 1's Adam from the powers of its betas.

    Returns the step count, and whether it is exact. It is a lower bound if the powers are too small to compute it.
    """
    for beta, name in sorted(zip(betas, ("beta1_power", "beta2_power")), reverse=True):
        power = powers.get(name, 1.0)
        if 0.0 <= power < 1.0 and 0.0 < beta < 1.0:
            steps = round(math.log(max(power, _SMALLEST_POWER)) / math.log(beta)) - 1
            return steps, power > _SMALLEST_POWER
    return None, False


def nadam_product(beta_1: float, iterations: int, decay: float = 1.0) -> float:
    """Return Nadam's product of momenta after a number of steps."""
    product = 1.0
    for step in range(1, iterations + 1):
        product *= beta_1 * (1.0 - 0.5 * 0.96 ** (decay * step))
        if product < 1e-37:
            return 0.0
    return product
