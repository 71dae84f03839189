"""LibCST's metadata of a module: children, contexts, scopes and positions, without making its nodes anew on the way.

LibCST's visitors make every node anew, also where they only look; each such walk costs more than parsing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import ExpressionContext, PositionProvider
from libcst.metadata.position_provider import PositionProvidingCodegenState
from libcst.metadata.scope_provider import Scope, ScopeVisitor

Children = dict[cst.CSTNode, list[cst.CSTNode]]

_LEFT_OUT = (cst.SimpleWhitespace, cst.Newline)  # they have no meaning of their own, and are most of a tree


def children_of(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the children of a node, in the order in which LibCST visits them; whitespace without comments is left out.

    >>> [type(child).__name__ for child in children_of(cst.parse_expression("a if b else c"))]
    ['Name', 'Name', 'Name']

    Args:
        node: any node.
    """
    children: list[cst.CSTNode] = []
    for name in _fields(node):
        value = getattr(node, name)
        if type(value) in (tuple, list):
            children += [each for each in value if _is_child(type(each))]
        elif _is_child(type(value)):
            children.append(value)
    return children


@functools.cache
def _is_child(kind: type) -> bool:
    return issubclass(kind, cst.CSTNode) and not issubclass(kind, _LEFT_OUT)


def children(module: cst.Module) -> Children:
    """Return the children of each node of a module, outer nodes first.

    Args:
        module: its tree.
    """
    found: Children = {}
    waiting: list[cst.CSTNode] = [module]
    while waiting:
        node = waiting.pop()
        found[node] = children_of(node)
        waiting += reversed(found[node])
    return found


class _Fields(cst.CSTVisitor):
    """Notes the fields of a node in the order in which LibCST visits them."""

    def __init__(self, node: cst.CSTNode):
        super().__init__()
        self.names: list[str] = []
        self._node = node
        node.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node is self._node

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        self.names.append(attribute)


_OF_KIND: dict[type[cst.CSTNode], tuple[str, ...]] = {}


def _fields(node: cst.CSTNode) -> tuple[str, ...]:
    kind = type(node)
    if kind not in _OF_KIND:
        _OF_KIND[kind] = tuple(dict.fromkeys(_Fields(node).names))
    return _OF_KIND[kind]


# Contexts. --------------------------------------------------------------------------------------------------------

_STORE, _LOAD, _DEL = ExpressionContext.STORE, ExpressionContext.LOAD, ExpressionContext.DEL
_WITH_CONTEXT = {cst.Name, cst.Attribute, cst.Subscript, cst.Tuple, cst.List, cst.StarredElement}
# The fields of which the context is not that of the node: None means the same.
_CONTEXTS: dict[type[cst.CSTNode], tuple[tuple[str, ExpressionContext | None], ...]] = {
    cst.Name: (),
    cst.Assign: (("targets", _STORE), ("value", None)),
    cst.AnnAssign: (("target", _STORE), ("annotation", None), ("value", None)),
    cst.AugAssign: (("target", _STORE), ("value", None)),
    cst.NamedExpr: (("target", _STORE), ("value", None)),
    cst.AsName: (("name", _STORE),),
    cst.CompFor: (("target", _STORE), ("iter", None), ("ifs", None), ("inner_for_in", None)),
    cst.For: (("target", _STORE), ("iter", None), ("body", None), ("orelse", None)),
    cst.Del: (("target", _DEL),),
    cst.Attribute: (("value", _LOAD),),
    cst.Subscript: (("value", _LOAD), ("slice", _LOAD)),
    cst.ClassDef: (("name", _STORE), ("body", None), ("bases", None), ("keywords", None), ("decorators", None)),
    cst.FunctionDef: (("name", _STORE), ("params", None), ("body", None), ("decorators", None), ("returns", None)),
    cst.Param: (("name", _STORE), ("annotation", None), ("default", None)),
}


def contexts(module: cst.Module, children: Children) -> dict[cst.CSTNode, ExpressionContext]:
    """Return which names, attributes and the like are read, assigned and deleted: `ExpressionContextProvider`.

    >>> module = cst.parse_module("x = y")
    >>> found = contexts(module, children(module))
    >>> {node.value: context.name for node, context in found.items()}
    {'y': 'LOAD', 'x': 'STORE'}

    Args:
        module: its tree.
        children: of its nodes.
    """
    found: dict[cst.CSTNode, ExpressionContext] = {}
    waiting: list[tuple[cst.CSTNode, ExpressionContext]] = [(module, _LOAD)]
    while waiting:
        node, context = waiting.pop()
        kind = type(node)
        if kind in _WITH_CONTEXT:
            found[node] = context
        fields = _CONTEXTS.get(kind)
        if fields is None:
            waiting += [(child, context) for child in children[node]]
            continue
        for name, own in fields:
            value = getattr(node, name)
            inner: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
            waiting += [(child, own or context) for child in inner if isinstance(child, cst.CSTNode)]
    return found


# Scopes. ----------------------------------------------------------------------------------------------------------


class _Scopes(ScopeVisitor):
    """LibCST's own visitor; it also stands for the provider that such a visitor asks and tells."""

    def __init__(self, children: Children, contexts: Mapping[cst.CSTNode, ExpressionContext]):
        self._children = children
        self._context_of = contexts
        self.found: dict[cst.CSTNode, Scope] = {}
        self.set_metadata = self.found.__setitem__
        super().__init__(self)  # type: ignore[arg-type]

    def get_metadata(self, key: object, node: cst.CSTNode, default: Any = None) -> Any:
        return self._context_of.get(node, default)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if super().on_visit(node):
            for child in self._children.get(node) or children_of(node):  # that of a string is in no other tree
                child.visit(self)
        return False  # the children have been visited


def scopes(
    module: cst.Module, children: Children, contexts: Mapping[cst.CSTNode, ExpressionContext]
) -> dict[cst.CSTNode, Scope]:
    """Return the scope of each node, with its assignments and their uses: `ScopeProvider`.

    >>> module = cst.parse_module("x = 1")
    >>> known = children(module)
    >>> [type(scope).__name__ for scope in scopes(module, known, contexts(module, known)).values()][:1]
    ['GlobalScope']

    Args:
        module: its tree.
        children: of its nodes.
        contexts: of its names.
    """
    visitor = _Scopes(children, contexts)
    module.visit(visitor)
    visitor.infer_accesses()
    return visitor.found


def positions(module: cst.Module) -> tuple[Mapping[cst.CSTNode, Any], str]:
    """Return where each node begins and ends, as `PositionProvider`, and the code that was written for that.

    >>> module = cst.parse_module("x = 1")
    >>> places, code = positions(module)
    >>> places[module.body[0]].start.line, code
    (1, 'x = 1')

    Args:
        module: its tree.
    """
    provider = PositionProvider()
    state = PositionProvidingCodegenState(module.default_indent, module.default_newline, provider=provider)
    module._codegen(state)
    return provider._computed, "".join(state.tokens)
