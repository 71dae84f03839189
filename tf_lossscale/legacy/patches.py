"""Reversible changes to the modules of other libraries."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from tf_lossscale.libraries import import_hooks

_MISSING = object()

Put = Callable[["Patches", types.ModuleType], None]


class Patches:
    """A set of changes to modules. `undo` reverts all of them.

    >>> import math
    >>> patches = Patches()
    >>> patches.put(math, {"tau2": 12.56})
    >>> math.tau2
    12.56
    >>> patches.undo()
    >>> hasattr(math, "tau2")
    False
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def when_imported(self, name: str, put: Put) -> None:
        """Call `put(self, module)` as soon as the module with this name is imported."""
        self._undo.callback(import_hooks.when_imported(name, lambda module: put(self, module)))

    def put(self, module: Any, names: Mapping[str, Any]) -> None:
        """Set attributes of a module or class. A module's `Namespace` values can then be imported as submodules.

        Args:
            module: a module or class of another library.
            names: a dict from name to value.
        """
        for name, value in names.items():
            before = getattr(module, name, _MISSING)
            setattr(module, name, value)
            self._undo.callback(_restore, module, name, value, before)
            if isinstance(value, Namespace):
                self._make_importable(f"{module.__name__}.{name}", value)

    def replace(self, module: types.ModuleType, names: Mapping[str, Any]) -> None:
        """Replace a module in `sys.modules` with a copy that has new values.

        The module's own functions still use the old values.

        Args:
            module: a private module of another library.
            names: a dict from name to value.
        """
        parent, _, leaf = module.__name__.rpartition(".")
        copy = types.ModuleType(module.__name__, module.__doc__)
        copy.__dict__.update({**vars(module), **names})
        self._enter(module.__name__, copy)
        self.put(sys.modules[parent], {leaf: copy})

    def _make_importable(self, name: str, module: Namespace) -> None:
        module.__name__ = name
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._enter(name, module)
        for attribute, value in vars(module).items():
            if isinstance(value, Namespace):
                self._make_importable(f"{name}.{attribute}", value)

    def _enter(self, name: str, module: types.ModuleType) -> None:
        before = sys.modules.get(name)
        sys.modules[name] = module
        self._undo.callback(_restore_entry, name, module, before)

    def undo(self) -> None:
        """Undo all changes in reverse order."""
        self._undo.close()


class Namespace(types.ModuleType):
    """A module without a source file, made from a dict.

    >>> Namespace("contrib", {"answer": 42}).answer
    42

    Args:
        name: the dotted name.
        names: a dict from name to value.
    """

    def __init__(self, name: str, names: Mapping[str, Any]):
        super().__init__(name, f"{name}, put back by tf_lossscale.install().")
        self.__dict__.update(names, __path__=[])


def _restore(module: Any, name: str, ours: Any, before: Any) -> None:
    if vars(module).get(name) is not ours:
        # Other code has changed the attribute in the meantime.
        return
    if before is _MISSING:
        delattr(module, name)
    else:
        setattr(module, name, before)


def _restore_entry(name: str, ours: types.ModuleType, before: types.ModuleType | None) -> None:
    if sys.modules.get(name) is ours:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
