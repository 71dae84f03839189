"""Resolves names in code through imports, aliases, if/else chains and a project's modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import ClassScope, ImportAssignment

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import text
from tf_lossscale.migrate.codemod.bindings import UNKNOWN, join
from tf_lossscale.migrate.codemod.project import Around, leads_to_old
from tf_lossscale.migrate.codemod.tree import Tree, methods

# The customary names of the libraries. If a file does not bind such a name, but contains a star import like `from
# layers import *`, the name is assumed to mean the library. Without a star import, uses of old names that begin with
# this name are reported but not rewritten.
LIBRARIES = {"tf": "tensorflow", "tensorflow": "tensorflow", "keras": "keras", "tf_keras": "keras"}


_TESTED = m.SaveMatchedNode(m.DoNotCare(), "tested")
_TYPE_TEST = m.Comparison(
    m.Attribute(_TESTED, m.Name("__class__")) | m.Call(m.Name("type"), [m.Arg(_TESTED)]),
    [m.ComparisonTarget(m.Is() | m.IsNot() | m.Equal() | m.NotEqual())],
)


_CLASS = m.SaveMatchedNode(m.DoNotCare(), "class")
_OPTIONAL = m.BinaryOperation(_CLASS, m.BitOr(), m.Name("None")) | m.Subscript(
    m.Name("Optional") | m.Attribute(attr=m.Name("Optional")), [m.SubscriptElement(m.Index(_CLASS))]
)


class Meaning(NamedTuple):
    """The old names that an expression may refer to."""

    # Pairs of a dotted name and its entry in the table of old names.
    old: tuple[tuple[str, table.Old], ...]
    # False if the expression may also refer to something other than an old name.
    sure: bool

    @property
    def roles(self) -> set[str]:
        """The roles that the table of old names assigns to these names. A role says what the name was used for."""
        return {old.role for _, old in self.old}


class Resolver(Tree):
    """Resolves the meanings of expressions in one module.

    Args:
        module: the module's syntax tree.
        around: facts about the other files of the project.
    """

    def __init__(self, module: cst.Module, around: Around):
        super().__init__(module)
        self.around = around
        self._open: set[cst.CSTNode] = set()
        # The values assigned to attributes. A key consists of the enclosing class and the attribute's source code.
        self._attributes: dict[tuple[cst.CSTNode | None, str], list[cst.BaseExpression]] = {}
        # The values that class bodies assign to names. A key consists of the class and the name with "self." in front
        # of it.
        self._in_bodies: dict[tuple[cst.CSTNode | None, str], list[cst.BaseExpression]] = {}
        self._annotations: dict[tuple[cst.CSTNode | None, str], cst.Annotation] = {}
        self._returned: dict[cst.CSTNode | None, list[cst.BaseExpression]] = {}
        #: The words in string annotations. Each of them may be a use of an imported name.
        self.annotated: set[str] = set()
        self._dotted: dict[cst.CSTNode, set[str]] = {}
        statements = [node for node in self.parents if isinstance(node, cst.ImportFrom)]
        imports = [
            alias.evaluated_name for node in self.parents if isinstance(node, cst.Import) for alias in node.names
        ]
        imports += map(module_of, statements)
        self._stars = [module_of(node) for node in statements if isinstance(node.names, cst.ImportStar)]
        #: True if this file imports TensorFlow or tf_keras. Otherwise, Keras may run on another backend in this file.
        self.imports_tensorflow = any(re.match(r"(tensorflow|tf_keras)\b", module) for module in imports)
        self.visit(self)

    # Names. -----------------------------------------------------------------------------------------------------

    def meaning(self, expression: cst.BaseExpression) -> Meaning:
        """Return the old names that an expression may refer to."""
        dotted = self.dotted(expression)
        if not self.imports_tensorflow and any(_on_any_backend(d) for d in dotted):
            return Meaning((), False)
        old = [(d, table.OLD[names.canonical(d)]) for d in sorted(dotted) if names.canonical(d) in table.OLD]
        # Even if `mp` may be either of two modules of TensorFlow or Keras, the meaning of `mp.set_policy` is certain,
        # because only one of the two modules contains this name.
        sure = all(names.canonical(d).startswith(("keras.", "tensorflow.", "tf_lossscale.")) for d in dotted)
        return Meaning(tuple(old), sure)

    @functools.cached_property
    def uses_old_api(self) -> bool:
        """Whether the module refers to an old wrapper class or to the mixed precision graph rewrite."""
        return not self._roles.isdisjoint({table.STABLE, table.EXPERIMENTAL, table.CONTRIB, table.GRAPH_REWRITE})

    @functools.cached_property
    def uses_an_old_name(self) -> bool:
        """Whether the module contains an old name. Names in tf_lossscale itself do not count."""
        return bool(self._roles - {table.OURS})

    @functools.cached_property
    def _roles(self) -> set[str]:
        """The roles of the old names that the module contains, from the table of old names.

        The set also contains "module" if the code refers to a removed module.
        """
        # `self.scopes` also contains names from string annotations. These names are not nodes of the tree.
        nodes = [n for n in self.scopes if isinstance(n, (cst.Name, cst.Attribute)) and n in self.parents]
        modules = {names.canonical(d) for node in nodes for d in self.dotted(node)} & table.MODULES.keys()
        return {role for node in nodes for role in self.meaning(node).roles} | ({"module"} if modules else set())

    def dotted(self, expression: cst.BaseExpression) -> set[str]:
        """Return the possible qualified names of an expression, with UNKNOWN if it may also be something else."""
        if expression not in self._dotted:
            names_of = self._resolved(expression)
            # The result is not cached while a cycle of aliases is being resolved, because it may be incomplete.
            if self._open:
                return names_of
            self._dotted[expression] = names_of
        return self._dotted[expression]

    def _resolved(self, expression: cst.BaseExpression) -> set[str]:
        if isinstance(expression, cst.Attribute):
            bases = self.dotted(expression.value)
            through = {f"{base}.{expression.attr.value}" for base in bases - {UNKNOWN}}
            if through:
                return {dotted for name in through for dotted in self.around.expanded(name)} | (bases & {UNKNOWN})
            return self._of_values(self._attribute_values(expression))
        if isinstance(expression, cst.Name):
            return self._of_name(expression)
        if isinstance(expression, cst.IfExp):
            return self.dotted(expression.body) | self.dotted(expression.orelse)
        if (
            isinstance(expression, cst.Call)
            and len(expression.args) == 2
            and self.is_builtin(expression.func, "getattr")
        ):
            attribute = text(expression.args[1].value)
            bases = self.dotted(expression.args[0].value) - {UNKNOWN}
            return {f"{base}.{attribute}" for base in bases if attribute} or {UNKNOWN}
        if isinstance(expression, cst.Call) and not expression.args:
            return self._module_from(expression.func)
        return {UNKNOWN}

    def _module_from(self, function: cst.BaseExpression) -> set[str]:
        """Return the modules that a call without arguments may return, or UNKNOWN if none belongs to the old API.

        The function may be defined in another file.
        """
        values = self.returned(function)
        exported = {module for dotted in self.dotted(function) for module in self.around.expanded(f"{dotted}()")}
        modules = self._of_values(values) if values else exported
        return modules if any(names.canonical(module) in names.EMPTIED for module in modules) else {UNKNOWN}

    def through_project(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression such as `compat.Policy` reads a name that a module of the project re-exports."""
        if not isinstance(expression, cst.Attribute):
            return False
        read = {f"{base}.{expression.attr.value}" for base in self.dotted(expression.value)}
        return any(self.around.expanded(dotted) != {dotted} for dotted in read)

    def is_wrapper_class(self, owner: cst.ClassDef | None) -> bool:
        """Return whether a class derives directly from an old wrapper class."""
        bases = owner.bases if owner else ()
        return any(self.meaning(base.value).roles & {*names.WRAPPERS} for base in bases)

    def is_builtin(self, expression: cst.BaseExpression, name: str) -> bool:
        """Return whether an expression refers to the builtin function with a given name, rather than to a variable."""
        return isinstance(expression, cst.Name) and expression.value == name and not self.assignments(expression)

    def type_tested(self, comparison: cst.Comparison) -> cst.BaseExpression | None:
        """Return `x` from a test such as `type(x) is ...` or `x.__class__ != ...`, or None for other comparisons."""
        match = m.extract(comparison, _TYPE_TEST)
        tested = match and match["tested"]
        return tested if isinstance(tested, cst.BaseExpression) else None

    def _of_name(self, name: cst.Name) -> set[str]:
        dotted_names: set[str] = set()
        assignments = self.assignments(name)
        if not assignments:
            starred = {d for star in self._stars for d in self.around.expanded(join(star, name.value))}
            by_custom = LIBRARIES.get(name.value) if self._stars else None
            return {dotted for dotted in starred if leads_to_old(dotted)} or {by_custom or UNKNOWN}
        for assignment in self.reaching(name):
            if isinstance(assignment, ImportAssignment):
                imported = assignment.get_qualified_names_for(name.value)
                dotted_names |= {dotted for each in imported for dotted in self.around.expanded(each.name)} or {UNKNOWN}
            else:
                value = self.assigned_value(assignment)
                if value is None:
                    dotted_names.add(UNKNOWN)
                elif not is_none(value):
                    dotted_names |= self._of_values([value])
        return dotted_names

    def _of_values(self, values: Sequence[cst.BaseExpression]) -> set[str]:
        dotted_names: set[str] = set() if values else {UNKNOWN}
        for value in values:
            if value in self._open:
                continue
            self._open.add(value)
            dotted_names |= self.dotted(value)
            self._open.discard(value)
        return dotted_names

    # Values. ----------------------------------------------------------------------------------------------------

    def values(self, expression: cst.BaseExpression) -> list[cst.BaseExpression | None]:
        """Return the expressions that may be the value of a variable or attribute; None stands for an unknown value."""
        if isinstance(expression, cst.Name):
            return [self.assigned_value(a) for a in self.reaching(expression)] or [None]
        if isinstance(expression, cst.Attribute):
            return [*self._attribute_values(expression)] or [None]
        return [expression]

    def annotated_classes(self, expression: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return the classes in the annotations of a variable or attribute.

        If any assignment to the variable or attribute has no annotation, the list is empty.
        """
        annotations: list[cst.Annotation | None] = []
        if isinstance(expression, cst.Name):
            annotations = [self._annotation(getattr(a, "node", None)) for a in self.reaching(expression)]
        elif isinstance(expression, cst.Attribute):
            owners = [self.enclosing(expression, cst.ClassDef)]
            if not _is_self(expression.value):
                owners = [cls for value in self.values(expression.value) for cls in self._class_of(value)]
            annotations = [self._annotations.get((owner, expression.attr.value)) for owner in owners]
        return [self._class(each.annotation) for each in annotations if each] if None not in annotations else []

    def _annotation(self, node: object) -> cst.Annotation | None:
        outer = node if isinstance(node, cst.Param) else self.parents.get(node)
        return outer.annotation if isinstance(outer, (cst.Param, cst.AnnAssign)) else None

    def _class(self, annotation: cst.BaseExpression) -> cst.BaseExpression:
        """Return the class in an annotation, without quotes, `Optional[...]` or `| None` around it."""
        if isinstance(annotation, cst.SimpleString):
            return self._class(self._quoted(annotation))
        optional = m.extract(annotation, _OPTIONAL)
        return self._class(cst.ensure_type(optional["class"], cst.BaseExpression)) if optional else annotation

    def _quoted(self, string: cst.SimpleString) -> cst.BaseExpression:
        """Parse a string annotation. The names in the result are looked up in the scope that contains the string."""
        try:
            expression = cst.parse_expression(str(string.evaluated_value))
        except cst.ParserSyntaxError:
            return cst.Name("None")
        scope = next(self.scopes[outer] for outer in self.ancestors(string) if outer in self.scopes)
        self.scopes |= {name: scope for name in m.findall(expression, m.Name())}
        return expression

    def _attribute_values(self, attribute: cst.Attribute) -> list[cst.BaseExpression]:
        text = get_full_name_for_node(attribute)
        if text is None:
            return []
        owner = self.enclosing(attribute, cst.ClassDef)
        if owner and text.startswith(("self.", "cls.")):
            return self._in_family(owner, f"self.{text.partition('.')[2]}")
        values = self._attributes.get((owner, text), [])
        if not values and isinstance(attribute.value, cst.Name):
            made = [cls for value in self.values(attribute.value) for cls in self._class_of(value)]
            made += self._definitions(attribute.value)
            values = [value for cls in made for value in self._in_family(cls, f"self.{attribute.attr.value}")]
        return values

    def _in_family(self, owner: cst.ClassDef, text: str, depth: int = 8) -> list[cst.BaseExpression]:
        """Return the values that a class or its base classes in this file assign to an attribute of `self`."""
        values = list(self._attributes.get((owner, text), [])) or self._modules_in_body(owner, text)
        for base in owner.bases if depth else ():
            for node in self._definitions(base.value):
                values += self._in_family(node, text, depth - 1)
        return values

    def _modules_in_body(self, owner: cst.ClassDef, text: str) -> list[cst.BaseExpression]:
        """Return the modules that a class body assigns to a name, if these modules contain old names.

        Classes that a class body assigns to a name are ignored: they are often defaults that a subclass replaces.
        """
        values = self._in_bodies.get((owner, text), [])
        return [v for v in values if any(names.canonical(dotted) in names.EMPTIED for dotted in self.dotted(v))]

    def _class_of(self, value: cst.BaseExpression | None) -> list[cst.ClassDef]:
        """Return the classes defined in this file that a call may instantiate."""
        return self._definitions(value.func) if isinstance(value, cst.Call) else []

    def returned(self, function: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return the expressions in the `return` statements of a function defined in this file, or of a method called
        as `self.method`."""
        nodes: list[object] = []
        owner = self.enclosing(function, cst.ClassDef)
        if isinstance(function, cst.Name):
            nodes = [getattr(a, "node", None) for a in self.assignments(function)]
        elif isinstance(function, cst.Attribute) and _is_self(function.value):
            nodes = [methods(owner).get(function.attr.value)]
        if len(nodes) != 1 or not isinstance(nodes[0], cst.FunctionDef) or nodes[0].decorators:
            return []
        return self._returned.get(nodes[0], [])

    def _definitions(self, name: cst.BaseExpression) -> list[cst.ClassDef]:
        if not isinstance(name, cst.Name):
            return []
        nodes = [getattr(a, "node", None) for a in self.assignments(name)]
        return [node for node in nodes if isinstance(node, cst.ClassDef)]

    def is_shim(self, node: cst.CSTNode, attribute: str) -> bool:
        """Return whether a node is part of a statement that adds a missing name to a module.

        An example is `if not hasattr(module, "name"): module.name = ...`.

        Args:
            node: the node that assigns the name or tests whether it exists.
            attribute: the name.
        """
        name = m.Arg(m.SimpleString(m.MatchRegex(f".{attribute}.")))
        module = m.SaveMatchedNode(m.DoNotCare(), "module")
        asked = m.Call(m.Name("hasattr"), [m.Arg(), name])
        gives = m.AssignTarget(m.Attribute(module, m.Name(attribute))) | m.Call(
            m.Name("setattr"), [m.Arg(module), name, m.ZeroOrMore()]
        )
        for outer in self.ancestors(node):
            is_if = isinstance(outer, cst.If) and m.findall(outer.test, asked)
            is_try = isinstance(outer, cst.Try) and m.findall(outer.body, m.Attribute(attr=m.Name(attribute)))
            if is_if or is_try:
                given = [match["module"] for match in m.extractall(outer, gives)]
                return any(self.dotted(each) - {UNKNOWN} for each in given if isinstance(each, cst.BaseExpression))
        return False

    def assigns(self, attribute: str) -> bool:
        """Return whether the module contains an assignment to an attribute with this name."""
        return any(text.endswith(f".{attribute}") for _, text in self._attributes)

    @functools.cached_property
    def listed_in_all(self) -> set[str]:
        """The names in `__all__`, if it is assigned a literal list or tuple."""
        listed = m.Assign([m.AssignTarget(m.Name("__all__"))], m.List() | m.Tuple())
        lists = [node for node in self.parents if isinstance(node, cst.Assign) and m.matches(node, listed)]
        strings = [string for each in lists for string in m.findall(each, m.SimpleString())]
        return {str(string.evaluated_value) for string in strings if isinstance(string, cst.SimpleString)}

    # Facts that scopes lack. --------------------------------------------------------------------------------------

    def visit_Annotation(self, node: cst.Annotation) -> None:
        """Record the words in string annotations."""
        for string in m.findall(node, m.SimpleString()):
            self.annotated.update(re.findall(r"\w+", cst.ensure_type(string, cst.SimpleString).value))

    def visit_Assign(self, node: cst.Assign) -> None:
        """Record the value of each assignment `self.x = value`."""
        for target in (each.target for each in node.targets):
            parts = [e.value for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
            for part in parts:
                self._note_attribute(part, self.value_assigned_to(part))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        """Record the annotations of attributes: `self.x: T = value` and, in the body of a class, `x: T`."""
        name = node.target.attr if isinstance(node.target, cst.Attribute) else node.target
        in_body = isinstance(self.scopes.get(node.target), ClassScope)
        if isinstance(name, cst.Name) and (in_body or _is_self(getattr(node.target, "value", None))):
            self._annotations[self.enclosing(node, cst.ClassDef), name.value] = node.annotation
        self._note_attribute(node.target, node.value)

    def _note_attribute(self, target: cst.BaseExpression, value: cst.BaseExpression | None) -> None:
        place, name = self.enclosing(target, cst.ClassDef), get_full_name_for_node(target)
        if isinstance(target, cst.Attribute) and name and value:
            self._attributes.setdefault((place, name), []).append(value)
        elif isinstance(self.scopes.get(target), ClassScope) and value:
            self._in_bodies.setdefault((place, f"self.{name}"), []).append(value)

    def visit_Return(self, node: cst.Return) -> None:
        """Record the value of a `return` statement for the function around it."""
        value = node.value or cst.Name("None")
        self._returned.setdefault(self.enclosing(node, cst.FunctionDef), []).append(value)


def _on_any_backend(dotted: str) -> bool:
    return dotted.startswith("keras.") and names.canonical(dotted) in table.OLD and "experimental" not in dotted


def module_of(statement: cst.ImportFrom) -> str:
    """Return the module name in a `from` import as written, with leading dots."""
    name = get_full_name_for_node(statement.module) if statement.module else ""
    return "." * len(statement.relative) + (name or "")


def _is_self(value: object) -> bool:
    return isinstance(value, cst.Name) and value.value == "self"


def is_none(value: cst.BaseExpression) -> bool:
    """Return whether an expression is the constant `None`."""
    return isinstance(value, cst.Name) and value.value == "None"
