"""The codemod's constants and name tables, except the table of old names in `tf_lossscale.legacy.table`.

Names are looked up in their canonical form; see `canonical`.
"""

from __future__ import annotations

import functools
import re

from tf_lossscale.legacy import table
from tf_lossscale.legacy.table import CONTRIB_MODULE, KERAS, TRAINING

WRAPPERS = {table.STABLE, table.EXPERIMENTAL, table.CONTRIB, table.OURS}
HELPER = "tf_lossscale.legacy.from_loss_scale"
# The module that has all names of the old `experimental` module, with their old arguments.
EXPERIMENTAL = f"{table.LEGACY_MODULE}.experimental"

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

# Removed modules of Keras, whose names are in `keras.mixed_precision` today.
OF_KERAS = {module for module, new in table.MODULES.items() if new == KERAS}
# Private modules of TensorFlow. A name in such a module has a replacement only if it is in the table of old names.
PRIVATE = {
    *(f"{KERAS}{folder}.{name}" for folder in ("", ".experimental") for name in ("loss_scale", "loss_scale_optimizer")),
    *(f"{TRAINING}.{name}" for name in ("loss_scale", "loss_scale_optimizer", "mixed_precision")),
    *(f"{CONTRIB_MODULE}.python.{name}" for name in ("loss_scale_manager", "loss_scale_optimizer")),
    f"{TRAINING}.loss_scaling_gradient_tape",
}
# Modules whose imports are removed if the rewritten code no longer uses them.
EMPTIED = {*PRIVATE, KERAS, *table.MODULES}
# Modules that TensorFlow removed completely.
_GONE = (f"{KERAS}.experimental.", f"{CONTRIB_MODULE}.", "tensorflow.mixed_precision.", f"{TRAINING}.loss_scaling_")
_COPY = "tensorflow.python.keras.mixed_precision."

# While a notebook is being rewritten, a name with this prefix replaces each line that is valid only in IPython.
IPYTHON = "_tf_lossscale_line_"


# What the old objects had and today's have not: for each kind of object, the members, and what to write in their place.
# Up to TensorFlow 2.3, the loss scale of a wrapper was an object. It is a tensor today.
OF_LOSS_SCALE = (
    {
        *(
            "_current_loss_scale",
            "_increment_period",
            "_initial_loss_scale",
            "_multiplier",
            "_num_good_steps",
            "update",
        ),
        *("counter", "current_loss_scale", "get_config", "increment_period", "initial_loss_scale", "multiplier"),
    },
    "if {0} belongs to a tf_lossscale.LossScaleOptimizer, it {1}. Read the wrapper's loss_scale, initial_scale, "
    "dynamic_growth_steps and dynamic_counter, or make the wrapper with "
    "tf_lossscale.legacy.experimental.LossScaleOptimizer(optimizer, loss_scale), which has the old object.",
)
OF_POLICY = (
    {"loss_scale", "should_cast_variables"},
    "if {0} is a dtype policy, it has no {1} in today's Keras. Make it with tf_lossscale.legacy.experimental.Policy, "
    "or take it from tf_lossscale.legacy.experimental.global_policy() or get_layer_policy(layer).",
)
# The wrapper that `compile` makes is of Keras 3's class today.
OF_COMPILED = (
    {"_loss_scale", "dynamic", "dynamic_counter", "get_scaled_loss", "get_unscaled_gradients", "loss_scale"},
    "compile() under mixed_float16, and other libraries, wrap optimizers in Keras's own LossScaleOptimizer, and the "
    "loss may stay unscaled. Give compile() a tf_lossscale.LossScaleOptimizer, or call tf_lossscale.wrap_in_compile().",
)
# Private methods that tf_lossscale's wrappers neither have nor call.
OF_WRAPPER = (
    {"_apply_gradients", "_apply_gradients_cross_replica", "_raise_if_strategy_unsupported", "_unscale_grads"},
    "{} was a private method of the old class, which tf_lossscale does not have or does not call. Remove it, or write "
    "get_unscaled_gradients or apply_gradients.",
)

WORD = re.compile(r"[^\W\d]\w*")

# A file is parsed only if it contains a match of this pattern, as all old names do. A UTF-16 file has null
# bytes, so that the parser reports an error.
_OLD = re.compile(
    rb"mixed_precision|LossScale|training\.experimental|get_scaled_loss|get_unscaled_gradients|should_cast_variables"
    rb"|experimental_run_v2|TODO\(tf-lossscale\)|\0|loss_scale['\"]?\]?\s*[:=]\s*['\"]dynamic|\.loss_scale\b"
    rb"|['\"]loss_scale['\"]|dynamic_counter|increment_period|_num_good_steps"
)

# What the text of a file shows to the other files of its project: it wraps optimizers, it passes other optimizers to
# `compile`, it makes or sets policies, or it keeps the old loss scale object of its wrappers and policies.
WRAPS = re.compile(rb"(LossScaleOptimizer\w*|mixed_precision_graph_rewrite\w*)\(")
COMPILES = re.compile(rb"(?<!\bre)\.compile\(\s*(optimizer\s*=\s*)?(\\?['\"]|(?![\w.]*LossScaleOptimizer)[\w.]+\()")
HAS_POLICIES = re.compile(rb"set_(global_)?policy\(|\bPolicy\(")
KEEPS = re.compile(
    rb"\.loss_scale\(\)|\.loss_scale\.\w*(period|scale|multiplier|steps)|[pP]olicy\([^)\n]*loss_scale|[pP]olicy(\(\))?\.loss_scale"
)
LIBRARY = re.compile(rb"tensorflow|keras")


def is_worth_parsing(source: bytes) -> bool:
    """Search the text of a file, and return whether it may contain an old name.

    >>> is_worth_parsing(b"tf.keras.mixed_precision.Policy"), is_worth_parsing(b"tf.keras.Model")
    (True, False)
    """
    return bool(_OLD.search(source))


def is_gone(dotted: str) -> bool:
    """Return whether TensorFlow no longer has a name, or the module that contains it.

    >>> is_gone("tensorflow.contrib.mixed_precision"), is_gone("tensorflow.keras.mixed_precision.Policy")
    (True, False)
    """
    name = canonical(dotted)
    # TensorFlow removed all of `tensorflow.contrib`, but the codemod does not report the names of its other modules.
    return name == "tensorflow.contrib" or f"{name}.".startswith(_GONE)


def in_copy(dotted: str) -> bool:
    """Return whether a name is in the part of TensorFlow's private copy of Keras that current TensorFlow still has.

    >>> in_copy("tensorflow.python.keras.mixed_precision.policy.set_global_policy")
    True
    >>> in_copy("tensorflow.python.keras.mixed_precision.experimental.policy.set_policy")
    False
    """
    return f"{dotted}.".startswith(_COPY) and not is_gone(dotted)


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
    return EXPERIMENTAL if module in OF_KERAS else table.MODULES[module]
