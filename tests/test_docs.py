"""The documentation site: it builds without a warning, and nothing public is missing from it."""

import ast
import importlib
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

import tf_lossscale
from tf_lossscale import cli
from tools import plots

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


SUBPACKAGES = ["", ".amp", ".legacy", ".migrate", ".optimizers"]


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_every_public_name_of_a_subpackage_is_in_the_reference_once(subpackage):
    names_on = runpy.run_path(str(DOCS / "hooks.py"))["names_on"]
    pages = [page.read_text() for page in (DOCS / "reference").glob("*.md")]
    shown = [name for page in pages for module, name in names_on(page) if module == f"tf_lossscale{subpackage}"]
    public = importlib.import_module(f"tf_lossscale{subpackage}").__all__
    assert sorted(shown) == sorted(name for name in public if not name.startswith("__"))


def test_every_command_is_in_the_reference():
    page = (DOCS / "reference" / "command.md").read_text()
    for command in cli._COMMANDS:
        assert f"| `tf-lossscale {command}" in page, command


def test_the_plots_show_what_the_text_says(tmp_path):
    zeros = plots.draw_gradients(tmp_path / "gradients.svg")
    assert zeros["without a scale"] > 0.9
    assert zeros["with a scale of 2**15"] < 0.3
    assert 3 < plots.draw_scale(tmp_path / "scale.svg", steps=10) < 10


PACKAGE = ROOT / "tf_lossscale"


def defined_in(path):
    """The names of all functions, methods and classes in a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def stops_of_the_tour():
    stops = re.split(r"\n(?=\d\. |\n)", (DOCS / "tour.md").read_text())
    return [pytest.param(re.findall(r"`([^`\n]+)`", stop), id=str(i)) for i, stop in enumerate(stops) if "`" in stop]


@pytest.mark.table("1", "7", "6", "3", every=1)
@pytest.mark.parametrize("quoted", stops_of_the_tour())
def test_the_tour_names_files_that_exist_and_functions_where_they_are(quoted):
    files = [PACKAGE / name for name in quoted if name.endswith(".py")]
    assert [file for file in files if not file.exists()] == []
    names = {name for file in files or PACKAGE.rglob("*.py") for name in defined_in(file)}
    public = set(dir(tf_lossscale.LossScaleOptimizer)) | {"merge_call", "if", "iterations"}
    functions = [name for name in quoted if re.fullmatch(r"\w+", name)]
    elsewhere = {name for file in PACKAGE.rglob("*.py") for name in defined_in(file)}
    assert [name for name in functions if name not in names | public] == [] or not files
    assert [name for name in functions if name not in elsewhere | public] == []


@pytest.mark.parametrize("folder", ["core", "families", "wrapper"])
def test_the_tree_of_the_architecture_has_every_module_once(folder):
    tree = (DOCS / "architecture.md").read_text().split("```")[1]
    depth = 2 + 2 * folder.count("/")
    part = re.search(rf"^ {{{depth}}}{folder.rpartition('/')[2]}/ .*\n((?: {{{depth + 2},}}.*\n)+)", tree, re.MULTILINE)
    listed = re.findall(rf"^ {{{depth + 2}}}(\w+\.py) ", part[1], re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in (PACKAGE / folder).glob("*.py") if p.name != "__init__.py")


@pytest.mark.slow
def test_the_plots_are_drawn_whole(tmp_path):
    _, skipped, (skipped_in_the_demo, counted) = plots.main([str(tmp_path)])
    assert 5 < skipped < 20
    assert skipped_in_the_demo < 10
    assert counted == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (DOCS / "images").glob("*.svg"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_shows_examples_as_code(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "optimizer.html").read_text()
    assert 'id="tf_lossscale.wrapper.optimizer.LossScaleOptimizer.get_scaled_loss"' in page
    assert "<blockquote>" not in page
    assert "::: tf_lossscale" not in page
