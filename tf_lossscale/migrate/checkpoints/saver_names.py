"""Variable names that let a current `tf.compat.v1.train.Saver` restore TensorFlow 1 files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tf_lossscale.migrate.checkpoints.read import read
from tf_lossscale.migrate.checkpoints.saved import FileError
from tf_lossscale.migrate.checkpoints.savers import last_part

if TYPE_CHECKING:
    from tf_lossscale.types import Variable


def saver_names(
    checkpoint_path: str | os.PathLike[str], variables: Iterable[Variable] | None = None
) -> dict[str, Variable]:
    """Map the names in a TensorFlow 1 file to the variables of the graph, for `tf.compat.v1.train.Saver`.

    TensorFlow 1.15 created Adam's `beta1_power` inside a conditional, under a name such as `cond/beta1_power` or
    `cond_1/beta1_power`. A current graph contains a different number of conditionals, so its names differ.

    >>> import tempfile, tensorflow as tf
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     power = tf.compat.v1.get_variable("cond_1/beta1_power", initializer=0.5)
    ...     session.run(power.initializer)
    ...     path = tf.compat.v1.train.Saver([power]).save(session, tempfile.mkdtemp() + "/ckpt")
    >>> with tf.Graph().as_default():
    ...     power = tf.compat.v1.get_variable("beta1_power", initializer=0.0)
    ...     names = saver_names(path)
    >>> [(name, variable.op.name) for name, variable in names.items()]
    [('cond_1/beta1_power', 'beta1_power')]

    Args:
        checkpoint_path: the file's prefix.
        variables: the variables to restore. If None, the global variables of the graph are restored.

    Returns:
        A dict to pass as the Saver's `var_list`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or lacks a variable.
    """
    import tensorflow as tf

    # If the file is damaged, `read` raises a clear error. The error message from `tf.train.list_variables` would be
    # obscure.
    read(checkpoint_path)
    names = {name for name, _ in tf.train.list_variables(os.fspath(checkpoint_path))}
    by_name: dict[str, Any] = {}
    for variable in tf.compat.v1.global_variables() if variables is None else variables:
        name = variable.name.partition(":")[0]
        powers = sorted(n for n in names if last_part(n) == last_part(name) and last_part(n).endswith("_power"))
        found = [name] if name in names else powers
        if len(found) != 1 or found[0] in by_name:
            others = f", but several variables that may correspond to it: {', '.join(found)}" if found[1:] else ""
            raise FileError(
                f"{os.fspath(checkpoint_path)}: the file has no variable {name!r}{others}. Pass only `variables` that "
                "are in the file."
            )
        by_name[found[0]] = variable
    return by_name
