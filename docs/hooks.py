"""For the site: pages made of notebooks, and reference pages.

The notebooks of `examples/` become pages of the folder `notebooks/`. A line `::: every name of MODULE` becomes the
documentation of each public name of the module.
"""

import importlib
import pathlib
import re
from typing import Any

import nbconvert
from mkdocs.structure.files import File

_NOTEBOOKS = pathlib.Path(__file__).parents[1] / "examples"
_EVERY_NAME = re.compile(r"^::: every name of (\S+)$", re.MULTILINE)


def names_of(module_name: str) -> list[str]:
    """Returns the full names of the public classes and functions of a module; LossScaleOptimizer is the first."""
    module = importlib.import_module(module_name)
    names = sorted(module.__all__, key=lambda name: name != "LossScaleOptimizer")
    return [f"{getattr(module, name).__module__}.{name}" for name in names if not name.startswith("__")]


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs once it has the list of files."""
    for path in sorted(_NOTEBOOKS.glob("*.ipynb")):
        exporter = nbconvert.MarkdownExporter()
        text, resources = exporter.from_filename(str(path), resources={"unique_key": path.stem})
        for name, content in {f"{path.stem}.md": text, **resources["outputs"]}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by MkDocs for each page."""
    del kwargs
    return _EVERY_NAME.sub(lambda line: "\n\n".join(f"::: {name}" for name in names_of(line[1])), markdown)
