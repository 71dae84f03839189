"""LibCST's metadata of a module: children, contexts, scopes and places, without making its nodes anew on the way.

LibCST's visitors make every node anew, also where they only look; each such walk costs more than parsing.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst._nodes.internal import CodegenState
from libcst.metadata import ExpressionContext
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
            children += [each for each in value if _is_child(each)]
        elif _is_child(value):
            children.append(value)
    return children


_CHILDREN: dict[type, bool] = {}


def _is_child(value: object) -> bool:
    kind = type(value)
    if kind not in _CHILDREN:
        _CHILDREN[kind] = isinstance(value, cst.CSTNode) and not isinstance(value, _LEFT_OUT)
    return _CHILDREN[kind]


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
        super().__init__(self)

    def get_metadata(self, key: object, node: cst.CSTNode, default: Any = None) -> Any:
        return self._context_of.get(node, default)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if super().on_visit(node):
            children = self._children.get(node)
            for child in children_of(node) if children is None else children:  # a string's tree is another one
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


# Places. ----------------------------------------------------------------------------------------------------------


class WrittenModule(CodegenState):
    """The code of a module, and where its nodes start: `PositionProvider` without the ends.

    >>> module = cst.parse_module("x = 1\\ny = 2")
    >>> written = WrittenModule(module)
    >>> written.code, written.start(module.body[1])
    ('x = 1\\ny = 2', (2, 0))

    Args:
        module: its tree.
    """

    def __init__(self, module: cst.Module):
        super().__init__(module.default_indent, module.default_newline)
        self._first_token: dict[cst.CSTNode, int] = {}
        module._codegen(self)
        self.code = "".join(self.tokens)

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line, from 1, and the column, from 0, of a node.

        Args:
            node: of the module.
        """
        offset = self._offsets[self._first_token[node]]
        line = bisect.bisect(self._lines, offset)
        return line, offset - self._lines[line - 1]

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.tokens), initial=0))

    @functools.cached_property
    def _lines(self) -> list[int]:
        return [0, *(match.end() for match in _LINE_END.finditer(self.code))]

    # What LibCST calls when it writes a module. ---------------------------------------------------------------------

    def before_codegen(self, node: cst.CSTNode) -> None:
        self._first_token[node] = len(self.tokens)

    def record_syntactic_position(
        self, node: cst.CSTNode, *, start_node: cst.CSTNode | None = None, end_node: cst.CSTNode | None = None
    ) -> contextlib.AbstractContextManager[None]:
        self._first_token[node] = len(self.tokens)
        return _NOTHING if start_node is None else self._starts_with(node, start_node)

    @contextlib.contextmanager
    def _starts_with(self, node: cst.CSTNode, start_node: cst.CSTNode) -> Iterator[None]:
        yield
        self._first_token[node] = self._first_token[start_node]


_NOTHING = contextlib.nullcontext()
_LINE_END = re.compile(r"\r\n?|\n")
