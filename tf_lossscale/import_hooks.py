"""Does something with a module once it is imported: at once if it is already, else when it will be."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence

Action = Callable[[types.ModuleType], None]


def when_imported(module: str, action: Action) -> Callable[[], None]:
    """Calls `action` with a module as soon as it is imported, and loads nothing for that.

    If importing it is part of importing its whole package, the action waits until that package is complete: what
    `action` imports finds no half-made modules.

    >>> seen = []
    >>> cancel = when_imported("json.tool", lambda module: seen.append(module.__name__))
    >>> import json.tool
    >>> seen
    ['json.tool']
    >>> cancel()

    Args:
        module: the dotted name, as in `sys.modules`. Importing the same file by another name is another module.
        action: is called once, with the module. What it raises comes out of the import statement.

    Returns:
        A function that cancels the action. Nothing is left in `sys.meta_path` once all are done or cancelled.
    """
    if sys.modules.get(module) is not None:  # None stands there for a module that must not be imported
        action(sys.modules[module])
        return lambda: None
    _finder.watch(module, action)
    return lambda: _finder.forget(module, action)


class _Finder(importlib.abc.MetaPathFinder):
    """Has the loaders of watched modules say when they are done; the finding itself is left to the others."""

    def __init__(self) -> None:
        self._watched: dict[str, list[Action]] = {}
        self._depth = threading.local()

    def watch(self, name: str, action: Action) -> None:
        if not self._watched:
            sys.meta_path.insert(0, self)
        self._watched.setdefault(name.partition(".")[0], [])
        self._watched.setdefault(name, []).append(action)

    def forget(self, name: str, action: Action) -> None:
        if action in self._watched.get(name, []):
            self._watched[name].remove(action)
        if not any(self._watched.values()):
            self._watched.clear()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._watched:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._hear_the_end_of(spec)
                return spec
        return None

    def _hear_the_end_of(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # from here on the loader is what it was
            depth = getattr(self._depth, "value", 0)
            self._depth.value = depth + 1
            try:
                execute(module)
            finally:
                self._depth.value = depth
            if depth == 0:
                self._run_all()

        vars(loader)["exec_module"] = exec_module

    def _run_all(self) -> None:
        for name, actions in list(self._watched.items()):
            for action in list(actions) if sys.modules.get(name) is not None else ():
                self.forget(name, action)
                action(sys.modules[name])


_finder = _Finder()
