"""Runs the notebooks of `examples/` and stores their outputs: `python -m tools.notebooks`."""

import os
import pathlib
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


def executed(path: pathlib.Path) -> Any:
    """Return a notebook with the outputs of a run in a new kernel, without what libraries write to stderr."""
    os.environ["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def printed(notebook: Any) -> list[str]:
    """Return the text of each code cell's outputs."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(each.get("text") or each.data.get("text/plain", "") for each in cell.outputs) for cell in cells]


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(path)
