"""The first pass: finds the modules of a project that re-export old names, possibly under other names.

Only module-level bindings matter, so the standard library's `ast` suffices. It is faster than LibCST.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names

UNKNOWN = "?"


class Bindings(NamedTuple):
    """The names that a module binds at its top level, as written in its source."""

    # Maps a name, or "name()" for the result of a function, to the dotted names that it may refer to. UNKNOWN stands
    # for any other value.
    names: dict[str, list[str]]
    # The modules in statements `from module import *`.
    stars: list[str]
    # (module, imported names) of every import statement, including those in functions.
    imports: list[tuple[str, list[str]]]


class Around(NamedTuple):
    """Facts about the other files of a project, found by a text search. They are None if there are no other files."""

    # Whether another file wraps an optimizer.
    wraps: bool | None = None
    # Whether another file calls `compile`.
    compiles: bool | None = None

    @property
    def reason(self) -> str | None:
        """Why a call of `compile` in another file may have created an optimizer; None if no other file calls it."""
        if self.compiles is None:
            return "Suspected because the files that call compile() were not given."
        return "Suspected because another file calls compile()." if self.compiles else None


def read(source: str | bytes) -> Bindings:
    """Return the module-level bindings of a source file.

    >>> read("import tensorflow as tf\\nmp = tf.keras.mixed_precision").names["mp"]
    ['tensorflow.keras.mixed_precision']

    Args:
        source: Python code.

    Returns:
        The bindings. They are empty if the code does not parse, which the second pass reports.
    """
    bindings = Bindings({}, [], [])
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return bindings
    for statement in _at_top_level(tree):
        _read_statement(statement, bindings)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            bindings.imports.append((module_of(node), [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            bindings.imports.extend((alias.name, []) for alias in node.names)
    return bindings


def _at_top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements in a module's scope, including those in blocks such as `if`, without recursion."""
    waiting: list[ast.stmt] = tree.body[::-1]
    while waiting:
        statement = waiting.pop()
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            waiting.extend(inner for block in reversed(blocks) for inner in reversed(block))


def _read_statement(statement: ast.stmt, bindings: Bindings) -> None:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            bound = alias.asname or alias.name.split(".", 1)[0]
            _bind(bindings, bound, [alias.name if alias.asname else bound])
    elif isinstance(statement, ast.ImportFrom):
        module = module_of(statement)
        for alias in statement.names:
            if alias.name == "*":
                bindings.stars.append(module)
            else:
                _bind(bindings, alias.asname or alias.name, [join(module, alias.name)])
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for name, value in [pair for target in targets for pair in _assigned(target, statement.value)]:
            _bind(bindings, name, _dotted(value, bindings))
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        _bind(bindings, statement.name, [UNKNOWN])
        for dotted in _returned(statement) if isinstance(statement, ast.FunctionDef) else ():
            _bind(bindings, f"{statement.name}()", [dotted])


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each assigned name with its value. For `a, b = x, y` these are two pairs."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        fits = len(parts) == len(target.elts) and not any(isinstance(p, ast.Starred) for p in (*parts, *target.elts))
        for each, part in zip(target.elts, parts if fits else [value] * len(target.elts), strict=True):
            yield from _assigned(each, part if fits else ast.Constant(...))


def _returned(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the dotted names of the locally imported objects that a function may return."""
    local = Bindings({}, [], [])
    for statement in ast.walk(function):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            _read_statement(statement, local)
    for statement in ast.walk(function) if local.names else ():
        if isinstance(statement, ast.Return) and statement.value is not None:
            yield from _dotted(statement.value, local)


def _bind(bindings: Bindings, name: str, meanings: list[str]) -> None:
    known = bindings.names.setdefault(name, [])
    known.extend(meaning for meaning in meanings if meaning not in known)


def _dotted(value: ast.expr, bindings: Bindings) -> list[str]:
    attributes = ""
    while isinstance(value, ast.Attribute):
        attributes = f".{value.attr}{attributes}"
        value = value.value
    if isinstance(value, ast.Name):
        return [m if m == UNKNOWN else m + attributes for m in bindings.names.get(value.id, [UNKNOWN])]
    return [] if isinstance(value, ast.Constant) and value.value is None else [UNKNOWN]


def module_of(node: ast.ImportFrom) -> str:
    """Return the module name in a `from` import as written, with leading dots."""
    return "." * node.level + (node.module or "")


def join(module: str, name: str) -> str:
    """Return the dotted name of a name in a module. The module may be relative.

    >>> join("..", "compat"), join("a.b", "c")
    ('..compat', 'a.b.c')

    Args:
        module: the module, as written in an import statement.
        name: a name in the module.

    Returns:
        The dotted name.
    """
    return module + name if module.endswith(".") or not module else f"{module}.{name}"


#: Maps a name that a file exports to the dotted names that it may refer to. The key "*" maps to the library modules
#: from which the file imports `*`.
Exports = dict[str, list[str]]
# The maximum number of rounds in which circular imports are resolved. A few rounds suffice, unless a statement like
# `mp = other.mp.experimental` in a circle adds a longer name in every round.
_ROUNDS = 20

#: The old names that a file can import from other files of the project. The keys are modules, as the file names them in
#: its imports.
Known = dict[str, Exports]


class Project:
    """The modules of a project, with the old names that each module re-exports to the other modules.

    >>> project = Project({
    ...     "/p/compat.py": read("from tensorflow.keras.mixed_precision import LossScaleOptimizer as LSO"),
    ...     "/p/train.py": read("from compat import LSO"),
    ... })
    >>> project.known("/p/train.py")
    {'compat': {'LSO': ['tensorflow.keras.mixed_precision.LossScaleOptimizer']}}

    Args:
        modules: the bindings of each file, by absolute path.
        importers: a function that takes a path and returns the files that may import it; by default all files.
    """

    def __init__(self, modules: Mapping[str, Bindings], importers: Callable[[str], Iterable[str]] | None = None):
        self._modules = modules
        self._importers = importers or (lambda path: modules)
        self._by_tail: dict[str, list[str]] = {}
        for path in modules:
            self._by_tail.setdefault(tail(path), []).append(path)
        self._exports: dict[str, Exports] = {}

    def requested(self, path: str) -> set[str]:
        """Return the names that other files import from a file, including "*" if they may use any of its names."""
        found: set[str] = set()
        for other in self._importers(path):
            for module, wanted in self._modules[other].imports:
                if self._find(other, module) == path:
                    found.update(wanted or {"*"})
                if any(self._find(other, join(module, name)) == path for name in wanted):
                    # The other file imports the module as an object, and may use any of its attributes.
                    found.add("*")
        return found

    def with_old_names(self, paths: Iterable[str]) -> set[str]:
        """Return the given files, and all files that import an old name from them, directly or indirectly.

        Args:
            paths: the files that contain an old name.
        """
        found = set(paths)
        waiting = list(found)
        while waiting:
            provider = waiting.pop()
            if _has_old_name(self._exported(provider)):
                new = {other for other in self._importers(provider) if self._takes_old_name(other)} - found
                found |= new
                waiting += new
        return found

    def _takes_old_name(self, path: str) -> bool:
        return any(_has_old_name(exported) for exported in self.known(path).values())

    def known(self, path: str) -> Known:
        """Return the old names that a file can access in other files of the project."""
        found: Known = {}
        for module, wanted in self._modules[path].imports:
            for candidate in (module, *(join(module, name) for name in wanted)):
                provider = self._find(path, candidate)
                if provider and provider != path:
                    exported = self._exported(provider)
                    if exported:
                        found[candidate] = exported
        return found

    def _exported(self, path: str) -> Exports:
        """Return the old names that a file re-exports, and the possible meanings of each.

        Imports may be circular, so the exports of the file and of all files that it imports are computed repeatedly,
        until none of them changes. The result does not depend on which file is asked for first.
        """
        if path not in self._exports:
            found: dict[str, Exports] = {path: {}}
            grows = True
            for _ in range(_ROUNDS):
                grows = False
                # Imported files were added after the files that import them. In reverse, they are read first.
                for each in reversed(list(found)):
                    count, before = len(found), found[each]
                    found[each] = self._read_exports(each, lambda other: self._so_far(other, found))
                    grows = grows or found[each] != before or len(found) > count
                if not grows:
                    break
            self._exports.update(found)
        return self._exports[path]

    def _so_far(self, path: str, found: dict[str, Exports]) -> Exports:
        return self._exports[path] if path in self._exports else found.setdefault(path, {})

    def _read_exports(self, path: str, exported_by: Callable[[str], Exports]) -> Exports:
        bindings = self._modules[path]
        exported: Exports = {}
        for star in bindings.stars:
            provider = self._find(path, star)
            if provider:
                exported.update(exported_by(provider))
            elif leads_to_old(star):
                exported["*"] = [*exported.get("*", []), star]
        for name, meanings in bindings.names.items():
            for module in filter(None, (self._find(path, meaning) for meaning in meanings)):
                # A statement such as `from . import compat as name` binds a module of the project.
                if module != path:
                    inner = exported_by(module).items()
                    exported.update((f"{name}.{each}", found) for each, found in inner if each.isidentifier())
            linked = [m for meaning in meanings for m in self._linked(path, meaning, exported_by)]
            if any(leads_to_old(m) for m in linked):
                exported[name] = sorted(set(linked))
        return exported

    def _linked(self, path: str, dotted: str, exported_by: Callable[[str], Exports]) -> list[str]:
        """Return the library names that a dotted name stands for, by following re-exports in the project."""
        relative = dotted[: len(dotted) - len(dotted.lstrip("."))]
        parts = dotted[len(relative) :].split(".")
        for split in range(len(parts) - 1, -1 if relative else 0, -1):
            provider = self._find(path, relative + ".".join(parts[:split]))
            if provider and provider != path:
                rest = "".join(f".{part}" for part in parts[split + 1 :])
                known = [m + rest for m in exported_by(provider).get(parts[split], []) if m != UNKNOWN]
                return known or [UNKNOWN]
        return [dotted]

    def _find(self, path: str, module: str) -> str | None:
        """Return the file of a module that the file at `path` imports; None if it is not in the project."""
        if not module.startswith("."):
            return self._find_absolute(path, module)
        rest = module.lstrip(".")
        stem = path
        for _ in range(len(module) - len(rest)):
            stem = os.path.dirname(stem)
        stem = os.path.join(stem, rest.replace(".", os.sep)) if rest else stem
        return next((c for c in (f"{stem}.py", os.path.join(stem, "__init__.py")) if c in self._modules), None)

    def _find_absolute(self, path: str, module: str) -> str | None:
        tail = module.replace(".", os.sep)
        if not tail or module.split(".", 1)[0] in names.LIBRARIES:
            return None
        matches = [
            candidate
            for candidate in self._by_tail.get(tail.rsplit(os.sep, 1)[-1], [])
            if _stem(candidate).endswith(os.sep + tail) and self._is_top_level(_stem(candidate)[: -len(tail) - 1], path)
        ]
        if not matches:
            return None
        distances = {
            candidate: (-len(os.path.commonpath([os.path.dirname(path), candidate])), candidate.count(os.sep))
            for candidate in matches
        }
        nearest, *others = sorted(matches, key=distances.__getitem__)
        return None if others and distances[others[0]] == distances[nearest] else nearest

    def _is_top_level(self, folder: str, path: str) -> bool:
        """Return whether the file at `path` can import the modules in a folder without a package name.

        It can if the folder is not a package, or is the file's own folder.
        """
        return os.path.join(folder, "__init__.py") not in self._modules or folder == os.path.dirname(path)


def _stem(path: str) -> str:
    stem = path[: -len(".py")]
    return os.path.dirname(stem) if os.path.basename(stem) == "__init__" else stem


def tail(path: str) -> str:
    """Return the last part of a file's module name.

    >>> tail("/p/compat.py"), tail("/p/package/__init__.py")
    ('compat', 'package')

    Args:
        path: the path of the file.
    """
    return os.path.basename(_stem(path))


def _has_old_name(exported: dict[str, list[str]]) -> bool:
    canonical = {names.canonical(meaning) for meanings in exported.values() for meaning in meanings}
    return not canonical.isdisjoint(table.OLD) or not canonical.isdisjoint(table.MODULES)


def leads_to_old(dotted: str) -> bool:
    """Return whether a dotted name is an old name, or a package that contains old names.

    >>> leads_to_old("tensorflow.keras"), leads_to_old("tensorflow.data")
    (True, False)

    Args:
        dotted: a qualified name.
    """
    name = names.canonical(dotted)
    return name in ("tensorflow.compat", "tensorflow.compat.v1") or names.is_beginning(name)
