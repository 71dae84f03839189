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


Change = Callable[["Changes", Any], None]


class Changes:
    """A set of changes to modules and classes. `undo` reverts all of them.

    Attributes that other code has changed in the meantime are kept.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self.undo: Callable[[], None] = self._undo.close

    def when_imported(self, name: str, change: Change) -> None:
        """Call `change(self, module)` as soon as the module with this name is imported."""

        def action(module: types.ModuleType) -> None:
            with optional.missing_names_reported(name):
                change(self, module)

        self._undo.callback(import_hooks.when_imported(name, action))

    def put(self, owner: Any, names: Mapping[str, Any]) -> None:
        """Set attributes of a module or class."""
        for name, value in names.items():
            if not isinstance(value, dict):
                self._set(owner, name, value)
            elif not hasattr(owner, name):
                self._set(owner, name, self._new_module(f"{owner.__name__}.{name}", value))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        # An entry of `sys.modules` is set in the same way as an attribute.
        is_dict = isinstance(owner, dict)
        get, set_, delete = (dict.get, dict.__setitem__, dict.__delitem__) if is_dict else (getattr, setattr, delattr)
        before = get(owner, name, _MISSING)
        set_(owner, name, value)

        def restore() -> None:
            if (owner if is_dict else vars(owner)).get(name) is not value:
                return
            if before is _MISSING:
                delete(owner, name)
            else:
                set_(owner, name, before)

        self._undo.callback(restore)

    def change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set an attribute to `make(value)`, where `value` is what it was. If the owner lacks it, log a warning."""
        with optional.missing_names_reported(f"{owner.__name__}.{name}"):
            self._set(owner, name, make(getattr(owner, name)))

    def replace(self, module: types.ModuleType, names: Mapping[str, Any]) -> None:
        """Replace a module in `sys.modules` with a copy that has new values.

        The module's own functions still use the old values.
        """
        parent, _, leaf = module.__name__.rpartition(".")
        copy = types.ModuleType(module.__name__, module.__doc__)
        vars(copy).update({**vars(module), **names})
        self._set(sys.modules, module.__name__, copy)
        self._set(sys.modules[parent], leaf, copy)

    def _new_module(self, name: str, names: Mapping[str, Any]) -> types.ModuleType:
        module = types.ModuleType(name, f"{name}, restored by tf_lossscale.install().")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        self._set(sys.modules, name, module)
        self.put(module, names)
        return module
