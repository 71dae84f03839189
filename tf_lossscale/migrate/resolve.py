"""What a name means where it stands: through imports, aliases, ladders and a project's own modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    Assignment,
    BuiltinAssignment,
    ExpressionContext,
    ExpressionContextProvider,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    ScopeProvider,
)

from tf_lossscale.migrate import names
from tf_lossscale.migrate.project import UNKNOWN, Known, join, leads_to_old


class Meaning(NamedTuple):
    """What an expression may stand for."""

    old: tuple[tuple[str, names.Old], ...]  # (dotted name, entry of the table)
    sure: bool  # False if it may be something else as well

    @property
    def roles(self) -> set[str]:
        """The roles of the old names."""
        return {old.role for _, old in self.old}


class Resolver:
    """Answers what expressions of one module mean.

    Args:
        wrapper: the module with its metadata.
        known: what other files of the project pass on, see `project`.
    """

    def __init__(self, wrapper: MetadataWrapper, known: Known | None = None):
        self.module = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self._contexts = wrapper.resolve(ExpressionContextProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self._known = known or {}
        self._open: set[cst.CSTNode] = set()
        self._attributes: dict[tuple[cst.CSTNode | None, str], list[cst.BaseExpression]] = {}
        #: Words in annotations that are strings: they may be names that are used nowhere else.
        self.annotated: set[str] = set()
        self._dotted: dict[cst.CSTNode, set[str]] = {}
        self.stars: list[str] = []
        #: Whether this file is about TensorFlow: elsewhere `keras` may run on another backend.
        self.imports_tensorflow = False
        self.module.visit(_Collector(self))

    # Names. -----------------------------------------------------------------------------------------------------

    def meaning(self, expression: cst.BaseExpression) -> Meaning:
        """What of the table an expression may stand for."""
        dotted = self.dotted(expression)
        if not self.imports_tensorflow and any(_on_any_backend(d) for d in dotted):
            return Meaning((), False)
        old = [(d, names.OLD[names.canonical(d)]) for d in sorted(dotted) if names.canonical(d) in names.OLD]
        # What else it may be within the same libraries does not exist there: `mp` is one of two modules, say.
        sure = all(names.canonical(d).startswith(("keras.", "tensorflow.", "tf_lossscale.")) for d in dotted)
        return Meaning(tuple(old), sure)

    @functools.cached_property
    def uses_old_api(self) -> bool:
        """Whether an old class of wrappers is named anywhere in the module."""
        return any(
            self.meaning(node).roles & {names.STABLE, names.EXPERIMENTAL, names.CONTRIB, names.GRAPH_REWRITE}
            for node in self.scopes
            if isinstance(node, (cst.Name, cst.Attribute))
        )

    def is_read(self, node: cst.CSTNode) -> bool:
        """Whether a name or attribute is read here, not assigned or deleted."""
        return self._contexts.get(node) is ExpressionContext.LOAD

    def is_deleted(self, node: cst.CSTNode) -> bool:
        """Whether a name is deleted here."""
        return self._contexts.get(node) is ExpressionContext.DEL

    def dotted(self, expression: cst.BaseExpression) -> set[str]:
        """The qualified names that an expression may stand for; UNKNOWN is among them if it may be anything."""
        if expression not in self._dotted:
            found = self._resolved(expression)
            if self._open:  # on the way round a circle of aliases: not the whole answer
                return found
            self._dotted[expression] = found
        return self._dotted[expression]

    def _resolved(self, expression: cst.BaseExpression) -> set[str]:
        if isinstance(expression, cst.Attribute):
            through = {f"{base}.{expression.attr.value}" for base in self.dotted(expression.value) if base != UNKNOWN}
            if through:
                return {d for name in through for d in self._expanded(name)} | (
                    {UNKNOWN} if UNKNOWN in self.dotted(expression.value) else set()
                )
            return self._of_values(self._attribute_values(expression))
        if isinstance(expression, cst.Name):
            return self._of_name(expression)
        if isinstance(expression, cst.IfExp):
            return self.dotted(expression.body) | self.dotted(expression.orelse)
        if (
            isinstance(expression, cst.Call)
            and self.is_builtin(expression.func, "getattr")
            and len(expression.args) == 2
            and isinstance(expression.args[1].value, cst.SimpleString)
        ):
            attribute = expression.args[1].value.evaluated_value
            bases = self.dotted(expression.args[0].value) - {UNKNOWN}
            return {f"{base}.{attribute}" for base in bases} or {UNKNOWN}
        return {UNKNOWN}

    def through_project(self, expression: cst.BaseExpression) -> bool:
        """Whether an attribute is taken from a module of the project, which binds it."""
        if not isinstance(expression, cst.Attribute):
            return False
        return any(
            base in self._known and expression.attr.value in self._known[base] for base in self.dotted(expression.value)
        )

    def knows(self, module: str, name: str) -> bool:
        """Whether the project passes a name on in this module, as the file names it."""
        return name in self._known.get(module, {})

    def is_builtin(self, expression: cst.BaseExpression, name: str) -> bool:
        """Whether an expression is the builtin of this name."""
        if not isinstance(expression, cst.Name) or expression.value != name:
            return False
        return all(isinstance(a, BuiltinAssignment) for a in self._in_scope(expression))

    def _of_name(self, name: cst.Name) -> set[str]:
        found: set[str] = set()
        assignments = [a for a in self._in_scope(name) if not isinstance(a, BuiltinAssignment)]
        if not assignments:
            starred = {
                dotted
                for star in self.stars
                for dotted in self._expanded(join(star, name.value))
                if leads_to_old(dotted)
            }
            return starred or {UNKNOWN}
        for assignment in self._reaching(name, assignments):
            if isinstance(assignment, ImportAssignment):
                found |= self._of_import(assignment)
            else:
                value = self.assigned_value(assignment)
                if value is None:
                    found.add(UNKNOWN)
                elif not _is_none(value):
                    found |= self._of_values([value])
        return found

    def _of_values(self, values: Sequence[cst.BaseExpression]) -> set[str]:
        found: set[str] = set() if values else {UNKNOWN}
        for value in values:
            if value in self._open:
                continue
            self._open.add(value)
            found |= self.dotted(value)
            self._open.discard(value)
        return found

    def _of_import(self, assignment: ImportAssignment) -> set[str]:
        statement = assignment.node
        for alias in statement.names if not isinstance(statement.names, cst.ImportStar) else ():
            bound = alias.evaluated_alias or alias.evaluated_name
            if bound.split(".")[0] != assignment.name.split(".")[0]:
                continue
            if isinstance(statement, cst.ImportFrom):
                return self._expanded(join(module_of(statement), alias.evaluated_name))
            if alias.asname:
                return self._expanded(alias.evaluated_name)
            return {bound.split(".")[0]}
        return {UNKNOWN}

    def _expanded(self, dotted: str) -> set[str]:
        """Looks a dotted name up in the project's modules."""
        parts = dotted.split(".")
        for split in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:split]) or "."
            module = module if module.strip(".") else dotted[: len(dotted) - len(dotted.lstrip("."))]
            exported = self._known.get(module, {})
            if parts[split] in exported:
                rest = "".join(f".{part}" for part in parts[split + 1 :])
                return {d if d == UNKNOWN else d + rest for d in exported[parts[split]]}
            starred = {join(star, ".".join(parts[split:])) for star in exported.get("*", ())}
            starred = {name for name in starred if leads_to_old(name)}
            if starred:
                return starred
        return {dotted}

    # Values. ----------------------------------------------------------------------------------------------------

    def values(self, expression: cst.BaseExpression) -> list[cst.BaseExpression | None]:
        """The expressions whose value a variable or attribute may hold; None stands for an unknown one."""
        if isinstance(expression, cst.Name):
            assignments = [a for a in self._in_scope(expression) if not isinstance(a, BuiltinAssignment)]
            reaching = self._reaching(expression, assignments)
            return [self.assigned_value(a) for a in reaching] or [None]
        if isinstance(expression, cst.Attribute):
            return [*self._attribute_values(expression)] or [None]
        return [expression]

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
        return [a for a in self._in_scope(name) if not isinstance(a, BuiltinAssignment)]

    def _attribute_values(self, attribute: cst.Attribute) -> list[cst.BaseExpression]:
        text = get_full_name_for_node(attribute)
        if text is None:
            return []
        return self._attributes.get((self.enclosing(attribute, cst.ClassDef), text), [])

    def note_attribute(self, target: cst.Attribute, value: cst.BaseExpression) -> None:
        """Remembers a `self.x = value`."""
        text = get_full_name_for_node(target)
        if text is not None:
            self._attributes.setdefault((self.enclosing(target, cst.ClassDef), text), []).append(value)

    def _in_scope(self, name: cst.Name) -> list[object]:
        scope = self.scopes.get(name)
        return list(scope[name.value]) if scope is not None else []

    # Which assignment reaches a use. ------------------------------------------------------------------------------

    def _reaching(self, name: cst.Name, assignments: list[object]) -> list[object]:
        """Leaves out what a later assignment on the way to this use, in the same function, has overwritten."""
        scope = self.scopes.get(name)
        here = [a for a in assignments if getattr(a, "scope", None) is scope]
        if len(assignments) < 2 or len(here) != len(assignments):
            return assignments
        around = [a for a in self.ancestors(name, stop=_SCOPES) if isinstance(a, (cst.IndentedBlock, cst.Module))]
        in_loop = any(isinstance(node, (cst.For, cst.While)) for node in self.ancestors(name, stop=_SCOPES))
        use = self._line(self.statement(name))
        reaching, last = [], None
        for assignment in here:
            node = self._binding_node(assignment)
            if node is None:  # a parameter, or a definition
                reaching.append((-1, assignment))
                continue
            start = self._line(node)
            if start >= use and not in_loop:
                continue
            reaching.append((start, assignment))
            block = self.parents.get(node)
            if block in around and start < use and (last is None or start > last):
                last = start
        kept = [assignment for start, assignment in reaching if last is None or start >= last]
        return kept or assignments

    def _binding_node(self, assignment: object) -> cst.CSTNode | None:
        node = getattr(assignment, "node", None)
        simple = isinstance(assignment, ImportAssignment) or (
            isinstance(node, cst.Name) and self.value_assigned_to(node) is not None
        )
        statement = self.enclosing(node, cst.SimpleStatementLine) if simple and node is not None else None
        if node is not None and statement is None and not isinstance(node, cst.Param):
            return self.enclosing(node, cst.BaseStatement)
        return statement

    def _line(self, node: cst.CSTNode) -> int:
        return self.positions[node].start.line

    # The tree. --------------------------------------------------------------------------------------------------

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


_SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)


class _Collector(cst.CSTVisitor):
    """Collects what scopes do not tell: star imports, and values assigned to attributes."""

    def __init__(self, resolver: Resolver):
        super().__init__()
        self._resolver = resolver

    def visit_Annotation(self, node: cst.Annotation) -> None:
        for string in m.findall(node, m.SimpleString()):
            self._resolver.annotated.update(re.findall(r"\w+", cst.ensure_type(string, cst.SimpleString).value))

    def visit_Import(self, node: cst.Import) -> None:
        self._note(alias.evaluated_name for alias in node.names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        self._note([module_of(node)])
        if isinstance(node.names, cst.ImportStar):
            self._resolver.stars.append(module_of(node))
        return False

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Attribute):
                self._resolver.note_attribute(target.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if isinstance(node.target, cst.Attribute) and node.value is not None:
            self._resolver.note_attribute(node.target, node.value)

    def _note(self, modules: Iterable[str]) -> None:
        if any(module.split(".", 1)[0] in ("tensorflow", "tf_keras") for module in modules):
            self._resolver.imports_tensorflow = True


def _on_any_backend(dotted: str) -> bool:
    return dotted.startswith("keras.") and names.canonical(dotted) in names.OLD and "experimental" not in dotted


def module_of(statement: cst.ImportFrom) -> str:
    """The module of a `from` import, as it is written."""
    name = get_full_name_for_node(statement.module) if statement.module else ""
    return "." * len(statement.relative) + (name or "")


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"
