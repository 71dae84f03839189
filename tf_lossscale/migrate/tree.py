"""A module's syntax tree with what LibCST knows of it: scopes, parents, places, and which assignment reaches a use."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from libcst.metadata import (
    Assignment,
    BuiltinAssignment,
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    ScopeProvider,
)

_STATEMENTS = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
_SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)


class Tree:
    """Answers where things stand in one module.

    Args:
        wrapper: the module with its metadata.
    """

    def __init__(self, wrapper: MetadataWrapper):
        self.module = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self._contexts = wrapper.resolve(ExpressionContextProvider)

    def ancestors(self, node: cst.CSTNode, stop: tuple[type, ...] = ()) -> Iterator[cst.CSTNode]:
        """The nodes above a node, nearest first, up to the first of a type in `stop`."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, stop):
            yield parent
            parent = self.parents.get(parent)

    def enclosing(self, node: cst.CSTNode, kind: type) -> cst.CSTNode | None:
        """The nearest node of a kind above a node."""
        return next((a for a in self.ancestors(node) if isinstance(a, kind)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement with a line of its own that a node is in."""
        for candidate in (node, *self.ancestors(node)):
            parent = self.parents.get(candidate)
            if isinstance(parent, (cst.IndentedBlock, cst.Module)) or (
                isinstance(candidate, cst.If) and isinstance(parent, cst.If)
            ):
                return candidate
        return node

    def is_read(self, node: cst.CSTNode) -> bool:
        """Whether a name or attribute is read here, not assigned or deleted."""
        return self._contexts.get(node) is ExpressionContext.LOAD

    def is_deleted(self, node: cst.CSTNode) -> bool:
        """Whether a name is deleted here."""
        return self._contexts.get(node) is ExpressionContext.DEL

    # Assignments. ---------------------------------------------------------------------------------------------------

    def assigned_value(self, assignment: object) -> cst.BaseExpression | None:
        """The right side of the `name = value` that made an assignment; None if it is none."""
        node = getattr(assignment, "node", None)
        if not isinstance(assignment, Assignment) or not isinstance(node, cst.Name):
            return None
        return self.value_assigned_to(node)

    def value_assigned_to(self, target: cst.BaseExpression) -> cst.BaseExpression | None:
        """The right side of the statement or walrus of which this is the target."""
        parent = self.parents.get(target)
        if isinstance(parent, cst.AssignTarget):
            statement = self.parents[parent]
            return statement.value if isinstance(statement, cst.Assign) else None
        if isinstance(parent, (cst.AnnAssign, cst.NamedExpr)) and parent.target is target:
            return parent.value
        return None

    def assignments(self, name: cst.Name) -> list[object]:
        """Every assignment of the name that this one refers to."""
        scope = self.scopes.get(name)
        found = scope[name.value] if scope is not None else ()
        return [assignment for assignment in found if not isinstance(assignment, BuiltinAssignment)]

    def reaching(self, name: cst.Name) -> list[object]:
        """The assignments but those that a later one, on the way to this use in the same function, has overwritten."""
        assignments = self.assignments(name)
        scope = self.scopes.get(name)
        if len(assignments) < 2 or any(getattr(a, "scope", None) is not scope for a in assignments):
            return assignments
        above = list(self.ancestors(name, stop=_SCOPES))
        in_loop = any(isinstance(node, (cst.For, cst.While)) for node in above)
        use = self._start(next((node for node in above if isinstance(node, _STATEMENTS)), name))
        reaching, last = [], (0, 0)
        for assignment in assignments:
            node = self._binding(assignment)
            start = (0, 0) if node is None else self._start(node)
            if start >= use and not in_loop:
                continue
            reaching.append((start, assignment))
            if node is not None and start < use and self._always_runs_before(node, above):
                last = max(last, start)
        return [assignment for start, assignment in reaching if start >= last] or assignments

    def _binding(self, assignment: object) -> cst.CSTNode | None:
        """The statement that makes an assignment; None for a parameter."""
        node = getattr(assignment, "node", None)
        if node is None or isinstance(node, (cst.Param, *_STATEMENTS)):
            return None if isinstance(node, cst.Param) else node
        return next((a for a in self.ancestors(node) if isinstance(a, _STATEMENTS)), None)

    def _always_runs_before(self, statement: cst.CSTNode, above: list[cst.CSTNode]) -> bool:
        """Whether a statement stands in one of the blocks around a use, and is no loop that may do nothing."""
        if not isinstance(statement, (cst.BaseSmallStatement, cst.FunctionDef, cst.ClassDef)):
            return False
        block = self.parents.get(statement)
        block = self.parents.get(block) if isinstance(block, cst.SimpleStatementLine) else block
        return block in above

    def _start(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self.positions[node].start
        return start.line, start.column
