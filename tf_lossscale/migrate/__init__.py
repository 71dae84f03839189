"""Moving house: old source code, old checkpoints and old models.

The codemod's modules: `names` (what is old, a table), `project` (which of a project's modules pass old names on),
`nesting` (what can be parsed), `tree` and `resolve` (what a name means where it stands), `arguments` and `calls` (what
a call becomes); `refusals`, `policies`, `plan`, `objects`, `unseen` and `imports` (what is to be done, in this order),
`edits` (where they note it),
`rewrite` (does it), `codemod` (one file), `files` (many files), `report`, `command`.
`checkpoints` is the room of old files: `restore` brings an old optimizer's state into today's, `saver_names` maps the
names in TensorFlow 1's files.
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

        room = "saver_names" if name == "saver_names" else "restore"
        return getattr(importlib.import_module(f"tf_lossscale.migrate.checkpoints.{room}"), name)
    raise AttributeError(f"module 'tf_lossscale.migrate' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
