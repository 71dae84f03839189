"""Optional libraries: imported when needed; the error for a missing one has the line that installs it."""

from __future__ import annotations

import importlib
from typing import Any


def load(module: str, extra: str) -> Any:
    """Return an optional library's module, or say how to install it.

    >>> load("math", "train").pi > 3
    True

    Args:
        module: the dotted name to import.
        extra: the extra of this package that installs it.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ImportError(
            f"This needs {library}, which is not installed. In a clone of tf-lossscale install the extra {extra!r}: "
            f"pip install '.[{extra}]'"
        ) from error
