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
    ("keras.mixed_precision.experimental.experimental.", "keras.mixed_precision.experimental."),
)

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

# Names that still exist in `keras.mixed_precision`.
CURRENT = (KERAS, f"{KERAS}.set_global_policy", f"{KERAS}.global_policy")

GONE_HOOK = "was a private method of the old class. tf_lossscale has no such method."
PRIVATE_NAME = "is private. It is left as it is: check that your version of TensorFlow has it."
IN_COPY = (
    "is in TensorFlow's private copy of Keras and is left as it is. It has no effect on tf.keras: if the layers and "
    "optimizers come from tf.keras, import it from tensorflow.keras and migrate again."
)

# The old name of the `run` method of tf.distribute's strategies.
OLD_RUN = "experimental_run_v2"

# While a notebook is being rewritten, a name with this prefix replaces each line that is valid only in IPython.
IPYTHON = "_tf_lossscale_line_"

# Private methods of the old wrapper classes that tf_lossscale's wrappers do not have.
GONE_HOOKS = {"_apply_gradients", "_apply_gradients_cross_replica", "_raise_if_strategy_unsupported", "_unscale_grads"}

# Private methods of the old wrapper classes that subclasses may override. tf_lossscale does not call these methods.
HOOKS = {*GONE_HOOKS, "_compute_gradients", "_get_gradients"}

WORD = re.compile(r"[^\W\d]\w*")

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
_UNPACKED = re.compile(rb"loss_scale['\"]?\]?\s*[:=]\s*['\"]dynamic|\.loss_scale\(\)")


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


def leads_to_old(dotted: str) -> bool:
    """Return whether a dotted name is an old name, or a package that contains old names.

    >>> leads_to_old("tensorflow.keras"), leads_to_old("tensorflow.data")
    (True, False)

    Args:
        dotted: a qualified name that begins with the real name of the module.
    """
    name = canonical(dotted)
    return any(f"{old}.".startswith(f"{name}.") for old in (*table.OLD, *table.MODULES, "tensorflow.compat.v1"))


def is_gone(dotted: str) -> bool:
    """Return whether TensorFlow no longer has a name, or the module that contains it.

    >>> is_gone("tensorflow.contrib.mixed_precision"), is_gone("tensorflow.keras.mixed_precision.Policy")
    (True, False)

    Args:
        dotted: a qualified name that begins with the real name of the module.
    """
    return f"{canonical(dotted)}.".startswith(_GONE)


def in_copy(dotted: str) -> bool:
    """Return whether a name is in the part of TensorFlow's private copy of Keras that current TensorFlow still has.

    >>> in_copy("tensorflow.python.keras.mixed_precision.policy.set_global_policy")
    True
    >>> in_copy("tensorflow.python.keras.mixed_precision.experimental.policy.set_policy")
    False

    Args:
        dotted: a qualified name that begins with the module's real name. It need not be canonical.
    """
    return f"{dotted}.".startswith("tensorflow.python.keras.mixed_precision.") and not is_gone(dotted)


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
