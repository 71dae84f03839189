"""Reports tests of a class whose result is another one with this package's wrappers than with the old classes."""

from __future__ import annotations

import ast
import builtins
import collections
from collections.abc import Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.uses import Uses

_EXACT = "the type of a wrapper is a subclass of its class: write isinstance(), not a comparison or a lookup of types."
_NARROW = (
    "only some wrappers were instances of {}, but all wrappers are instances of the class that replaces it. To tell "
    "optimizers apart, test the wrapper's inner_optimizer."
)
# Classes of Keras 2 that only some wrappers were instances of, each with the name of its kind. The public class was a
# base class of both.
_NARROW_CLASSES = {"LossScaleOptimizerV1": "the old arguments", "LossScaleOptimizerV3": "the newer optimizers"}


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    classes = {use.node: use for use in source.uses if use.roles & names.WRAPPERS}
    for node in source.parents if classes else ():
        values = [value for operand in _operands(source, node) for value in source.values(operand)]
        is_lookup = isinstance(node, (ast.Dict, ast.Set)) or any(_is_type(source, value) for value in values)
        if is_lookup and not classes.keys().isdisjoint(values):
            edits.todo(node, _EXACT)
    tests: dict[ast.AST, set[str]] = collections.defaultdict(set)
    for use in classes.values():
        if test := test_of(source, use.node):
            tests[test] |= {_NARROW_CLASSES.get(name.rpartition(".")[2], use.rows[0].role) for name in use.dotted}
    wide = [test for test, kinds in tests.items() if kinds == {table.STABLE}]
    for use in classes.values():
        test = test_of(source, use.node)
        kinds = tests[test] if test else {table.STABLE}
        is_old = kinds == {table.EXPERIMENTAL} and not all(_exclude(source, test or use.node, other) for other in wide)
        if is_old or kinds <= {*_NARROW_CLASSES.values()}:
            edits.todo(use.node, _NARROW.format(source.code(use.node)))


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


def test_of(source: Uses, node: ast.AST) -> ast.AST | None:
    """Return the condition in which a class is tested, or None. Tests that `and` or `or` joins are one condition."""
    test = None
    for outer in source.ancestors(node):
        is_call = isinstance(outer, ast.Call) and getattr(outer.func, "id", getattr(outer.func, "attr", "")) in (
            *("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance", "register"),
        )
        if is_call or isinstance(outer, (ast.Compare, ast.MatchClass)) or (test and isinstance(outer, ast.BoolOp)):
            test = outer
        elif not isinstance(outer, (ast.BinOp, ast.BoolOp, ast.List, ast.Tuple, ast.UnaryOp)):
            break
    return test


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
