"""Every difference that docs/differences.md lists names a test that exists."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "differences.md").read_text().splitlines() if re.match(r"\| (?!what)", line)]


def test_every_row_names_a_test_that_exists():
    assert len(ROWS) > 40
    for row in ROWS:
        *_, tested = [cell.strip() for cell in row.strip("|").split(" | ")]
        path, _, name = tested.strip("` ").partition("::")
        nodes = ast.parse((ROOT / path).read_text()).body
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, row
        assert any(function.startswith("test_") for function in functions), row


def test_the_readme_leads_to_it():
    assert "differences.md" in (ROOT / "README.md").read_text()
