"""`install` and `wrap_in_compile`, which change other libraries on request, and the functions that undo the changes."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

from tf_lossscale.legacy.patches import Patches


class Installation:
    """The return value of `install` and `wrap_in_compile`. A `with` statement undoes their changes at its end.

    >>> with wrap_in_compile() as installation:
    ...     pass

    Args:
        undo: a function that undoes the changes.
        is_first: False if an earlier call to the same function is still in effect. In that case, the end of the `with`
            block undoes nothing.
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
        """Undo the changes of the function that returned this object, even if that function was called repeatedly.

        Objects created in the meantime stay usable.

        >>> wrap_in_compile().undo()
        """
        self._undo()


class _Change:
    """A table of patches, which stay in effect until every public function that applied them has released them.

    Args:
        table: the name of the module that defines the `PLACES` table. The module is imported only when TensorFlow is
            imported, because it uses TensorFlow.
    """

    def __init__(self, table: str):
        self._table = table
        self._patches = Patches()
        self._holders: set[str] = set()

    def hold(self, holder: str) -> bool:
        """Apply the patches on behalf of the public function `holder`. Return False if `holder` already holds them."""
        if holder in self._holders:
            return False
        if not self._holders:
            # From now on, the import hook watches both Keras packages. The patches for a package's submodules therefore
            # wait until the whole package has been imported.
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
    """Restore the loss scaling names of TensorFlow 1.13 to 2.15 in the modules where old code looks for them.

    Call the function before or after `import tensorflow`, once or repeatedly. It also has the effect of
    `wrap_in_compile`, and changes nothing else. `uninstall()` removes the names. The table in
    `tf_lossscale/legacy/patch_table.py` lists all names.

    >>> import tensorflow as tf
    >>> with install():
    ...     mixed_precision = tf.keras.mixed_precision.experimental
    ...     optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
    >>> optimizer.loss_scale().numpy().item()
    32768.0
    >>> hasattr(tf.keras.mixed_precision, "experimental")
    False

    Returns:
        A context manager. The end of its block removes the names, unless an earlier `install()` is still in effect.
    """
    _compile.hold("install")
    return Installation(uninstall, is_first=_names.hold("install"))


def uninstall() -> None:
    """Undo `install`. Objects created in the meantime stay usable.

    >>> uninstall()
    """
    _names.release("install")
    _compile.release("install")


def wrap_in_compile() -> Installation:
    """Make `compile` wrap optimizers in this package's LossScaleOptimizer under the "mixed_float16" policy.

    Without this call, `compile` wraps them in the Keras library's own class. Nothing else changes: `compile` wraps the
    same optimizers as before, and does not wrap an optimizer that is already wrapped in either class. Models that are
    already compiled keep their optimizer. The call applies to Keras 3 and to tf_keras. It may come before or after
    `import tensorflow`, and may be repeated.

    There is one exception: a global policy that `tf_lossscale.legacy.experimental` created can have a loss scale
    without being "mixed_float16". `compile` then wraps the optimizer, although Keras alone would not.

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
        An object whose `undo()` method makes `compile` use the library's own class again. The object is also a context
        manager: the end of its block calls `undo()`, unless an earlier `wrap_in_compile()` is still in effect.
    """
    return Installation(lambda: _compile.release("wrap_in_compile"), is_first=_compile.hold("wrap_in_compile"))
