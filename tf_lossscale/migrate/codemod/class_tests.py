"""Reports tests of a wrapper's class that give another result with this package's wrappers than with the old ones."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

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
_TESTS = ("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance", "register")


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for node in source.parents if source.roles & names.WRAPPERS else ():
        if _exact(source, node):
            edits.todo(node, _EXACT)
    found = tests(source)
    kinds = {test: {kind for use in uses for kind in _kinds(use)} for test, uses in found.items()}
    wide = [test for test, tested in kinds.items() if tested == {table.STABLE}]
    for test, uses in found.items():
        is_old = kinds[test] == {table.EXPERIMENTAL} and not all(_exclude(source, test, other) for other in wide)
        if is_old or kinds[test] <= {*_NARROW_CLASSES.values()}:
            edits.todo(test, _NARROW.format(source.code(uses[0].node)))


def tests(source: Uses) -> dict[ast.AST, list[Use]]:
    """Map each condition that tests for a wrapper class to the uses of the classes in it.

    Tests that `and` or `or` joins are one condition.
    """
    found: dict[ast.AST, list[Use]] = {}
    for node in source.parents if source.roles & names.WRAPPERS else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _TESTS:
            uses = _classes_in(source, node.args)
        elif isinstance(node, ast.MatchClass):
            uses = _classes_in(source, [node.cls])
        else:
            uses = _exact(source, node)
        while isinstance(source.parents[node], ast.BoolOp):
            node = source.parents[node]
        if uses:
            found[node] = found.get(node, []) + uses
    return found


def _classes_in(source: Uses, nodes: Sequence[ast.AST]) -> list[Use]:
    """Return the uses of wrapper classes that expressions contain, or that this file assigns to names in them."""
    values = {value for node in nodes for value in source.values(node)}
    return [use for use in source.uses if use.node in values and use.roles & names.WRAPPERS]


def _kinds(use: Use) -> set[str]:
    return {_NARROW_CLASSES.get(name.rpartition(".")[2], use.rows[0].role) for name in use.dotted}


def _exact(source: Uses, node: ast.AST) -> list[Use]:
    """Return the uses of wrapper classes that a node compares with types, looks up by type, or has as keys."""
    operands = _operands(source, node)
    uses = _classes_in(source, operands) if operands else []
    is_key = isinstance(node, (ast.Dict, ast.Set)) or isinstance(getattr(node, "ctx", None), ast.Store)
    is_lookup = uses and (
        is_key or any(_is_type(source, value) for operand in operands for value in source.values(operand))
    )
    return uses if is_lookup else []


def _operands(source: Uses, node: ast.AST) -> list[ast.AST]:
    """Return the expressions that a node may compare with each other: its operands, arguments, keys or patterns."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.Match):
        return [node.subject, *(part for case in node.cases for part in ast.walk(case.pattern))]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key]
    if isinstance(node, ast.Set):
        return [*node.elts]
    if isinstance(node, ast.Call) and not source.is_builtin(node.func, *vars(builtins)):
        return [*node.args, *(keyword.value for keyword in node.keywords), getattr(node.func, "value", node)]
    return []


def _is_type(source: Uses, node: ast.AST) -> bool:
    """Return whether an expression is the exact type of an object: `type(x)`, `x.__class__`, or `type` in `map`."""
    is_call = isinstance(node, ast.Call) and len(node.args) == 1 and source.is_builtin(node.func, "type")
    return is_call or source.is_builtin(node, "type") or getattr(node, "attr", "") == "__class__"


def _exclude(source: Uses, first: ast.AST, second: ast.AST) -> bool:
    """Return whether a branch, such as one for a version of TensorFlow, runs one test without the other."""
    branches = [dict(_branches(source, node)) for node in (first, second)]
    return any(
        branches[0].get(node) != branches[1].get(node) and "isinstance" not in source.code(getattr(node, "test", node))
        for node in branches[0] | branches[1]
    )


def _branches(source: Uses, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the conditions around a node, each with the name of the field that contains the node."""
    for outer in source.ancestors(node):
        if isinstance(outer, (ast.If, ast.IfExp, ast.Try)):
            fields = ((name, value if isinstance(value, list) else [value]) for name, value in ast.iter_fields(outer))
            yield outer, next(name for name, value in fields if node in value)
        node = outer
