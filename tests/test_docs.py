"""The documentation: nothing public is missing from it, and what it names exists. `test_search.py` builds the site."""

import ast
import importlib
import inspect
import operator
import pathlib
import re
import runpy
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests.processes import call
from tf_lossscale import cli
from tools import plots

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


SUBPACKAGES = ["", ".amp", ".diagnosis", ".legacy", ".migrate", ".optimizers"]


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_every_public_name_of_a_subpackage_is_in_the_reference_once(subpackage):
    names_on = runpy.run_path(str(DOCS / "hooks.py"))["names_on"]
    pages = [page.read_text() for page in (DOCS / "reference").glob("*.md")]
    shown = [name for page in pages for module, name in names_on(page) if module == f"tf_lossscale{subpackage}"]
    public = importlib.import_module(f"tf_lossscale{subpackage}").__all__
    assert sorted(shown) == sorted(name for name in public if not name.startswith("__"))


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_every_public_member_has_a_docstring(subpackage):
    module = importlib.import_module(f"tf_lossscale{subpackage}")
    public = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
    members = {
        f"{name}.{member}": value
        for name, owner in public.items()
        if inspect.isclass(owner)
        for member, value in inspect.getmembers(owner)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
        if getattr(getattr(value, "fget", value), "__module__", "").startswith("tf_lossscale")
    }
    callables = {name: value for name, value in public.items() if callable(value)}
    assert [name for name, value in {**callables, **members}.items() if not inspect.getdoc(value)] == []


def test_every_attribute_in_a_code_span_exists():
    shared = tf_lossscale.SharedLossScale()
    optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(), loss_scale=shared)
    objects = {"optimizer": optimizer, "scale": shared, "shared": shared, "tf_lossscale": tf_lossscale}
    attribute = re.compile(rf"(?<![\w.-])({'|'.join(objects)})\.((?:(?!py\b)[a-zA-Z_]\w*\.?)+)")
    pages = {ROOT / "README.md", *DOCS.glob("**/*.md")} - {DOCS / "migration_table.md"}  # it shows old code
    missing, seen = [], 0
    for path in pages:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for owner, names in attribute.findall(" ".join(re.findall(r"`([^`]+)`", text))):
            seen += 1
            try:
                operator.attrgetter(names.strip("."))(objects[owner])
            except AttributeError:
                missing.append((path.name, f"{owner}.{names}"))
    assert seen > 50
    assert missing == []


def test_every_command_is_in_the_reference():
    page = (DOCS / "reference" / "command.md").read_text()
    for command in cli._COMMANDS:
        assert f"| `tf-lossscale {command}" in page, command


@pytest.mark.slow
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


def test_the_tour_of_a_step_names_files_that_exist_and_functions_where_they_are():
    public = set(dir(tf_lossscale.LossScaleOptimizer)) | {"merge_call", "if", "iterations"}
    _, tour = (ROOT / "ARCHITECTURE.md").read_text().split("\n## One step, from call to counter\n")
    for stop in re.split(r"\n(?=\d\. |\n)", tour):
        quoted = re.findall(r"`([^`\n]+)`", stop)
        files = [PACKAGE / name for name in quoted if name.endswith(".py")] or PACKAGE.rglob("*.py")
        functions = {name for name in quoted if re.fullmatch(r"\w+", name)}
        assert functions - public <= {name for file in files for name in defined_in(file)}, stop


@pytest.mark.parametrize("folder", ["core", "families", "wrapper"])
def test_the_tree_of_the_architecture_has_every_module_once(folder):
    tree = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    depth = 2 + 2 * folder.count("/")
    part = re.search(rf"^ {{{depth}}}{folder.rpartition('/')[2]}/ .*\n((?: {{{depth + 2},}}.*\n)+)", tree, re.MULTILINE)
    listed = re.findall(rf"^ {{{depth + 2}}}(\w+\.py) ", part[1], re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in (PACKAGE / folder).glob("*.py") if p.name != "__init__.py")


@pytest.mark.exhaustive
def test_the_examples_of_docstrings_work_with_keras_2():
    # This example prints the name of the module for Keras 3.
    other = "tf_lossscale/optimizers/__init__.py::tf_lossscale.optimizers"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "tf_lossscale", "--deselect", other]
    run = call([sys.executable, *command], ROOT, TF_USE_LEGACY_KERAS="1")
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.exhaustive
def test_the_plots_are_drawn_whole(tmp_path):
    _, skipped, (skipped_in_the_demo, counted) = plots.main([str(tmp_path)])
    assert 5 < skipped < 20
    assert skipped_in_the_demo < 10
    assert counted == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (DOCS / "images").glob("*.svg"))


def test_every_row_of_the_differences_names_a_test_that_exists():
    rows = re.findall(r"^\| (?!what).* \| (.*) \|$", (DOCS / "differences.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for tested in rows:
        path, _, name = tested.strip("` ").partition("::")
        functions = defined_in(ROOT / path)
        assert not name or name in functions, tested
        assert any(function.startswith("test_") for function in functions), tested


def test_links_between_documents_lead_somewhere():
    for path in [*(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")), *DOCS.glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)
