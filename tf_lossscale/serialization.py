"""Our classes, made known to the Keras libraries: files with a wrapped optimizer load after `import tf_lossscale`."""

from __future__ import annotations

import importlib
import types

from tf_lossscale.libraries import import_hooks
from tf_lossscale.wrapper import families


def register_when_imported() -> None:
    """Register our classes with Keras 3 and tf_keras once these are imported; load nothing before.

    >>> register_when_imported()
    """
    for name in ("keras", "tf_keras"):
        import_hooks.when_imported(name, _register_for, after=["tensorflow"])


def _register_for(module: types.ModuleType) -> None:
    _register(families.library_in(module.__name__))  # the module may stand in sys.modules under another's name


def _register(library: str) -> None:
    from absl import logging

    try:
        from tf_lossscale.legacy import experimental

        if not families.load_all(library):  # a second Keras 2
            return
        experimental.register(library)
        importlib.import_module(f"tf_lossscale.optimizers.{families.MODULES[library]}")
    except (AttributeError, ImportError, TypeError) as error:  # or the user's `import keras` would fail
        logging.warning("Optimizers of %s cannot be wrapped by tf_lossscale: %s", library, error)
