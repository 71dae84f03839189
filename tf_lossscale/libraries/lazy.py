"""Packages whose public names are imported when they are first used, so that importing the package is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` functions of a package.

    >>> __getattr__, __dir__ = names("json", {"JSONDecoder": "decoder", "tool": ""})
    >>> __getattr__("JSONDecoder").__module__, __getattr__("tool").__name__, "tool" in __dir__()
    ('json.decoder', 'json.tool', True)

    Args:
        package: the name of the package.
        homes: a dict from each name to the module in the package that defines it; "" if the name is itself a module.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(f"{package}.{homes[name] or name}")
        return getattr(module, name) if homes[name] else module

    return getattr_, lambda: sorted({*homes, *getattr(sys.modules[package], "__all__", ())})
