"""What this package changes in other libraries on request: `install`, `wrap_in_compile`, and how both are undone."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

from tf_lossscale.legacy.patches import Patches


class Installation:
    """The result of `install` and `wrap_in_compile`; a `with` block undoes the call at its end.

    >>> with wrap_in_compile() as installation:
    ...     pass

    Args:
        undo: undoes the call.
        is_first: False if an earlier call of the same function is still in force; then the block undoes nothing.
    """

    def __init__(self, undo: Callable[[], None], is_first: bool):
        self._undo = undo
        self._is_first = is_first

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_first:
            self.undo()

    def undo(self) -> None:
        """Undo every call of the same function; objects that were made stay usable.

        >>> wrap_in_compile().undo()
        """
        self._undo()


class _Change:
    """A table of patches, in force while at least one of the public functions holds it.

    Args:
        table: the module in this package with the table, `PLACES`. It imports TensorFlow, so it is imported after it.
    """

    def __init__(self, table: str):
        self._table = table
        self._patches = Patches()
        self._holders: set[str] = set()

    def hold(self, holder: str) -> bool:
        """Return whether `holder` did not hold it before."""
        if holder in self._holders:
            return False
        if not self._holders:
            # Keras is watched as well, so that what is put into it waits until all of it is there.
            for package in ("keras", "tf_keras"):
                self._patches.when_imported(package, lambda patches, module: None)
            self._patches.when_imported("tensorflow", self._put_all)
        self._holders.add(holder)
        return True

    def release(self, holder: str) -> None:
        self._holders.discard(holder)
        if not self._holders:
            self._patches.undo()

    def _put_all(self, patches: Patches, tensorflow: types.ModuleType) -> None:
        del tensorflow
        for name, put in importlib.import_module(f"tf_lossscale.legacy.{self._table}").PLACES.items():
            patches.when_imported(name, put)


_names = _Change("patch_table")
_compile = _Change("wrap_in_compile")


def install() -> Installation:
    """Put the names of TensorFlow 1.13 to 2.15 back where old code looks for them.

    Call it before or after `import tensorflow`, once or more often. What is put where is the table in
    `tf_lossscale/legacy/patch_table.py`, and what `wrap_in_compile` does is included; nothing else is touched, and
    `uninstall()` takes it back.

    >>> import tensorflow as tf
    >>> with install():
    ...     mixed_precision = tf.keras.mixed_precision.experimental
    ...     optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
    >>> optimizer.loss_scale().numpy().item()
    32768.0
    >>> hasattr(tf.keras.mixed_precision, "experimental")
    False

    Returns:
        A context manager; at the end of its block the names are taken back, unless they were there before it.
    """
    _compile.hold("install")
    return Installation(uninstall, is_first=_names.hold("install"))


def uninstall() -> None:
    """Take back what `install` did; objects that were made stay usable.

    >>> uninstall()
    """
    _names.release("install")
    _compile.release("install")


def wrap_in_compile() -> Installation:
    """Make `compile` wrap optimizers in this package's LossScaleOptimizer under the policy "mixed_float16".

    Without this call, `compile` wraps them in the Keras library's own class. Nothing else changes: `compile` wraps
    the same optimizers as before, and one that is already wrapped, in either class, stays as it is. Models that are
    compiled already keep their optimizer. Call it before or after `import tensorflow`, once or more often. It applies
    to Keras 3 and to tf_keras. A global policy of another dtype has a loss scale only if
    `tf_lossscale.legacy.experimental` made it; `compile` wraps the optimizer under such a policy too.

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> installation = tf_lossscale.wrap_in_compile()
    >>> tf.keras.mixed_precision.set_global_policy("mixed_float16")
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype="float32")])
    >>> model.compile("adam", "mse")
    >>> isinstance(model.optimizer, tf_lossscale.LossScaleOptimizer)
    True
    >>> tf.keras.mixed_precision.set_global_policy("float32")
    >>> installation.undo()

    Returns:
        An object whose method `undo()` gives `compile` the library's own class back. It is a context manager too: the
        end of its block calls `undo()`, unless an earlier `wrap_in_compile()` is still in force.
    """
    return Installation(lambda: _compile.release("wrap_in_compile"), is_first=_compile.hold("wrap_in_compile"))
