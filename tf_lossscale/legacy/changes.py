"""Reversible changes to the modules of other libraries."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from tf_lossscale.libraries import import_hooks, optional

_MISSING = object()


class _Imported:
    def __init__(self) -> None:
        self.__dict__ = sys.modules


#: The attributes of this object are the entries of `sys.modules`. `put` can therefore change both, and `undo` both.
_IMPORTED = _Imported()

Change = Callable[["Changes", Any], None]


class Changes:
    """A set of changes to modules and classes. `undo` reverts all of them.

    >>> import math
    >>> changes = Changes()
    >>> changes.put(math, {"tau2": 12.56})
    >>> math.tau2
    12.56
    >>> changes.undo()
    >>> hasattr(math, "tau2")
    False
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def when_imported(self, name: str, change: Change) -> None:
        """Call `change(self, module)` as soon as the module with this name is imported."""

        def action(module: types.ModuleType) -> None:
            with optional.missing_names_reported(name):
                change(self, module)

        self._undo.callback(import_hooks.when_imported(name, action))

    def put(self, owner: Any, names: Mapping[str, Any]) -> None:
        """Set attributes of a module or class.

        Args:
            owner: a module or class of another library.
            names: a dict from name to value. If a value is a dict, the name is a submodule. If the submodule does not
                exist, a new one with the names in this dict is made.
        """
        for name, value in names.items():
            before = getattr(owner, name, _MISSING)
            if isinstance(value, dict):
                if before is not _MISSING:
                    continue
                value = self._new_module(f"{owner.__name__}.{name}", value)
            setattr(owner, name, value)
            self._undo.callback(_restore, owner, name, value, before)

    def change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set an attribute to `make(value)`, where `value` is what it was. If the owner lacks it, log a warning.

        Args:
            owner: a module or class of another library.
            name: the attribute's name.
            make: a function from the old value to the new one.
        """
        with optional.missing_names_reported(f"{owner.__name__}.{name}"):
            self.put(owner, {name: make(getattr(owner, name))})

    def replace(self, module: types.ModuleType, names: Mapping[str, Any]) -> None:
        """Replace a module in `sys.modules` with a copy that has new values.

        The module's own functions still use the old values.

        Args:
            module: a private module of another library.
            names: a dict from name to value.
        """
        parent, _, leaf = module.__name__.rpartition(".")
        copy = types.ModuleType(module.__name__, module.__doc__)
        vars(copy).update({**vars(module), **names})
        self.put(_IMPORTED, {module.__name__: copy})
        self.put(sys.modules[parent], {leaf: copy})

    def _new_module(self, name: str, names: Mapping[str, Any]) -> types.ModuleType:
        module = types.ModuleType(name, f"{name}, restored by tf_lossscale.install().")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(
            {
                key: self._new_module(f"{name}.{key}", value) if isinstance(value, dict) else value
                for key, value in names.items()
            },
            __path__=[],
        )
        self.put(_IMPORTED, {name: module})
        return module

    def undo(self) -> None:
        """Undo all changes in reverse order. Keep attributes that other code has changed in the meantime."""
        self._undo.close()


def _restore(owner: Any, name: str, ours: Any, before: Any) -> None:
    if vars(owner).get(name) is not ours:
        return
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
