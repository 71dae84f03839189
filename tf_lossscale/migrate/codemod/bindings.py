"""Reads the names that a file binds at its top level, and its imports.

Only module-level bindings matter to other files, so the standard library's `ast` suffices. It is faster than LibCST.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator

UNKNOWN = "?"


class Bindings(ast.NodeVisitor):
    """The names that a module binds at its top level, and what they refer to according to this module alone.

    >>> Bindings("import tensorflow as tf\\nmp = tf.keras.mixed_precision").names["mp"]
    ['tensorflow.keras.mixed_precision']

    Args:
        source: Python code. Code that does not parse is treated as an empty module.
    """

    def __init__(self, source: str | bytes = ""):
        #: Maps a name, or "name()" for the result of a function, to the dotted names that it may refer to. UNKNOWN
        #: stands for any other value.
        self.names: dict[str, list[str]] = {}
        #: The modules from which the file imports `*`.
        self.stars: list[str] = []
        #: A pair (module, imported names) for every import statement, including import statements in functions.
        self.imports: list[tuple[str, list[str]]] = []
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(source)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    self.imports.append((_module_of(node), [alias.name for alias in node.names]))
                elif isinstance(node, ast.Import):
                    self.imports.extend((alias.name, []) for alias in node.names)
            self.visit(tree)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the statements inside a statement, but not the expressions."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler)):
                self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.split(".", 1)[0]
            self._bind(bound, [alias.name if alias.asname else bound])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = _module_of(node)
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                self._bind(alias.asname or alias.name, [join(module, alias.name)])

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name, value in [pair for target in targets if node.value for pair in _assigned(target, node.value)]:
            self._bind(name, self._dotted(value))

    visit_AnnAssign = visit_Assign

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Bind the name of a function or class.

        If a function `f` returns an object that it imports, also bind "f()" to the object's dotted name.
        """
        self._bind(node.name, [UNKNOWN])
        local, inside = Bindings(), list(ast.walk(node)) if isinstance(node, ast.FunctionDef) else []
        for statement in inside:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                local.visit(statement)
        for statement in inside if local.names else ():
            if isinstance(statement, ast.Return) and statement.value:
                self._bind(f"{node.name}()", local._dotted(statement.value))

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def _bind(self, name: str, meanings: list[str]) -> None:
        bound = self.names.setdefault(name, [])
        bound.extend(meaning for meaning in meanings if meaning not in bound)

    def _dotted(self, value: ast.expr) -> list[str]:
        attributes = ""
        while isinstance(value, ast.Attribute):
            attributes = f".{value.attr}{attributes}"
            value = value.value
        if isinstance(value, ast.Name):
            return [m if m == UNKNOWN else m + attributes for m in self.names.get(value.id, [UNKNOWN])]
        return [] if isinstance(value, ast.Constant) and value.value is None else [UNKNOWN]


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each assigned name with its value. `a, b = x, y` yields two pairs."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        fits = len(parts) == len(target.elts) and not any(isinstance(p, ast.Starred) for p in (*parts, *target.elts))
        for each, part in zip(target.elts, parts if fits else [ast.Constant(...)] * len(target.elts), strict=True):
            yield from _assigned(each, part)


def _module_of(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")


def join(module: str, name: str) -> str:
    """Join a module and a name in this module into a dotted name. The module may be relative.

    >>> join("..", "compat"), join("a.b", "c")
    ('..compat', 'a.b.c')

    Args:
        module: the module, as written in an import statement.
        name: a name in the module.

    Returns:
        The dotted name.
    """
    return module + name if module.endswith(".") or not module else f"{module}.{name}"
