"""Every test that `originals_tests.md` names exists; a row names one, or says "none" and why."""

import ast
import functools
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parents[1]
LINES = (TESTS / "conformance" / "originals_tests.md").read_text().splitlines()
ROWS = [line.strip("| ").split(" | ") for line in LINES if re.match(r"\| (?!original)", line)]
SUITES = [line for line in LINES if line.startswith("## ")]


@functools.cache
def names_in(path):
    folder = TESTS.parent if path.startswith("tf_function_tests/") else TESTS
    return {node.name for node in ast.parse((folder / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0].split("`")[1] if "`" in row[0] else row[0] for row in ROWS])
def test_every_original_has_a_test_that_exists_or_a_reason(row):
    original, ours = row
    assert original
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ours)
    assert ours.count("::") == len(named), "a test that is not written as `path.py::test_name`"
    assert named or re.match(r"none: .{20,}", ours)
    for path, name in named:
        assert name in names_in(path), f"{path}::{name}"


def test_every_suite_is_in_the_table_and_no_original_is_named_twice():
    assert len(SUITES) == 10
    assert len(ROWS) > 80
    for _, section in zip(SUITES, "\n".join(LINES).split("\n## ")[1:]):
        cells = [line.split(" | ")[0] for line in section.splitlines() if re.match(r"\| (?!original)", line)]
        names = re.findall(r"`([\w.]+)`", "".join(cell.partition(", in `")[0] for cell in cells))
        assert names, section
        assert len(names) == len(set(names)), sorted(names)
