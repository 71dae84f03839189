"""The qualified names that the names in a file stand for, through imports and aliases such as `mp = tf.keras`.

Values are not followed: a parameter, an attribute of an object or the result of a call has no qualified name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.source import Source

#: Stands for anything that has no qualified name.
UNKNOWN = "?"

CONTAINERS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.IfExp, ast.BoolOp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Binding(NamedTuple):
    """A place where a name gets its value: an imported name, an assignment, or something else."""

    node: ast.AST
    #: The qualified name of an imported object, or an empty string.
    dotted: str = ""
    #: The value of an assignment, or None.
    value: ast.expr | None = None


#: A variable: the node of the scope that contains it, and its name.
Variable = tuple[ast.AST, str]


class Scopes(Source):
    """The names in one file, and what they stand for.

    >>> scopes = Scopes(b"import tensorflow as tf\\nmp = tf.keras.mixed_precision\\nmp.Policy")
    >>> scopes.dotted(scopes.tree.body[2].value)
    frozenset({'tensorflow.keras.mixed_precision.Policy'})
    """

    def __init__(self, content: bytes):
        super().__init__(content)
        #: Maps each variable to the places where it gets its value.
        self.bindings: dict[Variable, list[Binding]] = {}
        self._globals: set[Variable] = set()
        self._dotted: dict[ast.AST, frozenset[str]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {self.tree: self.tree}
        inside: dict[ast.AST, ast.AST] = {}
        for node, parent in self.parents.items():
            self._scopes[node] = inside.get(node) or self._scopes[parent]
            if isinstance(node, _SCOPES):
                inside.update(dict.fromkeys(node.body if isinstance(node.body, list) else [node.body], node))
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        """Record the names that a node binds."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self._import(node, alias)
        elif isinstance(node, ast.Global):
            self._globals |= {(self._scopes[node], name) for name in node.names}
        elif isinstance(node, ast.arg):
            function = self.parents[self.parents[node]]
            self.bindings.setdefault((function, node.arg), []).append(Binding(node))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._add(node, node.name, Binding(node))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._add(node, node.id, Binding(node, value=self._assigned_to(node)))

    def _assigned_to(self, node: ast.Name) -> ast.expr | None:
        """Return the value of an assignment to a name, which may be one of several in a tuple."""
        outer = self.parents[node]
        assignment = self.parents[outer] if isinstance(outer, ast.Tuple) else outer
        if isinstance(assignment, ast.AnnAssign):
            return assignment.value
        if not isinstance(assignment, ast.Assign) or len(assignment.targets) > 1:
            return None
        if not isinstance(outer, ast.Tuple):
            return assignment.value
        values = assignment.value.elts if isinstance(assignment.value, ast.Tuple) else []
        return values[outer.elts.index(node)] if len(values) == len(outer.elts) else None

    def _add(self, node: ast.AST, name: str, binding: Binding) -> None:
        scope = self._scopes[node]
        scope = self.tree if (scope, name) in self._globals else scope
        self.bindings.setdefault((scope, name), []).append(binding)

    def _import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        if isinstance(node, ast.Import):
            bound = alias.asname or alias.name.split(".", 1)[0]
            self._add(node, bound, Binding(alias, alias.name if alias.asname else bound))
        elif alias.name != "*":
            module = module_of(node)
            dotted = f"{module}{alias.name}" if module.endswith(".") else f"{module}.{alias.name}"
            self._add(node, alias.asname or alias.name, Binding(alias, dotted))

    def variable(self, name: ast.Name) -> Variable | None:
        """Return the variable to which a name refers, or None if this file does not bind the name."""
        scope = used_in = self._scopes[name]
        while True:
            # The names in the body of a class are no variables of the functions in it.
            is_visible = scope is used_in or not isinstance(scope, ast.ClassDef)
            if is_visible and (scope, name.id) in self.bindings:
                return scope, name.id
            if scope is self.tree:
                return None
            scope = self._scopes[scope]

    def is_builtin(self, node: ast.AST, *expected: str) -> bool:
        """Return whether a node refers to one of the given builtin functions."""
        return isinstance(node, ast.Name) and node.id in expected and self.variable(node) is None

    def dotted(self, node: ast.AST) -> frozenset[str]:
        """Return the qualified names that an expression may stand for, with UNKNOWN if it may be something else."""
        if node not in self._dotted:
            # An alias in a circle, such as `tf = tf`, adds nothing.
            self._dotted[node] = frozenset()
            self._dotted[node] = frozenset(self._resolved(node))
        return self._dotted[node]

    def _resolved(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Attribute):
            return {d if d == UNKNOWN else f"{d}.{node.attr}" for d in self.dotted(node.value)}
        if not isinstance(node, ast.Name):
            return {UNKNOWN}
        variable = self.variable(node)
        return set(self.meanings(variable)) if variable else {UNKNOWN}

    def meanings(self, variable: Variable) -> frozenset[str]:
        """Return the qualified names that a variable may stand for."""
        found: set[str] = set()
        for binding in self.bindings[variable]:
            if binding.dotted:
                found.add(binding.dotted)
            elif not (isinstance(binding.value, ast.Constant) and binding.value.value is None):
                found |= self.dotted(binding.value) if binding.value else {UNKNOWN}
        return frozenset(found)

    def values(self, node: ast.AST) -> list[ast.AST]:
        """Return an expression, the parts of a collection or choice, and what this file assigns to the names in it.

        An attribute has the values of all attributes of its name.
        """
        found = [node]
        for each in found:
            variable = self.variable(each) if isinstance(each, ast.Name) else None
            values: list[ast.AST] = [b.value for b in self.bindings[variable] if b.value] if variable else []
            values += [v for name, v in self._assigned if name == each.attr] if isinstance(each, ast.Attribute) else []
            values += ast.iter_child_nodes(each) if isinstance(each, CONTAINERS) else ()
            found += [value for value in values if value not in found]
        return found

    def read(self, node: ast.AST) -> tuple[ast.expr, str | None]:
        """Return the object and the name of the member that a node reads with a dot, `getattr` or `hasattr`."""
        if isinstance(node, ast.Call) and self.is_builtin(node.func, "getattr", "hasattr") and len(node.args) > 1:
            return node.args[0], string(node.args[1])
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        return (node.value, node.attr) if isinstance(node, ast.Attribute) and is_read else (ast.Constant(None), None)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, from the inside out."""
        while node is not self.tree:
            node = self.parents[node]
            yield node

    @functools.cached_property
    def stored(self) -> set[str]:
        """The names of the attributes that this file assigns or defines."""
        stored = {node.attr for node in self.nodes(ast.Attribute) if isinstance(node.ctx, ast.Store)}
        return stored | {node.name for node in self.nodes(ast.FunctionDef)}

    @functools.cached_property
    def _assigned(self) -> list[tuple[str, ast.expr]]:
        """The names of attributes, with the values that this file assigns to them."""
        pairs = ((target, node.value) for node in self.nodes(ast.Assign) for target in node.targets)
        return [(target.attr, value) for target, value in pairs if isinstance(target, ast.Attribute)]

    @functools.cached_property
    def mentioned(self) -> set[str]:
        """The qualified names that this file imports or uses."""
        used = {dotted for node in self.nodes(ast.Attribute) for dotted in self.dotted(node)}
        return used | self.modules | {each.dotted for bound in self.bindings.values() for each in bound}

    @functools.cached_property
    def modules(self) -> set[str]:
        """The modules that this file imports."""
        imported = {alias.name for node in self.nodes(ast.Import) for alias in node.names}
        return imported | set(map(module_of, self.nodes(ast.ImportFrom)))

    @functools.cached_property
    def quoted(self) -> set[str]:
        """The words in string annotations and in `__all__`. An imported name among them has to stay."""
        held = [getattr(node, name, None) for node in self.parents for name in ("annotation", "returns")]
        held += [node.value for node in self.nodes(ast.Assign) if self.code(node.targets[0]) == "__all__"]
        parts = (part for each in held if isinstance(each, ast.AST) for part in ast.walk(each))
        return {word for part in parts for word in names.WORD.findall(string(part) or "")}


def leads_to_old(dotted: str) -> bool:
    """Return whether a dotted name is an old name, or a package that contains old names."""
    name = table.canonical(dotted)
    return any(f"{old}.".startswith(f"{name}.") for old in (*table.OLD, *table.MODULES, "tensorflow.compat.v1"))


def module_of(node: ast.ImportFrom) -> str:
    """Return the module of a `from` import as written, with leading dots."""
    return "." * node.level + (node.module or "")


def string(node: ast.AST) -> str | None:
    """Return the value of a string literal, or None for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
