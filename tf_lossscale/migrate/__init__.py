"""Migrates source code, checkpoints and models from old optimizers to current ones.

`codemod` rewrites source code. `checkpoints` reads and restores checkpoints and saved models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_lossscale.libraries import lazy

if TYPE_CHECKING:
    from tf_lossscale.migrate.checkpoints.restore import Restored, restore
    from tf_lossscale.migrate.checkpoints.saver_names import saver_names

__all__ = ["Restored", "restore", "saver_names"]

_HOMES = {"saver_names": "checkpoints.saver_names", **dict.fromkeys(("Restored", "restore"), "checkpoints.restore")}
__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = lazy.names(__name__, _HOMES)
