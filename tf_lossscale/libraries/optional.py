"""Imports that may fail: a missing library is an error that quotes its installation, a missing name is a warning."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


def load(module: str, extra: str) -> Any:
    """Import and return a module of an optional library. The error for a missing library says how to install it."""
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


@contextlib.contextmanager
def missing_names_reported(what: str) -> Iterator[None]:
    """Log a warning instead of raising an error if a library lacks a name or module."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        # Imported only here, because `tf-lossscale run` imports this module in each process that a program starts.
        from absl import logging

        logging.warning("tf_lossscale leaves %s as it is: %s.", what, error)
