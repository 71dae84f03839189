"""Stores the edits planned for one file.

All edits are planned before the first is applied, because an import can be removed only if no use of it remains.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, report
from tf_lossscale.migrate.codemod.arguments import Written, code, rewritten
from tf_lossscale.migrate.codemod.calls import Calls

MARK = "# TODO(tf-lossscale):"

#: A function that returns the edited form of an expression inside a replaced node.
Now = Callable[[cst.BaseExpression], cst.BaseExpression]
#: A function that creates the replacement for a node after the nodes inside it have been edited.
Make = Callable[[cst.CSTNode, Now], cst.CSTNode]


class Edits:
    """The edits planned for one file.

    Args:
        module: the analysis of the file.
    """

    def __init__(self, module: Calls):
        self._module = module
        #: Maps a node to the function that creates its replacement. The nodes inside it are edited first.
        self.expressions: dict[cst.CSTNode, Make] = {}
        #: Nodes that the edits remove. A name in such a node no longer counts as used.
        self.gone: set[cst.CSTNode] = set()
        #: Maps a statement to the TODO comments to insert above it.
        self.todos: dict[cst.CSTNode, list[str]] = {}
        #: Maps an imported name or `*` to the code of the import that replaces it, or to None if it is removed.
        self.imports: dict[cst.CSTNode, str | None] = {}
        #: Nodes that must stay unchanged.
        self.frozen: set[cst.CSTNode] = set()
        #: Names whose imports and assignments must stay, because unchanged code uses them.
        self.pinned: set[str] = set()
        #: True if the dtype policies in this file need a loss scale. They are then created with `tf_lossscale.legacy`.
        self.legacy_policies = False
        self.findings: list[report.Finding] = []

    def changed_statements(self) -> set[cst.CSTNode]:
        """Return the statements whose own code changes, without the statements that enclose them."""
        return {self._module.statement(node) for node in (*self.expressions, *self.imports)}

    def touched(self) -> set[cst.CSTNode]:
        """Return the nodes that change, and all their ancestors."""
        nodes = [*self.expressions, *self.todos, *self.imports]
        return {around for node in nodes for around in (node, *self._module.ancestors(node))}

    def is_settled(self, node: cst.CSTNode) -> bool:
        """Return whether it is already decided that a node stays unchanged or is removed."""
        return node in self.frozen or node in self.gone

    def replace(self, node: cst.CSTNode, make: Make, shown: str | None = None) -> None:
        """Plan to replace a node, and report the change. By default, the report shows the code that `make` creates."""
        self.expressions[node] = make
        self._report(node, report.REWRITTEN, new=shown or code(make(node, lambda old: old)))

    def rewrite_call(self, call: cst.Call, written: Written, func: str | None = None) -> None:
        """Plan the new form of a call. If the dotted name `func` is given, it replaces the called function."""
        new = cst.parse_expression(func) if func else None
        self.replace(call, lambda updated, now: rewritten(updated, written, new, now))

    def replace_name(self, node: cst.CSTNode, dotted: str) -> None:
        """Plan to replace a name with a dotted name, and report the change."""
        self.gone.add(node)
        self.replace(node, lambda updated, now: with_parentheses_of(updated, cst.parse_expression(dotted)))

    def rename_attribute(self, node: cst.Attribute, new: str) -> None:
        """Plan to replace the last part of a dotted name, and report the change."""
        self.replace(node, lambda updated, now: updated.with_changes(attr=cst.Name(new)))

    def refuse(self, node: cst.Call, reason: str, what: cst.BaseExpression | None = None) -> None:
        """Put a TODO comment above a call, and leave the expression `what` in the call unchanged.

        By default, `what` is the expression before the parentheses.
        """
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
        canonical = {names.canonical(dotted) for dotted in self._module.dotted(node)}
        if canonical & {*table.OLD, *names.EMPTIED}:
            self.pinned.add(node.value)
            for value in self._module.values(node):
                if isinstance(value, (cst.Name, cst.Attribute)):
                    self.freeze(value)

    def todo(self, node: cst.CSTNode, reason: str) -> None:
        """Leave a node unchanged, and put a TODO comment with the reason above its statement."""
        comments = self.todos.setdefault(self._module.statement(node), [])
        if reason not in comments:
            comments.append(reason)
        self._report(node, report.TODO, reason=reason)

    def replace_import(self, statement: cst.CSTNode, alias: cst.CSTNode, new: str | None) -> None:
        """Plan to replace an imported name, or to remove it if `new` is None, and report the change."""
        self.imports[alias] = new
        self._report(statement, report.REWRITTEN, new=new.partition(" as ")[0] if new else "(removed)")

    def notice(self, node: cst.CSTNode, reason: str) -> None:
        """Leave a node unchanged, and add a notice to the report, but no comment to the file."""
        self._report(node, report.NOTICE, reason=reason)

    def _report(self, node: cst.CSTNode, kind: str, new: str | None = None, reason: str | None = None) -> None:
        line, column = self._module.start(node)
        finding = report.Finding(line, column, kind, _short(code(node)), new and _short(new), reason)
        if finding not in self.findings:
            self.findings.append(finding)


def with_parentheses_of(old: cst.CSTNode, new: cst.BaseExpression) -> cst.BaseExpression:
    """Return the new expression with the parentheses of the old expression."""
    return new.with_changes(lpar=getattr(old, "lpar", ()), rpar=getattr(old, "rpar", ()))


def _short(shown: str, length: int = 200) -> str:
    shown = " ".join(shown.split())
    return shown if len(shown) <= length else shown[: length - 3] + "..."


class Visitor:
    """Base class of the planners, which visit the nodes of a module and plan edits.

    A planner defines methods such as `visit_Call`, which `Tree.visit` calls for every node of that type.

    Args:
        module: the analysis of the module.
        edits: receives the planned edits.
    """

    def __init__(self, module: Calls, edits: Edits):
        self._module = module
        self._edits = edits

    def finish(self) -> None:
        """Plan the edits that can be decided only after all nodes of the module have been visited."""
