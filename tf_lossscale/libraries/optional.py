"""Optional libraries, imported when needed. The error for a missing library quotes the command that installs it."""

from __future__ import annotations

import importlib
from typing import Any


def load(module: str, extra: str) -> Any:
    """Import and return a module of an optional library. The error for a missing library says how to install it.

    >>> load("math", "demo").pi > 3
    True

    Args:
        module: the dotted name to import.
        extra: the name of this package's extra that installs the library; "" if there is none.

    Returns:
        The module.

    Raises:
        ImportError: the library is not installed, or its import fails.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            # The library is installed, but a module that it imports is missing. The error names that module.
            raise
        remedy = f"Install it: pip install {library}"
        if extra:
            remedy = f"In a clone of tf-lossscale install the extra {extra!r}: pip install '.[{extra}]'"
        raise ImportError(f"This feature needs {library}, which is not installed. {remedy}") from error
