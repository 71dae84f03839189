"""The table of old names agrees with the TensorFlow that is installed."""

import ast
import importlib.util
import pathlib

import pytest

from tf_lossscale.migrate.codemod import names

TENSORFLOW = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent


def source_of(module):
    return TENSORFLOW.joinpath(*module.split(".")[1:]).with_suffix(".py")


@pytest.mark.parametrize("module", names.KEPT)
def test_tensorflow_still_has_the_private_names_that_are_left(module):
    body = ast.parse(source_of(module).read_text()).body
    defined = {each.name for each in body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    assert set(names.KEPT[module]) <= defined


@pytest.mark.parametrize(("old", "new"), names.MOVED.items())
def test_private_modules_that_moved_are_where_the_table_says(old, new):
    assert source_of(new).exists()
    assert not source_of(old).exists()
