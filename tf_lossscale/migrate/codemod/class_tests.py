"""Reports tests of a wrapper's class that give another result with this package's wrappers than with the old ones."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.uses import Use, Uses

_EXACT = "the type of a wrapper is a subclass of its class: write isinstance(), not a comparison or a lookup of types."
_NARROW = (
    "only some wrappers were instances of {}, but all wrappers are instances of the class that replaces it. To tell "
    "optimizers apart, test the wrapper's inner_optimizer."
)
# Classes of Keras 2 that only some wrappers were instances of, each with the name of its kind. The public class was a
# base class of both.
_NARROW_CLASSES = {"LossScaleOptimizerV1": "the old arguments", "LossScaleOptimizerV3": "the newer optimizers"}
_TESTS = ("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance")


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for node in source.parents if source.roles & names.WRAPPERS else ():
        if _exact(source, node):
            edits.todo(node, _EXACT)
    found = tests(source)
    kinds = {test: {kind for use in uses for kind in _kinds(use)} for test, uses in found.items()}
    for test, uses in found.items():
        is_old = kinds[test] == {table.EXPERIMENTAL} and {table.STABLE} in kinds.values()
        if is_old or kinds[test] <= {*_NARROW_CLASSES.values()}:
            edits.todo(test, _NARROW.format(source.code(uses[0].node)))


def tests(source: Uses) -> dict[ast.AST, list[Use]]:
    """Map each condition that tests for a wrapper class to the uses of the classes in it.

    Tests that `and` or `or` joins are one condition.
    """
    found: dict[ast.AST, list[Use]] = {}
    for node in source.parents if source.roles & names.WRAPPERS else ():
        is_test = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _TESTS
        uses = _classes_in(source, node.args) if isinstance(node, ast.Call) and is_test else _exact(source, node)
        while isinstance(source.parents[node], ast.BoolOp):
            node = source.parents[node]
        if uses:
            found[node] = found.get(node, []) + uses
    return found


def _classes_in(source: Uses, nodes: Sequence[ast.AST | None]) -> list[Use]:
    """Return the uses of wrapper classes that expressions contain, or that this file assigns to names in them."""
    values = {value for node in nodes if node for value in source.values(node)}
    return [use for use in source.uses if use.node in values and use.roles & names.WRAPPERS]


def _kinds(use: Use) -> set[str]:
    return {_NARROW_CLASSES.get(name.rpartition(".")[2], use.rows[0].role) for name in use.dotted}


def _exact(source: Uses, node: ast.AST) -> list[Use]:
    """Return the uses of wrapper classes that a node compares with types, or that are the keys of a dict."""
    if isinstance(node, ast.Dict):
        return _classes_in(source, node.keys)
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("assert"):
        operands = node.args
    elif isinstance(node, ast.Match):
        operands = [node.subject, *(part.value for part in ast.walk(node) if isinstance(part, ast.MatchValue))]
    else:
        return []
    is_typed = any(_is_type(source, value) for operand in operands for value in source.values(operand))
    return _classes_in(source, operands) if is_typed else []


def _is_type(source: Uses, node: ast.AST) -> bool:
    """Return whether an expression is the exact type of an object: `type(x)` or `x.__class__`."""
    return source.is_builtin(getattr(node, "func", node), "type") or getattr(node, "attr", "") == "__class__"
