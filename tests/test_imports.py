"""Imports run one way, and importing the package costs next to nothing."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import tf_lossscale

PACKAGE = pathlib.Path(tf_lossscale.__file__).parent
FAMILIES = "tf_lossscale.families"

# Each room may import from those before it.
ROOMS = (
    "types",
    "errors",
    "writing",
    "libraries",
    "core",
    "diagnosis",
    "wrapper",
    "families",
    "layers",
    "training",
    "legacy",
    "amp",
    "optimizers",
    "migrate",
    "serialization",
    "cli",
)
HEAVY = {"keras", "tf_keras", "tensorflow", "tensorflow_probability", "sonnet", "matplotlib", "sklearn", "tqdm"}


def position(module):
    room = module.removeprefix("tf_lossscale").lstrip(".").partition(".")[0]
    return ROOMS.index(room) if module.startswith("tf_lossscale.") and room in ROOMS else None


def imported(path, nodes=ast.walk):
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_imports_run_one_way_and_only_a_family_knows_its_library():
    of_families = position(f"{FAMILIES}.keras3")
    for name, path in MODULES.items():
        room, targets = position(name), set(imported(path))
        if room is None:
            continue
        for target in targets:
            if target.startswith("tf_lossscale.") and position(target) is not None:
                assert position(target) <= room, f"{name} must not import {target}"
                if room == of_families == position(target) and target.count(".") > 1:
                    # An adapter inside the package may use the wrapper class of families that users register.
                    assert target.startswith((name, f"{FAMILIES}.register_family")), "a family knows no other family"
        if room < of_families:
            assert not {target.split(".")[0] for target in targets} & {"keras", "tf_keras", "sonnet"}, name


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: set(imported(path, ast.iter_child_nodes)) & set(MODULES) for name, path in MODULES.items()}
    for name, targets in graph.items():
        targets -= {name, *(name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1))}  # packages it is in
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_a_step_has_no_assignment_expressions_which_autograph_of_tensorflow_2_15_does_not_convert():
    for room in ("core", "wrapper", "families", "training"):
        for path in (PACKAGE / room).glob("*.py"):
            assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.NamedExpr)], path


@pytest.mark.parametrize("module", ["precision", "plotting"])
def test_reports_on_precision_and_plots_do_without_tensorflow(module):
    assert "tensorflow" not in imported(PACKAGE / "diagnosis" / f"{module}.py")


@pytest.mark.slow
def test_importing_the_package_loads_none_of_the_heavy_libraries_and_costs_under_5_percent_of_tensorflow():
    code = """
import sys, time
start = time.process_time(); import tf_lossscale; ours = time.process_time() - start
loaded = [name for name in sys.modules if name.split(".")[0] in {heavy}]
start = time.process_time(); import tensorflow; theirs = time.process_time() - start
print(loaded, ours / theirs)
""".replace("{heavy}", repr(HEAVY))
    loaded, ratio = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.rsplit(maxsplit=1)
    assert loaded == "[]"
    assert float(ratio) < 0.05
