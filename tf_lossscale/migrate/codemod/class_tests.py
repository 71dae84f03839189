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
# Classes of Keras 2 that only some wrappers were instances of: wrappers with the old arguments, and of the newer
# optimizers. The public class was a base class of both.
_NARROW_CLASSES = ("LossScaleOptimizerV1", "LossScaleOptimizerV3")
_TESTS = ("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance")
_COMPARISONS = ("assertEqual", "assertIn", "assertIs", "assertIsNot", "assertNotEqual", "assertNotIn")


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for node in source.parents if source.roles & names.WRAPPERS else ():
        if _classes_in(source, _compared(node)):
            edits.todo(node, _EXACT)
    found = tests(source)
    roles = {test: {role for use in uses for role in use.roles} for test, uses in found.items()}
    for test, uses in found.items():
        is_old = roles[test] == {table.EXPERIMENTAL} and {table.STABLE} in roles.values()
        if is_old or all(name.endswith(_NARROW_CLASSES) for use in uses for name in use.dotted):
            edits.todo(test, _NARROW.format(source.code(uses[0].node)))


def tests(source: Uses) -> dict[ast.AST, list[Use]]:
    """Map each condition that tests for a wrapper class to the uses of the classes in it.

    Tests that `and` or `or` joins are one condition.
    """
    found: dict[ast.AST, list[Use]] = {}
    for node in source.parents if source.roles & names.WRAPPERS else ():
        uses = _classes_in(source, [*_compared(node), *_arguments(node, _TESTS)])
        while isinstance(source.parents[node], ast.BoolOp):
            node = source.parents[node]
        if uses:
            found[node] = found.get(node, []) + uses
    return found


def _classes_in(source: Uses, nodes: Sequence[ast.AST | None]) -> list[Use]:
    """Return the uses of wrapper classes that expressions contain, or that this file assigns to names in them."""
    values = {value for node in nodes if node for value in source.values(node)}
    return [use for use in source.uses if use.node in values and use.roles & names.WRAPPERS]


def _arguments(node: ast.AST, functions: Sequence[str]) -> Sequence[ast.expr]:
    """Return the arguments of a call of one of the given functions or methods."""
    is_call = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in functions
    return node.args if isinstance(node, ast.Call) and is_call else ()


def _compared(node: ast.AST) -> Sequence[ast.expr | None]:
    """Return the expressions that a node compares with others, except with a constant, or has as keys."""
    if isinstance(node, ast.Compare) and not any(isinstance(each, ast.Constant) for each in node.comparators):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    return node.keys if isinstance(node, ast.Dict) else _arguments(node, _COMPARISONS)
