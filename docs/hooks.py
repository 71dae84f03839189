"""For the site: a line `::: every name of MODULE` becomes the documentation of each public name, wherever it lives."""

import importlib
import re
from typing import Any

_EVERY_NAME = re.compile(r"^::: every name of (\S+)$", re.MULTILINE)


def names_of(module_name: str) -> list[str]:
    """Returns the full names of the public classes and functions of a module; LossScaleOptimizer is the first."""
    module = importlib.import_module(module_name)
    names = sorted(module.__all__, key=lambda name: name != "LossScaleOptimizer")
    return [f"{getattr(module, name).__module__}.{name}" for name in names if not name.startswith("__")]


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by MkDocs for each page."""
    del kwargs
    return _EVERY_NAME.sub(lambda line: "\n\n".join(f"::: {name}" for name in names_of(line[1])), markdown)
