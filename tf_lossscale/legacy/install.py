"""Installs the old names where old code looks for them, and uninstalls them."""

from __future__ import annotations

import types
from typing import Any

from tf_lossscale.legacy.patches import Patches

_installed: list[Patches] = []


class Installation:
    """The result of `install`: as a context manager it takes the names back at the end of the block.

    >>> with Installation(uninstall_at_the_end=False) as installation:
    ...     pass

    Args:
        uninstall_at_the_end: False if the names were there before.
    """

    def __init__(self, uninstall_at_the_end: bool):
        self._uninstall_at_the_end = uninstall_at_the_end

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._uninstall_at_the_end:
            uninstall()


def install() -> Installation:
    """Puts the names of TensorFlow 1.13 to 2.15 back where old code looks for them.

    Call it before or after `import tensorflow`, once or more often. What is put where is the table in
    `tf_lossscale/legacy/patch_table.py`; nothing else is touched, and `uninstall()` takes it back.

    >>> import tensorflow as tf
    >>> with install():
    ...     experimental = tf.keras.mixed_precision.experimental
    ...     optimizer = experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
    >>> optimizer.loss_scale().numpy().item()
    32768.0
    >>> hasattr(tf.keras.mixed_precision, "experimental")
    False

    Returns:
        A context manager; at the end of its block the names are taken back, unless they were there before it.
    """
    is_first = not _installed
    if is_first:
        patches = Patches()
        _installed.append(patches)
        # Keras is watched as well, so that what is put into it waits until all of it is there.
        for package in ("keras", "tf_keras"):
            patches.when_imported(package, lambda patches, module: None)
        patches.when_imported("tensorflow", _put_all)
    return Installation(uninstall_at_the_end=is_first)


def uninstall() -> None:
    """Takes back what `install` did; objects that were made stay usable.

    >>> uninstall()
    """
    while _installed:
        _installed.pop().undo()


def _put_all(patches: Patches, tensorflow: types.ModuleType) -> None:
    del tensorflow
    from tf_lossscale.legacy import patch_table  # which imports TensorFlow

    for name, put in patch_table.PLACES.items():
        patches.when_imported(name, put)
