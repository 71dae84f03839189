"""The edits of one file: planned first, made later, since the uses of a name decide about its import."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import libcst as cst

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, report
from tf_lossscale.migrate.codemod.arguments import code
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.resolve import Resolver

MARK = "# TODO(tf-lossscale):"

Now = Callable[[cst.BaseExpression], cst.BaseExpression]


class Import(NamedTuple):
    """An import statement to be written: `from module import name as bound`; `import module` if there is no name."""

    module: str
    name: str | None = None
    bound: str | None = None


class Edits:
    """The edits of one file.

    Args:
        resolver: of the file's module.
    """

    def __init__(self, resolver: Resolver):
        self._resolver = resolver
        #: Node -> what makes its replacement of the node as its inner edits left it.
        self.expressions: dict[cst.CSTNode, Callable[[cst.CSTNode, Now], cst.CSTNode]] = {}
        #: Nodes whose names are not used any more.
        self.gone: set[cst.CSTNode] = set()
        #: Statement -> comments to put above it.
        self.todos: dict[cst.CSTNode, list[str]] = {}
        #: Statement -> lines to put above it.
        self.lines: dict[cst.CSTNode, list[str]] = {}
        #: Import alias or star -> what to import in its place; nothing to remove it.
        self.imports: dict[cst.CSTNode, list[Import]] = {}
        #: Nodes that stay as they are, and names whose bindings stay because such a node goes through them.
        self.frozen: set[cst.CSTNode] = set()
        self.pinned: set[str] = set()
        #: Whether the policies of this file have loss scales: then they are those of `tf_lossscale.legacy`.
        self.legacy_policies = False
        self.findings: list[report.Finding] = []

    def touched(self) -> set[cst.CSTNode]:
        """The nodes that change, and those around them."""
        nodes = [*self.expressions, *self.todos, *self.lines, *self.imports]
        return {around for node in nodes for around in (node, *self._resolver.ancestors(node))}

    def replace(self, node: cst.CSTNode, make: Callable[[cst.CSTNode, Now], cst.CSTNode], new: str) -> None:
        """Replace a node, and report it."""
        self.expressions[node] = make
        self._report(node, report.REWRITTEN, new=new)

    def replace_name(self, node: cst.CSTNode, dotted: str) -> None:
        """Replace a name by a dotted one, and report it."""
        self.gone.add(node)
        self.replace(node, lambda updated, now: with_parentheses_of(updated, cst.parse_expression(dotted)), dotted)

    def rename_attribute(self, node: cst.Attribute, new: str) -> None:
        """Replace the last part of a dotted name, and report it."""
        self.replace(node, lambda updated, now: updated.with_changes(attr=cst.Name(new)), f"{code(node.value)}.{new}")

    def refuse(self, node: cst.Call, reason: str, what: cst.BaseExpression | None = None) -> None:
        """Leave a call as it is, together with all that the name of its function needs, or another part of it."""
        self.todo(node, reason)
        self.freeze(what or node.func)

    def freeze(self, function: cst.BaseExpression) -> None:
        """Leave an expression, together with all that the names in it need."""
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
        """Leave a node as it is, with a comment that says why."""
        comments = self.todos.setdefault(self._resolver.statement(node), [])
        if reason not in comments:
            comments.append(reason)
        self._report(node, report.TODO, reason=reason)

    def noted_import(self, statement: cst.CSTNode, alias: cst.CSTNode, new: list[Import]) -> None:
        """Report an import that will be replaced, or removed if there is nothing new."""
        shown = "; ".join(f"from {i.module} import {i.name}" if i.name else f"import {i.module}" for i in new)
        self._report(statement, report.REWRITTEN, new=shown or "(removed)")

    def notice(self, node: cst.CSTNode, reason: str) -> None:
        """Leave a node as it is, and say so in the report only."""
        self._report(node, report.NOTICE, reason=reason)

    def _report(self, node: cst.CSTNode, kind: str, new: str | None = None, reason: str | None = None) -> None:
        line, column = self._resolver.start(node)
        old = " ".join(code(node).split())
        finding = report.Finding(line, column, kind, _short(old), new and _short(new), reason)
        if finding not in self.findings:
            self.findings.append(finding)


def with_parentheses_of(old: cst.CSTNode, new: cst.BaseExpression) -> cst.BaseExpression:
    """Return the new expression within the parentheses of the old one."""
    return new.with_changes(lpar=getattr(old, "lpar", ()), rpar=getattr(old, "rpar", ()))


def _short(shown: str, length: int = 200) -> str:
    shown = " ".join(shown.split())
    return shown if len(shown) <= length else shown[: length - 3] + "..."


class Visitor:
    """One concern: is shown the nodes of a module by `Tree.visit`, and fills its edits.

    Args:
        resolver: of the module.
        calls: of the module.
        edits: to be filled.
    """

    def __init__(self, resolver: Resolver, calls: Calls, edits: Edits):
        self._resolver = resolver
        self._calls = calls
        self._edits = edits

    def finish(self) -> None:
        """Plan the edits that need the whole module."""
