"""Finds where a file reads the old loss scale object of a wrapper, in whose place there is a tensor today.

Up to TensorFlow 2.3, `optimizer.loss_scale` was an object that could be called. It had attributes and methods, and its
class and the config of the wrapper showed what it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod.keras_3 import OPTIMIZER
from tf_lossscale.migrate.codemod.scopes import CONTAINERS, Scopes, string

_WRAPPERS = {table.STABLE, table.EXPERIMENTAL}
# Members that no other object has.
_ITS_OWN = {"_current_loss_scale", "_increment_period", "_initial_loss_scale", "_num_good_steps", "increment_period"}
# Functions that do not call their argument, and libraries of such functions.
_SHOWING = ("float", "format", "int", "isinstance", "print", "repr", "str", "type")
_LIBRARIES = {"keras", "logging", "math", "numpy", "tensorflow"}
# The nodes that keep a value, or return it.
_KEEPING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Lambda, ast.arguments, ast.keyword, *CONTAINERS)
# Attributes that today's `optimizer._loss_scale` has as well.
_STILL_THERE = {"counter", "current_loss_scale", "multiplier"}


def reads(source: Scopes) -> list[ast.expr]:
    """Return the expressions in a file that read, or may read, the old object, in the order of the file.

    >>> source = Scopes(b"print(optimizer.loss_scale(), policy.loss_scale())")
    >>> [source.code(node) for node in reads(source)]
    ['optimizer.loss_scale']
    """
    return [read for node in source.parents for read in _read_by(source, node)]


def is_policy(source: Scopes, node: ast.AST) -> bool:
    """Return whether an expression's name suggests that it is a dtype policy, or this file makes it as one."""
    name = source.code(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    made = any(_makes(source, each, {table.POLICY}) or _calls(source, each, "policy") for each in source.values(node))
    return made or "policy" in name.lower()


def _makes(source: Scopes, node: ast.AST, roles: set[str]) -> bool:
    """Return whether a node is a call to an old name with one of the given roles."""
    known = map(table.canonical, source.dotted(node.func)) if isinstance(node, ast.Call) else ()
    return any(each in table.OLD and table.OLD[each].role in roles for each in known)


def _calls(source: Scopes, node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and source.code(node.func).endswith(name)


def _is_loss_scale(source: Scopes, node: ast.AST) -> bool:
    """Return whether an expression, or the value of a variable, is an attribute `loss_scale` of a wrapper."""
    found = [each for each in source.values(node) if isinstance(each, ast.Attribute) and each.attr == "loss_scale"]
    has_method = bool(found) and any(function.name == "loss_scale" for function in source.nodes(ast.FunctionDef))
    own = ("self", "cls") if has_method else ()
    found = [each for each in found if source.code(each.value) not in own and not is_policy(source, each.value)]
    # The wrapper of a graph rewrite still has the object.
    return any(not _is_made(source, each.value, table.GRAPH_REWRITE) for each in found)


def _is_made(source: Scopes, node: ast.AST, *roles: str) -> bool:
    """Return whether this file may make an object by a call to an old name with one of the given roles."""
    return any(_makes(source, each, {*roles}) for each in source.values(node))


def _read_by(source: Scopes, node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not given and _is_loss_scale(source, node.func):
            yield node.func
        elif source.is_builtin(node.func, "isinstance"):
            yield from (each for each in given[:1] if _is_loss_scale(source, each))
        elif _makes(source, node, _WRAPPERS):
            # Two wrappers share one loss scale.
            owned = [each for each in given if isinstance(each, ast.Attribute) and each.attr.endswith("loss_scale")]
            yield from (each for each in owned if _is_made(source, each.value, *_WRAPPERS))
    elif isinstance(node, ast.Attribute) and node.attr in table.OF_LOSS_SCALE.names:
        is_private = getattr(node.value, "attr", "") == "_loss_scale"
        is_own = node.attr in source.stored or source.code(node.value) == "self"
        is_its_own = node.attr in _ITS_OWN and not (is_own or _is_made(source, node.value, table.LEGACY))
        if is_its_own or _is_loss_scale(source, node.value) or (is_private and node.attr not in _STILL_THERE):
            yield node.value
    elif isinstance(node, ast.Attribute) and node.attr == "loss_scale":
        # What gets the object may call it.
        parent, to = source.parents[node], getattr(source.parents[node], "func", node)
        is_known = source.is_builtin(to, *_SHOWING) or _LIBRARIES & {each.split(".")[0] for each in source.dotted(to)}
        is_passed = to is not node and not is_known
        # A file that makes only this kind of wrapper may make it in a function.
        is_likely = is_passed and OPTIMIZER.search(source.code(node.value).rpartition(".")[2])
        calls = source.nodes(ast.Call) if is_likely else []
        is_other = any(_makes(source, call, {table.STABLE, table.GRAPH_REWRITE}) for call in calls)
        made = calls if calls and not is_other else source.values(node.value)
        if (is_passed or isinstance(parent, _KEEPING)) and any(_makes(source, e, {table.EXPERIMENTAL}) for e in made):
            yield node
    elif isinstance(node, ast.Subscript) and string(node.slice) in ("loss_scale", "optimizer"):
        yield from [node.value] if any(_calls(source, each, "get_config") for each in source.values(node.value)) else []
