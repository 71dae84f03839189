"""A table of the old names and their replacements.

A row of `OLD` contains an old name, its kind and its new name. Old names are in canonical form: `tensorflow.compat.v1.`
is shortened to `tensorflow.`, and `tensorflow.keras.` to `keras.`. The codemod replaces the old names in a program,
`install` restores them, and docs/migration_table.md lists them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Old(NamedTuple):
    """The kind and the replacement of an old name."""

    #: The kind of the old name: `STABLE`, `EXPERIMENTAL` or another of the constants below.
    role: str
    new: str


# The kinds of old names. STABLE is a wrapper class with the arguments (inner_optimizer, dynamic, initial_scale,
# dynamic_growth_steps). EXPERIMENTAL is a wrapper class with the arguments (optimizer, loss_scale). CONTRIB is a
# wrapper class with the arguments (opt, loss_scale_manager). POLICY is a class with the arguments (name, loss_scale).
# GRAPH_REWRITE is a function with the arguments (opt, loss_scale). KERAS_FUNCTION is a function that has a new name in
# keras.mixed_precision. LEGACY is a class or function with the same name in tf_lossscale.legacy. OURS is
# tf_lossscale.LossScaleOptimizer.
STABLE = "stable"
EXPERIMENTAL = "experimental"
CONTRIB = "contrib"
POLICY = "policy"
GRAPH_REWRITE = "graph rewrite"
KERAS_FUNCTION = "function of keras.mixed_precision"
LEGACY = "legacy"
OURS = "ours"

WRAPPER = "tf_lossscale.LossScaleOptimizer"
LEGACY_MODULE = "tf_lossscale.legacy"
#: Maps the kinds of old wrapper classes to this package's wrapper classes that accept the old arguments.
WRAPPERS_WITH_OLD_ARGUMENTS = {
    EXPERIMENTAL: f"{LEGACY_MODULE}.experimental.LossScaleOptimizer",
    CONTRIB: f"{LEGACY_MODULE}.contrib.LossScaleOptimizer",
}
KERAS = "keras.mixed_precision"
CONTRIB_MODULE = "tensorflow.contrib.mixed_precision"
TRAINING = "tensorflow.python.training.experimental"

OLD: dict[str, Old] = {WRAPPER: Old(OURS, WRAPPER)}


def _rows(modules: tuple[str, ...], names: tuple[str, ...], role: str, new: str) -> None:
    """Add a row for each name in each module. In `new`, `{}` stands for the old name."""
    OLD.update({f"{module}.{name}": Old(role, new.format(name)) for module in modules for name in names})


_OPTIMIZER = ("LossScaleOptimizer",)
_PRIVATE_OPTIMIZERS = ("LossScaleOptimizer", "LossScaleOptimizerV3", "BaseLossScaleOptimizer")
_SCALES = ("LossScale", "FixedLossScale", "DynamicLossScale")
_WITH_POLICIES = (f"{KERAS}.experimental", f"{KERAS}.experimental.policy", f"{KERAS}.policy")
_WITH_MANAGERS = tuple(f"{CONTRIB_MODULE}{part}" for part in ("", ".python.loss_scale_manager"))
_WITH_CONTRIB = tuple(f"{CONTRIB_MODULE}{part}" for part in ("", ".python.loss_scale_optimizer"))
_PUBLIC = ("tensorflow.train.experimental", "tensorflow.mixed_precision")

_rows((KERAS,), _OPTIMIZER, STABLE, WRAPPER)
_rows((f"{KERAS}.loss_scale_optimizer",), _PRIVATE_OPTIMIZERS, STABLE, WRAPPER)
_rows((f"{KERAS}.loss_scale_optimizer",), ("LossScaleOptimizerV1",), EXPERIMENTAL, WRAPPER)
_rows((f"{KERAS}.experimental", f"{KERAS}.experimental.loss_scale_optimizer"), _OPTIMIZER, EXPERIMENTAL, WRAPPER)
_rows((KERAS, *_WITH_POLICIES), ("Policy",), POLICY, f"{KERAS}.Policy")
_rows((f"{KERAS}.policy", f"{KERAS}.experimental.policy"), ("PolicyV1",), POLICY, f"{KERAS}.Policy")
_rows(_WITH_POLICIES, ("set_policy", "set_global_policy"), KERAS_FUNCTION, f"{KERAS}.set_global_policy")
_rows(_WITH_POLICIES, ("global_policy",), KERAS_FUNCTION, f"{KERAS}.global_policy")
_rows(_WITH_POLICIES, ("get_layer_policy",), LEGACY, f"{LEGACY_MODULE}.experimental.{{}}")

# The name stays the same. Only the module changes.
_KEPT = f"{LEGACY_MODULE}.{{}}"
_rows((*_PUBLIC, "tensorflow.mixed_precision.experimental", f"{TRAINING}.loss_scale"), _SCALES, LEGACY, _KEPT)
_rows((*_PUBLIC, f"{TRAINING}.loss_scale_optimizer"), ("MixedPrecisionLossScaleOptimizer",), LEGACY, _KEPT)
_ENABLE, _DISABLE = "enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"
_rows((*_PUBLIC, f"{TRAINING}.mixed_precision"), (_ENABLE,), GRAPH_REWRITE, f"{LEGACY_MODULE}.{_ENABLE}")
_rows((*_PUBLIC, f"{TRAINING}.mixed_precision"), (_DISABLE,), LEGACY, f"{LEGACY_MODULE}.{_DISABLE}")
_rows((f"{TRAINING}.mixed_precision",), (f"{_ENABLE}_v1",), GRAPH_REWRITE, f"{LEGACY_MODULE}.{_ENABLE}")
_rows((f"{TRAINING}.mixed_precision",), (f"{_DISABLE}_v1",), LEGACY, f"{LEGACY_MODULE}.{_DISABLE}")
_rows(
    (f"{TRAINING}.loss_scale", f"{KERAS}.experimental.loss_scale", f"{KERAS}.loss_scale"),
    ("get",),
    LEGACY,
    f"{LEGACY_MODULE}.get",
)

_MANAGERS = ("LossScaleManager", "FixedLossScaleManager", "ExponentialUpdateLossScaleManager")
_rows(_WITH_MANAGERS, _MANAGERS, LEGACY, _KEPT)
_rows(_WITH_CONTRIB, _OPTIMIZER, CONTRIB, WRAPPERS_WITH_OLD_ARGUMENTS[CONTRIB])

# Removed modules that programs assign to a variable, as in `mp = tf.keras.mixed_precision.experimental`. The value of
# an entry is the module that contains the names today.
MODULES = {
    f"{KERAS}.experimental": KERAS,
    f"{KERAS}.experimental.policy": KERAS,
    f"{KERAS}.policy": KERAS,
    "tensorflow.mixed_precision": LEGACY_MODULE,
    "tensorflow.mixed_precision.experimental": LEGACY_MODULE,
    CONTRIB_MODULE: f"{LEGACY_MODULE}.contrib",
}

# Removed modules of Keras, whose names are in `keras.mixed_precision` today.
OF_KERAS = {module for module, new in MODULES.items() if new == KERAS}
# Private modules of TensorFlow. A name in such a module has a replacement only if it is in the table of old names.
PRIVATE = {
    *(f"{KERAS}{folder}.{name}" for folder in ("", ".experimental") for name in ("loss_scale", "loss_scale_optimizer")),
    *(f"{TRAINING}.{name}" for name in ("loss_scale", "loss_scale_optimizer", "mixed_precision")),
    *(f"{CONTRIB_MODULE}.python.{name}" for name in ("loss_scale_manager", "loss_scale_optimizer")),
    f"{TRAINING}.loss_scaling_gradient_tape",
}

# Pairs (prefix, replacement). The canonical form of a dotted name is found by replacing its prefix until no prefix in
# this table matches.
_ROOTS = (
    ("tensorflow_core.", "tensorflow."),
    ("tensorflow.compat.v1.", "tensorflow."),
    ("tensorflow.compat.v2.", "tensorflow."),
    ("tensorflow.python.keras.", "keras."),
    ("tensorflow.keras.", "keras."),
    ("tf_keras.", "keras."),
    ("keras.src.", "keras."),
    ("keras.api._v2.keras.", "keras."),
    # An alias that may be either of two modules can lead to `experimental.experimental`, which never existed.
    (f"{KERAS}.experimental.experimental.", f"{KERAS}.experimental."),
)


class Members(NamedTuple):
    """The members that objects of one kind had in old versions of TensorFlow, and no longer have."""

    names: frozenset[str]
    #: What to write in place of a member.
    advice: str


#: The loss scale of a wrapper, which was an object up to TensorFlow 2.3, and is a tensor today.
OF_LOSS_SCALE = Members(
    frozenset(
        {
            *("_current_loss_scale", "_increment_period", "_initial_loss_scale", "_multiplier", "_num_good_steps"),
            *("counter", "current_loss_scale", "get_config", "increment_period", "initial_loss_scale", "multiplier"),
            "update",
        }
    ),
    "if {0} belongs to a tf_lossscale.LossScaleOptimizer, it {1}. Read the wrapper's loss_scale, initial_scale, "
    "dynamic_growth_steps and dynamic_counter, or make the wrapper with "
    "tf_lossscale.legacy.experimental.LossScaleOptimizer(optimizer, loss_scale), which has the old object.",
)
#: A dtype policy.
OF_POLICY = Members(
    frozenset({"loss_scale", "should_cast_variables"}),
    "if {0} is a dtype policy, it has no {1} in today's Keras. Make it with tf_lossscale.legacy.experimental.Policy, "
    "or take it from tf_lossscale.legacy.experimental.global_policy() or get_layer_policy(layer).",
)
#: The wrapper that `compile` makes, which is of Keras 3's class today.
OF_COMPILED = Members(
    frozenset({"_loss_scale", "dynamic", "dynamic_counter", "get_scaled_loss", "get_unscaled_gradients", "loss_scale"}),
    "compile() under mixed_float16, and other libraries, wrap optimizers in Keras's own LossScaleOptimizer, and the "
    "loss may stay unscaled. Give compile() a tf_lossscale.LossScaleOptimizer, or call tf_lossscale.wrap_in_compile().",
)
#: The private methods that tf_lossscale's wrappers neither have nor call.
OF_WRAPPER = Members(
    frozenset(
        {"_apply_gradients", "_apply_gradients_cross_replica", "_raise_if_strategy_unsupported", "_unscale_grads"}
    ),
    "{} was a private method of the old class, which tf_lossscale does not have or does not call. Remove it, or write "
    "get_unscaled_gradients or apply_gradients.",
)


def rows_in(module: str) -> dict[str, Old]:
    """Return the rows for the names in one module. The keys are the names without the module."""
    return {name.rpartition(".")[2]: old for name, old in OLD.items() if name.rpartition(".")[0] == module}


@functools.lru_cache(4096)
def canonical(dotted: str) -> str:
    """Return the canonical form of a dotted name, which is the form used in the codemod's tables.

    >>> canonical("tensorflow.compat.v1.keras.mixed_precision.experimental.Policy")
    'keras.mixed_precision.experimental.Policy'
    """
    for old, new in _ROOTS:
        # tf_keras still has its private modules.
        if f"{dotted}.".startswith(old) and not dotted.startswith("tf_keras.src."):
            return canonical(f"{new}{dotted[len(old) :]}".rstrip("."))
    return dotted


def legacy_module(module: str) -> str:
    """Return the module of this package that has the names of a removed module, with their old meaning.

    >>> legacy_module("keras.mixed_precision.experimental.policy")
    'tf_lossscale.legacy.experimental'
    """
    return f"{LEGACY_MODULE}.experimental" if module in OF_KERAS else MODULES[module]
