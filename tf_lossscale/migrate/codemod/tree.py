"""The syntax tree of a module, with the scope, parent and position of each node, and the possible values of names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    Assignment,
    BuiltinAssignment,
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    PositionProvider,
    ScopeProvider,
)

_STATEMENTS = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
_LAYOUT = (
    *(cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Comma, cst.Dot, cst.AssignEqual),
    *(cst.LeftParen, cst.RightParen),
)
_SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
_Node = TypeVar("_Node", bound=cst.CSTNode)

# TensorFlow context managers that do not suppress errors. The code after such a `with` block runs only if the whole
# block ran.
_CONTEXT = m.Name(m.MatchRegex("(scope|as_default|device|(init|name|variable)_scope|GradientTape|Session)$"))
_ONLY_SETS_A_CONTEXT = m.With([m.AtLeastN(m.WithItem(m.Call(_CONTEXT | m.Attribute(attr=_CONTEXT))), n=1)])


class Tree:
    """The syntax tree of one module, and queries about it.

    Args:
        module: the module, as parsed by LibCST.
    """

    def __init__(self, module: cst.Module):
        #: Maps each node to its parent. The nodes are in source order, with each parent before its children. The dict
        #: does not contain layout nodes such as whitespace, which are about half of all nodes.
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        waiting: list[tuple[cst.CSTNode, cst.CSTNode]] = [(child, module) for child in reversed(module.children)]
        while waiting:
            node, parent = waiting.pop()
            if not isinstance(node, _LAYOUT):
                self.parents[node] = parent
                waiting.extend((child, node) for child in reversed(node.children))
        # LibCST copies the tree by default, in case it contains a node twice. A parsed tree never does,
        # so the copy is skipped.
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        metadata = wrapper.resolve_many([ExpressionContextProvider, ScopeProvider, PositionProvider])
        self.scopes = dict(metadata[ScopeProvider])
        self._contexts, self._positions = metadata[ExpressionContextProvider], metadata[PositionProvider]

    @functools.cached_property
    def names(self) -> dict[str, list[cst.Name]]:
        """Maps each name to the nodes that use or bind it."""
        nodes: dict[str, list[cst.Name]] = {}
        for node in self.scopes:
            if isinstance(node, cst.Name):
                nodes.setdefault(node.value, []).append(node)
        return nodes

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line of a node, counted from 1, and its column, counted from 0."""
        start = self._positions[node].start
        return start.line, start.column

    def visit(self, *visitors: Any) -> None:
        """For each node, call the visitors' methods for its type, such as `visit_Call(node)` for a call.

        If a method returns False, the node's children are skipped. All visitors share one walk over `parents`. LibCST's
        own walk is not used, because it re-creates every node.
        """
        methods: dict[type, list[Callable[[Any], bool | None]]] = {}
        left: set[cst.CSTNode] = set()
        for node, parent in self.parents.items():
            kind = type(node)
            if kind not in methods:
                handlers = [getattr(visitor, f"visit_{kind.__name__}", None) for visitor in visitors]
                methods[kind] = [method for method in handlers if method is not None]
            if parent in left or any([method(node) is False for method in methods[kind]]):
                left.add(node)

    def ancestors(self, node: cst.CSTNode, stop: tuple[type, ...] = ()) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, nearest first, stopping before the first ancestor of a type in `stop`."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, stop):
            yield parent
            parent = self.parents.get(parent)

    def enclosing(self, node: cst.CSTNode, *kinds: type[_Node]) -> _Node | None:
        """Return the nearest ancestor of one of the given types, or None if there is no such ancestor."""
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost statement that contains a node."""
        for candidate in (node, *self.ancestors(node)):
            parent = self.parents.get(candidate)
            if isinstance(parent, (cst.IndentedBlock, cst.Module)) or (
                isinstance(candidate, cst.If) and isinstance(parent, cst.If)
            ):
                return candidate
        return node

    def is_read(self, node: cst.CSTNode) -> bool:
        """Return whether a node reads a name or attribute, rather than assigning or deleting it."""
        return self._contexts.get(node) is ExpressionContext.LOAD

    def is_deleted(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a name or attribute that a `del` statement deletes."""
        return self._contexts.get(node) is ExpressionContext.DEL

    # Assignments. ---------------------------------------------------------------------------------------------------

    def assigned_value(self, assignment: object) -> cst.BaseExpression | None:
        """Return the value in an assignment `name = value`, or None for any other binding, such as an import."""
        node = getattr(assignment, "node", None)
        if not isinstance(assignment, Assignment) or not isinstance(node, cst.Name):
            return None
        return self.value_assigned_to(node)

    def value_assigned_to(self, target: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the value that an assignment or `:=` assigns to a target, or None if the value is unknown."""
        parent = self.parents.get(target)
        if isinstance(parent, cst.AssignTarget):
            statement = self.parents[parent]
            return statement.value if isinstance(statement, cst.Assign) else None
        # The target is one of several targets, as in `a, b = x, y`.
        if isinstance(parent, cst.Element):
            targets = self.parents[parent]
            values = self.value_assigned_to(targets) if isinstance(targets, (cst.Tuple, cst.List)) else None
            return _element(values, targets.elements.index(parent), len(targets.elements))
        if isinstance(parent, (cst.AnnAssign, cst.NamedExpr)) and parent.target is target:
            return parent.value
        return None

    def assignments(self, name: cst.Name) -> list[object]:
        """Return all assignments to the variable to which a name refers."""
        scope = self.scopes.get(name)
        assignments = scope[name.value] if scope is not None else ()
        return [assignment for assignment in assignments if not isinstance(assignment, BuiltinAssignment)]

    def reaching(self, name: cst.Name) -> list[object]:
        """Return the assignments that may have set a variable's value at a given use.

        If a function uses a variable of an outer scope, the use runs after the assignments above the function. The
        assignments below the function may also run before the use.
        """
        assignments = self.assignments(name)
        scopes = {getattr(a, "scope", None) for a in assignments}
        if len(assignments) < 2 or len(scopes) > 1:
            return assignments
        used: cst.CSTNode | None = name
        if self.scopes.get(name) not in scopes:
            used = next((a for a in self.ancestors(name) if self.scopes.get(a) in scopes), None)
            if used is None:
                return assignments
        above = [used, *self.ancestors(used, stop=_SCOPES)]
        later_too = used is not name or any(isinstance(node, (cst.For, cst.While)) for node in above)
        home = self.enclosing(used, *_SCOPES)
        use = self.start(next((node for node in above if isinstance(node, _STATEMENTS)), used))
        reaching: list[tuple[tuple[float, int], object]] = []
        last = (0, 0)
        for assignment in assignments:
            node = self._binding(assignment)
            start = (0, 0) if node is None else self.start(node)
            if start >= use and not later_too:
                continue
            # Another function may declare the name global or nonlocal and assign to it. Such an assignment may run at
            # any time.
            elsewhere = node is not None and self.enclosing(node, *_SCOPES) is not home
            reaching.append(((float("inf"), 0) if elsewhere else start, assignment))
            if node is not None and start < use and self._always_runs_before(node, above):
                last = max(last, start)
        return [assignment for start, assignment in reaching if start >= last] or assignments

    def _binding(self, assignment: object) -> cst.CSTNode | None:
        """Return the statement that makes an assignment, or None if the assignment binds a parameter."""
        node = getattr(assignment, "node", None)
        if node is None or isinstance(node, (cst.Param, *_STATEMENTS)):
            return None if isinstance(node, cst.Param) else node
        return self.enclosing(node, *_STATEMENTS)

    def _always_runs_before(self, statement: cst.CSTNode, above: list[cst.CSTNode]) -> bool:
        """Return whether a statement always runs before a use below it.

        This is the case if the use is in the same block. A `with` block that only sets a TensorFlow context counts as
        part of the block around it.
        """
        if not isinstance(statement, (cst.BaseSmallStatement, cst.FunctionDef, cst.ClassDef)):
            return False
        block = self.parents.get(statement)
        block = self.parents.get(block) if isinstance(block, cst.SimpleStatementLine) else block
        while block is not None and block not in above:
            owner = self.parents.get(block)
            if not m.matches(owner, _ONLY_SETS_A_CONTEXT):
                return False
            block = self.parents.get(owner)
        return block is not None


def methods(owner: cst.CSTNode | None) -> dict[str, cst.FunctionDef]:
    """Return a dict from names to the methods that a class defines. For other nodes, the dict is empty."""
    body = owner.body.body if isinstance(owner, cst.ClassDef) else ()
    return {each.name.value: each for each in body if isinstance(each, cst.FunctionDef)}


def _element(values: cst.BaseExpression | None, place: int, count: int) -> cst.BaseExpression | None:
    """Return the element at an index of a tuple or list with `count` elements, or the element of a comprehension.

    Return None for any other expression.
    """
    if isinstance(values, (cst.GeneratorExp, cst.ListComp)):
        return values.elt
    if not isinstance(values, (cst.Tuple, cst.List)) or len(values.elements) != count:
        return None
    stars = any(isinstance(each, cst.StarredElement) for each in values.elements)
    return None if stars else values.elements[place].value
