"""`install` and `wrap_in_compile`, which change other libraries on request. This module does not import TensorFlow."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from tf_lossscale.legacy.changes import Changes

# Each call of `install` and `undo` changes everything or, if another thread is faster, nothing.
_lock = threading.RLock()


class Installation:
    """The return value of `install` and `wrap_in_compile`. A `with` statement undoes their changes at its end.

    >>> with wrap_in_compile() as installation:
    ...     pass
    """

    def __init__(self, holder: str, *changes: _Change):
        self._holder, self._changes = holder, changes
        with _lock:
            # The end of a `with` block inside the block of an earlier call undoes nothing.
            self._is_first = all([change.hold(holder) for change in changes])

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
        with _lock:
            for change in self._changes:
                change.release(self._holder)


class _Change(Changes):
    """The changes in a module's `places()`, which stay until every function that made them has released them.

    The module is imported only when TensorFlow is imported, because it uses TensorFlow.
    """

    def __init__(self, module: str):
        super().__init__()
        self._module = module
        self._holders: set[str] = set()

    def hold(self, holder: str) -> bool:
        """Make the changes on behalf of the public function `holder`. Return False if `holder` already holds them."""
        if holder in self._holders:
            return False
        if not self._holders:
            # From now on, the import hook watches both Keras packages. The changes to a package's submodules therefore
            # wait until the whole package has been imported.
            for package in ("keras", "tf_keras"):
                self.when_imported(package, lambda changes, module: None)
            self.when_imported("tensorflow", lambda changes, module: self._make_all())
        self._holders.add(holder)
        return True

    def release(self, holder: str) -> None:
        self._holders.discard(holder)
        if not self._holders:
            self.undo()

    def _make_all(self) -> None:
        for name, change in importlib.import_module(f"tf_lossscale.legacy.{self._module}").places().items():
            self.when_imported(name, change)


_names = _Change("old_names")
_compile = _Change("wrap_in_compile")


def install() -> Installation:
    """Restore the loss scaling names of TensorFlow 1.13 to 2.15 in the modules where old code looks for them.

    Call the function before or after `import tensorflow`, once or repeatedly. It also has the effect of
    `wrap_in_compile`, restores `strategy.experimental_run_v2`, and changes nothing else. The table in
    `tf_lossscale/legacy/table.py` lists all names. If the installed TensorFlow or Keras lacks something that a name
    needs, a warning says so, and the other names are set.

    >>> import tensorflow as tf
    >>> with install():
    ...     mixed_precision = tf.keras.mixed_precision.experimental
    ...     optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
    >>> optimizer.loss_scale().numpy().item()
    32768.0
    >>> hasattr(tf.keras.mixed_precision, "experimental")
    False

    Returns:
        An object whose `undo()` method removes the names. The object is also a context manager: the end of its block
        calls `undo()`, unless an earlier `install()` is still in effect.
    """
    return Installation("install", _names, _compile)


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
    return Installation("wrap_in_compile", _compile)
