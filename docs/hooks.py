"""For the site: pages made of notebooks, and reference pages.

The notebooks of `examples/` become pages of the folder `notebooks/`. A line `::: MODULE: NAME, NAME` becomes the
documentation of these public names of the module, wherever they are defined.
"""

import importlib
import pathlib
import re
from typing import Any

import nbconvert
from mkdocs.structure.files import File

_NOTEBOOKS = pathlib.Path(__file__).parents[1] / "examples"
_NAMES = re.compile(r"^::: (tf_lossscale\S*): (.+)$", re.MULTILINE)


def names_on(page: str) -> list[tuple[str, str]]:
    """Return the module and name of each class and function that a page documents."""
    return [(line[1], name) for line in _NAMES.finditer(page) for name in line[2].split(", ")]


def _documentation(line: re.Match[str]) -> str:
    module = importlib.import_module(line[1])
    homes = [f"{getattr(module, name).__module__}.{name}" for name in line[2].split(", ")]
    return "\n\n".join(f"::: {home}\n    options:\n      heading_level: 3" for home in homes)


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
    return _NAMES.sub(_documentation, markdown)
