"""The edits of one file. They are planned first and applied later, because an import can go only if no use remains."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, report
from tf_lossscale.migrate.codemod.arguments import code
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.resolve import Resolver

MARK = "# TODO(tf-lossscale):"

Now = Callable[[cst.BaseExpression], cst.BaseExpression]


class Edits:
    """The edits of one file.

    Args:
        resolver: the resolver of the file's module.
    """

    def __init__(self, resolver: Resolver):
        self._resolver = resolver
        #: Node -> the function that creates its replacement, after the inner edits.
        self.expressions: dict[cst.CSTNode, Callable[[cst.CSTNode, Now], cst.CSTNode]] = {}
        #: Nodes whose names are no longer used.
        self.gone: set[cst.CSTNode] = set()
        #: Statement -> comments to put above it.
        self.todos: dict[cst.CSTNode, list[str]] = {}
        #: The code that replaces an import alias or a star import; None if the import is removed.
        self.imports: dict[cst.CSTNode, str | None] = {}
        #: Nodes that do not change, and names whose bindings must stay because such a node uses them.
        self.frozen: set[cst.CSTNode] = set()
        self.pinned: set[str] = set()
        #: Whether this file's policies have loss scales, and therefore come from `tf_lossscale.legacy`.
        self.legacy_policies = False
        self.findings: list[report.Finding] = []

    def changed_statements(self) -> set[cst.CSTNode]:
        """The statements whose own code changes, without the statements around them."""
        return {self._resolver.statement(node) for node in (*self.expressions, *self.imports)}

    def touched(self) -> set[cst.CSTNode]:
        """The nodes that change, and the nodes around them."""
        nodes = [*self.expressions, *self.todos, *self.imports]
        return {around for node in nodes for around in (node, *self._resolver.ancestors(node))}

    def replace(self, node: cst.CSTNode, make: Callable[[cst.CSTNode, Now], cst.CSTNode], new: str) -> None:
        """Replace a node, and report it."""
        self.expressions[node] = make
        self._report(node, report.REWRITTEN, new=new)

    def replace_name(self, node: cst.CSTNode, dotted: str) -> None:
        """Replace a name by a dotted name, and report it."""
        self.gone.add(node)
        self.replace(node, lambda updated, now: with_parentheses_of(updated, cst.parse_expression(dotted)), dotted)

    def rename_attribute(self, node: cst.Attribute, new: str) -> None:
        """Replace the last part of a dotted name, and report it."""
        self.replace(node, lambda updated, now: updated.with_changes(attr=cst.Name(new)), f"{code(node.value)}.{new}")

    def refuse(self, node: cst.Call, reason: str, what: cst.BaseExpression | None = None) -> None:
        """Leave a call unchanged, and freeze the name of its function, or the part `what` of the call."""
        self.todo(node, reason)
        self.freeze(what or node.func)

    def freeze(self, function: cst.BaseExpression) -> None:
        """Leave an expression unchanged, and keep the imports and assignments that bind the names in it."""
        node = function
        self.frozen.add(node)
        while isinstance(node, cst.Attribute):
            node = node.value
            self.frozen.add(node)
        if not isinstance(node, cst.Name) or node.value in self.pinned:
            return
        canonical = {names.canonical(dotted) for dotted in self._resolver.dotted(node)}
        if canonical & {*table.OLD, *names.EMPTIED}:
            self.pinned.add(node.value)
            for value in self._resolver.values(node):
                if isinstance(value, (cst.Name, cst.Attribute)):
                    self.freeze(value)

    def todo(self, node: cst.CSTNode, reason: str) -> None:
        """Leave a node unchanged, with a comment that gives the reason."""
        comments = self.todos.setdefault(self._resolver.statement(node), [])
        if reason not in comments:
            comments.append(reason)
        self._report(node, report.TODO, reason=reason)

    def replace_import(self, statement: cst.CSTNode, alias: cst.CSTNode, new: str | None) -> None:
        """Replace a name that a statement imports, or remove it, and report it."""
        self.imports[alias] = new
        self._report(statement, report.REWRITTEN, new=new.partition(" as ")[0] if new else "(removed)")

    def notice(self, node: cst.CSTNode, reason: str) -> None:
        """Leave a node unchanged, and mention it only in the report."""
        self._report(node, report.NOTICE, reason=reason)

    def _report(self, node: cst.CSTNode, kind: str, new: str | None = None, reason: str | None = None) -> None:
        line, column = self._resolver.start(node)
        old = " ".join(code(node).split())
        finding = report.Finding(line, column, kind, _short(old), new and _short(new), reason)
        if finding not in self.findings:
            self.findings.append(finding)


def with_parentheses_of(old: cst.CSTNode, new: cst.BaseExpression) -> cst.BaseExpression:
    """Return the new expression in the parentheses of the old one."""
    return new.with_changes(lpar=getattr(old, "lpar", ()), rpar=getattr(old, "rpar", ()))


def _short(shown: str, length: int = 200) -> str:
    shown = " ".join(shown.split())
    return shown if len(shown) <= length else shown[: length - 3] + "..."


class Visitor:
    """Base class of the planners: `Tree.visit` calls it for the nodes of a module, and it fills the edits.

    Args:
        resolver: the module's resolver.
        calls: the module's calls.
        edits: the edits to fill.
    """

    def __init__(self, resolver: Resolver, calls: Calls, edits: Edits):
        self._resolver = resolver
        self._calls = calls
        self._edits = edits

    def finish(self) -> None:
        """Plan the edits that need the whole module."""
