"""The notebooks of `examples/` run, and print what is stored in them."""

import pathlib
import re

import nbformat
import pytest

from tests.cases import combinations, named
from tools import notebooks

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", combinations(named({path.stem: path for path in NOTEBOOKS}), usual=["migration"]))
def test_a_notebook_runs_and_prints_what_is_stored(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    stored = nbformat.read(path, as_version=4)
    assert notebooks.printed(notebooks.executed(path)) == notebooks.printed(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_on_the_site_and_shows_plots_and_no_path_of_a_machine(path):
    assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert not re.search(r"/(home|tmp|usr|root|work)/", "".join(output.get("text", "") for output in outputs))
