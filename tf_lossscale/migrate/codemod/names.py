"""The codemod's constants and name tables, except the table of old names in `tf_lossscale.legacy.table`.

Names are looked up in their canonical form; see `canonical`.
"""

from __future__ import annotations

import re

from tf_lossscale.legacy import table
from tf_lossscale.legacy.table import CONTRIB_MODULE, KERAS, TRAINING, canonical

WRAPPERS = {table.STABLE, table.EXPERIMENTAL, table.CONTRIB, table.OURS}
HELPER = "tf_lossscale.legacy.from_loss_scale"
# The module that has all names of the old `experimental` module, with their old arguments.
EXPERIMENTAL = f"{table.LEGACY_MODULE}.experimental"

# Modules whose imports are removed if the rewritten code no longer uses them.
EMPTIED = {*table.PRIVATE, KERAS, *table.MODULES}
# Modules that TensorFlow removed completely.
_GONE = (f"{KERAS}.experimental.", f"{CONTRIB_MODULE}.", "tensorflow.mixed_precision.", f"{TRAINING}.loss_scaling_")
_COPY = "tensorflow.python.keras.mixed_precision."

# While a notebook is being rewritten, a name with this prefix replaces each line that is valid only in IPython.
IPYTHON = "_tf_lossscale_line_"

WORD = re.compile(r"[^\W\d]\w*")

# A file is parsed only if it contains a match of this pattern, or an old name without a match. A UTF-16 file has null
# bytes, so that the parser reports an error.
_OLD = re.compile(
    rb"mixed_precision|LossScale|training\.experimental|get_scaled_loss|get_unscaled_gradients|should_cast_variables"
    rb"|experimental_run_v2|TODO\(tf-lossscale\)|\0|loss_scale['\"]?\]?\s*[:=]\s*['\"]dynamic|\.loss_scale\b"
    rb"|['\"]loss_scale['\"]|dynamic_counter|increment_period|_num_good_steps"
)

# What the code of a file, without its comments, shows to the other files of its project: it wraps optimizers, and the
# wrappers may have no old loss scale object, it passes other optimizers to `compile`, it makes or sets policies, or it
# keeps the old loss scale object of its wrappers and policies.
COMMENT = re.compile(rb"#(?:(?!\\n)[^\n\"])*")
MAKES = re.compile(rb"(?<!MixedPrecision)LossScaleOptimizer\w*\(")
WRAPS = re.compile(rb"(LossScaleOptimizer\w*|mixed_precision_graph_rewrite\w*)\(")
COMPILES = re.compile(rb"(?<!\bre)\.compile\(\s*(optimizer\s*=\s*)?(\\?['\"]|(?![\w.]*LossScaleOptimizer)[\w.]+\()")
HAS_POLICIES = re.compile(rb"set_(global_)?policy\(|\bPolicy\(")
KEEPS = re.compile(rb"\.loss_scale(\(\)|\.\w*(period|scale|steps))|olicy\([^)\n]*loss_scale|olicy(\(\))?\.loss_scale")


def is_worth_parsing(source: bytes) -> bool:
    """Search the text of a file, and return whether it may contain an old name.

    >>> is_worth_parsing(b"tf.keras.mixed_precision.Policy"), is_worth_parsing(b"tf.keras.Model")
    (True, False)
    """
    words = (name.rpartition(".")[2].encode() for name in table.OLD if not _OLD.search(name.encode()))
    return bool(_OLD.search(source)) or any(word in source for word in words)


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
