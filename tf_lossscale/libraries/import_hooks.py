"""Runs an action when a module is imported, or immediately if the module has already been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

Action = Callable[[types.ModuleType], None]


def when_imported(module: str, action: Action, after: Sequence[str] = ()) -> Callable[[], None]:
    """Call `action` with a module once the program has imported the module.

    The action runs after the current thread has finished importing tf_lossscale and every package that a pending
    action waits for. Imports in the action therefore never find half-initialized modules.
    """
    pending = _Pending(module, frozenset({module, *after}), action)
    _finder.watch(pending)
    return lambda: _finder.forget(pending)


class _Pending(NamedTuple):
    module: str
    needed: frozenset[str]
    action: Action


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of watched modules to learn when an import ends. Other finders locate the modules."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._watched: set[str] = set()
        self._depth = threading.local()

    def watch(self, pending: _Pending) -> None:
        self._pending.append(pending)
        self._update()
        if self._depth_here() == 0:
            self._run([pending])

    def forget(self, pending: _Pending) -> None:
        self._pending = [other for other in self._pending if other is not pending]
        self._update()

    def _update(self) -> None:
        needed = {name for pending in self._pending for name in pending.needed}
        self._watched = needed | {name.partition(".")[0] for name in needed}
        if self._pending and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not self._pending and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._watched and not fullname.startswith(_OURS):
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._report_the_end_of(spec)
                return spec
        return None

    def _report_the_end_of(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: types.ModuleType) -> None:
            # Restore the loader's own `exec_module`.
            vars(loader).pop("exec_module", None)
            depth = self._depth_here()
            self._depth.value = depth + 1
            failed = spec.name.partition(".")[0]
            try:
                execute(module)
                failed = ""
            finally:
                self._depth.value = depth
                # Even a failed import may have imported other watched packages.
                if depth == 0:
                    self._run([pending for pending in self._pending if not _is_part(pending, failed)])

        vars(loader)["exec_module"] = exec_module

    def _depth_here(self) -> int:
        """Return the current depth of nested imports of watched modules in this thread."""
        return getattr(self._depth, "value", 0)

    def _run(self, several: Sequence[_Pending]) -> None:
        for pending in several:
            # The value None in sys.modules blocks the import of a module. It does not mean that the module was
            # imported.
            if pending in self._pending and all(sys.modules.get(name) is not None for name in pending.needed):
                self.forget(pending)
                pending.action(sys.modules[pending.module])


def _is_part(pending: _Pending, package: str) -> bool:
    return package in {name.partition(".")[0] for name in pending.needed}


_OURS = "tf_lossscale."
_finder = _Finder()
