"""The qualified names that the names in a file stand for, through imports and aliases such as `mp = tf.keras`.

Values are not followed: a parameter, an attribute of an object or the result of a call has no qualified name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.source import Source

#: Stands for anything that has no qualified name.
UNKNOWN = "?"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# The customary names of the libraries. If a file does not bind such a name, but contains a star import like `from
# layers import *`, the name is assumed to mean the library.
CUSTOMARY = {"tf": "tensorflow", "tensorflow": "tensorflow", "keras": "keras", "tf_keras": "keras"}


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

    Args:
        content: the bytes of the file.

    Raises:
        ValueError: the file cannot be parsed.
    """

    def __init__(self, content: bytes):
        super().__init__(content)
        #: Maps each variable to the places where it gets its value.
        self.bindings: dict[Variable, list[Binding]] = {}
        #: The modules from which this file imports `*`.
        self.stars: list[str] = []
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._globals: set[Variable] = set()
        self._dotted: dict[ast.AST, frozenset[str]] = {}
        self._scopes[self.tree] = self.tree
        inside: dict[ast.AST, ast.AST] = {}
        for node, parent in self.parents.items():
            self._scopes[node] = inside.get(node) or self._scopes[parent]
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS)):
                inside.update(dict.fromkeys(_inside(node), node))
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
            outer = self.parents[node]
            is_alias = isinstance(outer, ast.AnnAssign) or (isinstance(outer, ast.Assign) and len(outer.targets) == 1)
            value = getattr(outer, "value", None) if is_alias else None
            self._add(node, node.id, Binding(node, value=value))
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            self._add(node, node.name, Binding(node))

    def _add(self, node: ast.AST, name: str, binding: Binding) -> None:
        scope = self._scopes[node]
        scope = self.tree if (scope, name) in self._globals else scope
        self.bindings.setdefault((scope, name), []).append(binding)

    def _import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        if isinstance(node, ast.Import):
            bound = alias.asname or alias.name.split(".", 1)[0]
            self._add(node, bound, Binding(alias, alias.name if alias.asname else bound))
        elif alias.name == "*":
            self.stars.append(module_of(node))
        else:
            self._add(node, alias.asname or alias.name, Binding(alias, f"{_package(node)}{alias.name}"))

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
        if isinstance(node, ast.Call) and len(node.args) == 2 and self.is_builtin(node.func, "getattr"):
            attribute = string(node.args[1])
            return {f"{d}.{attribute}" for d in self.dotted(node.args[0]) if attribute and d != UNKNOWN} or {UNKNOWN}
        if not isinstance(node, ast.Name):
            return {UNKNOWN}
        variable = self.variable(node)
        if variable is None:
            starred = {f"{module}.{node.id}" for module in self.stars}
            old = {dotted for dotted in starred if names.leads_to_old(dotted)}
            return old or {CUSTOMARY.get(node.id, UNKNOWN) if self.stars else UNKNOWN}
        return {dotted for binding in self.bindings[variable] for dotted in self.meanings(binding)}

    def meanings(self, binding: Binding) -> frozenset[str]:
        """Return the qualified names that a binding gives to a variable."""
        if binding.dotted:
            return frozenset({binding.dotted})
        if isinstance(binding.value, ast.Constant) and binding.value.value is None:
            return frozenset()
        return self.dotted(binding.value) if binding.value else frozenset({UNKNOWN})

    @functools.cached_property
    def modules(self) -> set[str]:
        """The modules that this file imports."""
        imports = [node for node in self.parents if isinstance(node, ast.Import)]
        from_imports = [node for node in self.parents if isinstance(node, ast.ImportFrom)]
        return {alias.name for node in imports for alias in node.names} | set(map(module_of, from_imports))

    @functools.cached_property
    def quoted(self) -> set[str]:
        """The words in string annotations and in `__all__`. An imported name among them has to stay."""
        words: set[str] = set()
        for node in self.parents:
            held: list[ast.AST | None] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
            if isinstance(node, ast.Assign) and self.code(node.targets[0]) == "__all__":
                held.append(node.value)
            strings = [string(part) or "" for each in held if isinstance(each, ast.AST) for part in ast.walk(each)]
            words.update(word for text in strings for word in names.WORD.findall(text))
        return words

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class that contains a node."""
        while node is not self.tree:
            node = self.parents[node]
            if isinstance(node, ast.ClassDef):
                return node
        return None


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a function, class or comprehension that are in its own scope."""
    body = getattr(scope, "body", list(ast.iter_child_nodes(scope)))
    yield from body if isinstance(body, list) else [body]


def module_of(node: ast.ImportFrom) -> str:
    """Return the module of a `from` import as written, with leading dots."""
    return "." * node.level + (node.module or "")


def _package(node: ast.ImportFrom) -> str:
    module = module_of(node)
    return module if module.endswith(".") else f"{module}."


def string(node: ast.AST) -> str | None:
    """Return the value of a string literal, or None for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
