"""Migrates source code, checkpoints and models from old optimizers to current ones.

`codemod` rewrites source code. `checkpoints` reads and restores checkpoints and saved models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_lossscale.migrate.checkpoints.restore import Restored, restore
    from tf_lossscale.migrate.checkpoints.saver_names import saver_names

__all__ = ["Restored", "restore", "saver_names"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        module = "saver_names" if name == "saver_names" else "restore"
        return getattr(importlib.import_module(f"tf_lossscale.migrate.checkpoints.{module}"), name)
    raise AttributeError(f"module 'tf_lossscale.migrate' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
