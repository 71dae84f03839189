"""The codemod agrees with the TensorFlow that is installed, and uses public names of LibCST only."""

import ast
import importlib.util
import pathlib

import pytest

from tf_lossscale.migrate import codemod
from tf_lossscale.migrate.codemod import names

TENSORFLOW = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent


def source_of(module):
    return TENSORFLOW.joinpath(*module.split(".")[1:]).with_suffix(".py")


@pytest.mark.parametrize("module", names.KEPT)
def test_tensorflow_still_has_the_private_names_that_are_left(module):
    body = ast.parse(source_of(module).read_text()).body
    defined = {each.name for each in body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    assert set(names.KEPT[module].split()) <= defined


@pytest.mark.parametrize(("old", "new"), names.MOVED.items())
def test_private_modules_that_moved_are_where_the_table_says(old, new):
    assert source_of(new).exists()
    assert not source_of(old).exists()


FILES = sorted(pathlib.Path(codemod.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_private_name_of_libcst_is_used(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("libcst")]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    used = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    used += [name for name in modules if name.startswith("libcst")]
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    used += [f"libcst.{node.attr}" for node in attributes if node.value.id in ("cst", "m")]
    assert not [name for name in used if any(part.startswith("_") for part in name.split("."))]
