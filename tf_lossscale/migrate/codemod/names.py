"""The codemod's constants and name tables, except the table of old names in `tf_lossscale.legacy.table`.

Names are looked up in their canonical form; see `canonical`.
"""

from __future__ import annotations

import functools
import re

from tf_lossscale.legacy import table
from tf_lossscale.legacy.table import CONTRIB_MODULE, KERAS, TRAINING

WRAPPERS = (table.STABLE, table.EXPERIMENTAL, table.CONTRIB, table.OURS)
HELPER = "tf_lossscale.legacy.from_loss_scale"
# The module whose dtype policies have a loss scale.
POLICIES = f"{table.LEGACY_MODULE}.experimental"

# The top-level packages that contain old names. An import of such a package never refers to a file of the project.
LIBRARIES = ("tensorflow", "tensorflow_core", "keras", "tf_keras", "tf_lossscale")

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
    # Resolving an alias may produce `experimental.experimental`, a module that no library ever had.
    ("keras.mixed_precision.experimental.experimental.", "keras.mixed_precision.experimental."),
)

_OPTIMIZER = "loss_scale_optimizer"
# Private modules of TensorFlow. A name in such a module has a replacement only if it is in the table of old names.
PRIVATE = {
    *(f"{KERAS}{folder}.{module}" for folder in ("", ".experimental") for module in ("loss_scale", _OPTIMIZER)),
    *(f"{TRAINING}.{module}" for module in ("loss_scale", _OPTIMIZER, "mixed_precision")),
    *(f"{CONTRIB_MODULE}.python.{module}" for module in ("loss_scale_manager", _OPTIMIZER)),
}

# Modules whose imports are removed if the rewritten code no longer uses them.
EMPTIED = (*PRIVATE, KERAS, *table.MODULES)

# Names that still exist in `keras.mixed_precision`. They are old names only if they are imported from TensorFlow's
# private copy of Keras; see `in_unused_copy`.
CURRENT = (KERAS, f"{KERAS}.set_global_policy", f"{KERAS}.global_policy")

# Maps a private module to the private names in it that current TensorFlow still has.
KEPT = {
    f"{TRAINING}.loss_scale": "_assign_if_finite _is_all_finite _op_in_graph_mode",
    "tensorflow.python.keras.mixed_precision.loss_scale": "deserialize serialize",
    "tensorflow.python.keras.mixed_precision.loss_scale_optimizer": "_DynamicLossScaleState _UnwrapPreventer "
    "_assign_if_finite _is_all_finite _multiply_gradient _op_in_graph_mode strategy_supports_loss_scaling",
}

GONE_HOOK = "was a private method of the old class. tf_lossscale has no such method."
STILL_THERE = "is private. Today's TensorFlow still has it."
NOT_USED = "is in TensorFlow's private copy of Keras and has no effect on tf.keras."

# Maps the old path of a private module to its new path. All names in the module moved with it.
MOVED = {
    f"tensorflow.python.keras.mixed_precision.experimental.{_name}": f"tensorflow.python.keras.mixed_precision.{_name}"
    for _name in ("autocast_variable", "device_compatibility_check")
}

# Maps attributes of the old loss scale object to the properties of LossScaleOptimizer that replace them.
STATE = {
    "current_loss_scale": "loss_scale",
    "_current_loss_scale": "loss_scale",
    "_loss_scale_value": "loss_scale",
    "initial_loss_scale": "initial_scale",
    "_initial_loss_scale": "initial_scale",
    "initial_value": "initial_scale",
    "increment_period": "dynamic_growth_steps",
    "_increment_period": "dynamic_growth_steps",
    "growth_steps": "dynamic_growth_steps",
    "counter": "dynamic_counter",
    "_num_good_steps": "dynamic_counter",
}

# The old name of the `run` method of tf.distribute's strategies.
OLD_RUN = "experimental_run_v2"

# While a notebook is being rewritten, a name with this prefix replaces each line that is valid only in IPython.
IPYTHON = "_tf_lossscale_line_"

# Private methods of the old wrapper classes that tf_lossscale's wrappers do not have.
GONE_HOOKS = {"_apply_gradients", "_apply_gradients_cross_replica", "_raise_if_strategy_unsupported", "_unscale_grads"}

# Private methods of the old wrapper classes that subclasses may override. tf_lossscale does not call these methods.
HOOKS = {*GONE_HOOKS, "_compute_gradients", "_get_gradients"}

# Most old names contain one of these substrings.
_PARTS = ("mixed_precision", "LossScale", "training.experimental")
# A file is parsed only if it contains one of these words: an element of `_PARTS`, an old name without such an element,
# or `TODO(tf-lossscale)`, which marks the comments that earlier runs of the codemod added.
_WORDS = (
    *(part.encode() for part in _PARTS),
    b"get_scaled_loss",
    b"get_unscaled_gradients",
    b"should_cast_variables",
    OLD_RUN.encode(),
    b"TODO(tf-lossscale)",
    # In a UTF-16 file, the search finds none of the names, but it finds null bytes. The file is selected, so that the
    # parser reports an error.
    b"\0",
)
_COPY = re.compile(r"tensorflow(_core)?\.python\.keras\.mixed_precision\b(?!\.device_compatibility_check)")
_UNPACKED = re.compile(rb"loss_scale['\"]?\s*[:=]\s*['\"]dynamic")


def is_worth_parsing(source: bytes) -> bool:
    """Search the text of a file, and return whether it may contain an old name.

    >>> is_worth_parsing(b"tf.keras.mixed_precision.Policy"), is_worth_parsing(b"tf.keras.Model")
    (True, False)

    Args:
        source: the content of the file.

    Returns:
        True if the file has to be parsed.
    """
    words = (name.rpartition(".")[2].encode() for name in table.OLD if not any(part in name for part in _PARTS))
    return any(word in source for word in (*_WORDS, *words)) or (
        b"loss_scale" in source and bool(_UNPACKED.search(source))
    )


def is_beginning(name: str) -> bool:
    """Return whether a canonical name is an old name or a prefix of one.

    >>> is_beginning("tensorflow.train"), is_beginning("tensorflow.data")
    (True, False)

    Args:
        name: a dotted name in canonical form.
    """
    return any(f"{old}.".startswith(f"{name}.") for old in (*table.OLD, *table.MODULES))


def is_kept(dotted: str) -> bool:
    """Return whether a name in a private module of TensorFlow still exists in the current version.

    >>> is_kept("tensorflow.python.training.experimental.loss_scale._op_in_graph_mode")
    True

    Args:
        dotted: a qualified name that begins with the module's real name. It need not be canonical.
    """
    module, _, name = dotted.rpartition(".")
    return name in KEPT.get(module, "").split()


def moved(dotted: str) -> str | None:
    """Return the new name of a module that moved, or of a name in such a module. Return None for all other names.

    >>> moved("tensorflow.python.keras.mixed_precision.experimental.autocast_variable.AutoCastVariable")
    'tensorflow.python.keras.mixed_precision.autocast_variable.AutoCastVariable'

    Args:
        dotted: a qualified name that begins with the module's real name. It need not be canonical.
    """
    new_names = (new + dotted[len(old) :] for old, new in MOVED.items() if f"{dotted}.".startswith(f"{old}."))
    return next(new_names, None)


def in_unused_copy(dotted: str) -> bool:
    """Return whether a name is in TensorFlow's private copy of Keras, whose policies have no effect on layers.

    >>> in_unused_copy("tensorflow.python.keras.mixed_precision.set_global_policy")
    True

    Args:
        dotted: a qualified name that begins with the module's real name. It need not be canonical.
    """
    return bool(_COPY.match(dotted))


@functools.lru_cache(4096)
def canonical(dotted: str) -> str:
    """Return the canonical form of a dotted name, which is the form used in the codemod's tables.

    >>> canonical("tensorflow.compat.v1.keras.mixed_precision.experimental.Policy")
    'keras.mixed_precision.experimental.Policy'

    Args:
        dotted: a qualified name that begins with the real name of the module.

    Returns:
        The canonical name. A name from another library is returned unchanged.
    """
    for old, new in _ROOTS:
        if f"{dotted}.".startswith(old):
            return canonical(f"{new}{dotted[len(old) :]}".rstrip("."))
    return dotted
