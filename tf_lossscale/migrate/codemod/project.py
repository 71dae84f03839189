"""The files of a project, and the old names that each of them re-exports, possibly under other names.

A text search decides which files have to be read. Files that import a re-exported old name have to be migrated as well.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.bindings import UNKNOWN, Bindings, join

_WORD = re.compile(rb"\w+")
_IMPORT = re.compile(rb"\b(?:from|import)\b(?:\\\r?\n|[^\n(;])*(?:\([^)]*\))?")
_RELATIVE = re.compile(rb"from[ \t]+\.")
_COMPILE = re.compile(rb"(?<!\bre)(?<!regex)\.compile\(")
_CALLED = re.compile(rb"\.loss_scale\(\)")
_WRAPS = re.compile(rb"LossScaleOptimizer|enable_mixed_precision_graph_rewrite")
# Stands for a relative import in the set of words that occur in a file's import statements.
_DOT = b"."
# The maximum number of times that a file in an import cycle is read. A few times usually suffice. The limit is needed
# because a statement like `mp = other.mp.experimental` in a cycle adds a longer name every time.
_ROUNDS = 20

#: Maps a name that a file exports to the dotted names that it may refer to. The key "*" maps to the library modules
#: from which the file imports `*`.
Exports = dict[str, list[str]]


class Around(NamedTuple):
    """The facts about the other files of a project that the migration of one file depends on.

    If there are no other files, `wraps` and `compiles` are None.
    """

    #: The old names that the file can import from other files. The keys are module names, spelled as in the file's
    #: imports.
    known: Mapping[str, Exports] = {}
    #: The names that other files import from this file, including "*" if they may use any of its names.
    requested: frozenset[str] = frozenset()
    #: Whether another file wraps an optimizer.
    wraps: bool | None = None
    #: Whether another file calls `compile`.
    compiles: bool | None = None

    def expanded(self, dotted: str) -> set[str]:
        """Return the original names behind a dotted name.

        If no module of the project re-exports the name, return it unchanged.

        >>> Around({"compat": {"mp": ["keras.mixed_precision"]}}).expanded("compat.mp.Policy")
        {'keras.mixed_precision.Policy'}

        Args:
            dotted: a qualified name, as the file uses it.
        """
        parts = dotted.split(".")
        for split in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:split]) or "."
            exported = self.known.get(module if module.strip(".") else "." * _level(dotted), {})
            # If a package imports a module, the names in the module are exported under keys like "module.name".
            for length in (1, 2):
                if (name := ".".join(parts[split : split + length])) in exported:
                    rest = "".join(f".{part}" for part in parts[split + length :])
                    return {d if d == UNKNOWN else d + rest for d in exported[name]}
            starred = {join(star, ".".join(parts[split:])) for star in exported.get("*", ())}
            if starred := {name for name in starred if leads_to_old(name)}:
                return starred
        return {dotted}


class Project:
    """The files of a project.

    >>> project = Project(["/p/compat.py", "/p/train.py"], {
    ...     "/p/compat.py": b"from tensorflow.keras.mixed_precision import LossScaleOptimizer as LSO",
    ...     "/p/train.py": b"from compat import LSO",
    ... }.__getitem__)
    >>> project.around("/p/train.py").known
    {'compat': {'LSO': ['tensorflow.keras.mixed_precision.LossScaleOptimizer']}}
    >>> sorted(project.worth_migrating)
    ['/p/compat.py', '/p/train.py']

    Args:
        paths: the absolute paths of the files.
        load: a function that returns the source of a file.
    """

    def __init__(self, paths: Iterable[str], load: Callable[[str], bytes]):
        self._load = load
        self._bindings: dict[str, Bindings] = {}
        self._words: dict[str, set[bytes]] = {}
        self._by_tail: dict[str, list[str]] = collections.defaultdict(list)
        self._wrapping: set[str] = set()
        self._compiling: set[str] = set()
        with_old_names, calling = self._search(paths)
        # A call `optimizer.loss_scale()` is evidence of the old API only if some file wraps an optimizer. If only one
        # file is given, the call always counts, because a file that was not given may wrap the optimizer.
        if self._wrapping or len(self._words) == 1:
            with_old_names += calling
        self._exports: dict[str, Exports] = {}
        self._read_exports_from(with_old_names)
        #: The files that may use the old API themselves, or import it from other files.
        self.worth_migrating = {*with_old_names, *filter(self._takes_old_name, self._bindings)}

    def _search(self, paths: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return two lists: the files that may contain an old name, and the other files that call `loss_scale()`."""
        with_old_names, calling = [], []
        for path in paths:
            source = self._load(path)
            # The pattern also matches imports in comments and strings.
            imports = b" ".join(_IMPORT.findall(source))
            self._words[path] = {*_WORD.findall(imports), *([_DOT] if _RELATIVE.search(imports) else [])}
            self._by_tail[_tail(path)].append(path)
            if names.is_worth_parsing(source):
                with_old_names.append(path)
            elif _CALLED.search(source):
                calling.append(path)
            if _WRAPS.search(source):
                self._wrapping.add(path)
            if _COMPILE.search(source):
                self._compiling.add(path)
        return with_old_names, calling

    def _read_exports_from(self, paths: Iterable[str]) -> None:
        """Read the exports of the given files and of all files that are connected to them by imports.

        A file is connected if it is imported by a file that has been read, or if it imports old names from one.
        Imports may be circular, so a file is read again whenever the exports of a file that it imports change.
        """
        waiting = dict.fromkeys(paths)
        times_read: collections.Counter[str] = collections.Counter()
        while waiting:
            path, _ = waiting.popitem()
            times_read[path] += 1
            exported = self._exported(path)
            if exported != self._exports.get(path, {}) and times_read[path] < _ROUNDS:
                self._exports[path] = exported
                has_old_name = _has_old_name(exported)
                importers = self._importers(path)
                waiting |= dict.fromkeys(other for other in importers if has_old_name or times_read[other])
            waiting |= dict.fromkeys(provider for _, provider, _ in self._imported(path) if not times_read[provider])

    def _exported(self, path: str) -> Exports:
        """Return the old names that a file re-exports. Names that it imports from files not yet read are missing."""
        bindings = self._bindings_of(path)
        around = Around(self._known(path))
        exported: Exports = {}
        for star in bindings.stars:
            if provider := self._find(path, star):
                exported.update(self._exports.get(provider, {}))
            elif leads_to_old(star):
                exported["*"] = [*exported.get("*", []), star]
        for name, meanings in bindings.names.items():
            for module in filter(None, (self._find(path, meaning) for meaning in meanings)):
                # A statement such as `from . import compat as name` binds a module of the project.
                inner = self._exports.get(module, {}).items() if module != path else ()
                exported.update((f"{name}.{each}", inside) for each, inside in inner if each.isidentifier())
            linked = [{d for d in around.expanded(meaning) if leads_to_old(d)} or {UNKNOWN} for meaning in meanings]
            if any(each != {UNKNOWN} for each in linked):
                exported[name] = sorted(set().union(*linked))
        return exported

    def _bindings_of(self, path: str) -> Bindings:
        if path not in self._bindings:
            self._bindings[path] = Bindings(self._load(path))
        return self._bindings[path]

    def _imported(self, path: str) -> Iterator[tuple[str, str, list[str]]]:
        """For each import from a file of the project, yield the module as written, its file, and the imported names."""
        for module, wanted in self._bindings_of(path).imports:
            for candidate, inside in [(module, wanted), *((join(module, name), []) for name in wanted)]:
                provider = self._find(path, candidate)
                if provider and provider != path:
                    yield candidate, provider, inside

    def _known(self, path: str) -> dict[str, Exports]:
        exports = {module: self._exports.get(provider, {}) for module, provider, _ in self._imported(path)}
        return {module: exported for module, exported in exports.items() if exported}

    def _takes_old_name(self, path: str) -> bool:
        return any(_has_old_name(exported) for exported in self._known(path).values())

    def around(self, path: str) -> Around:
        """Return what the migration of one file needs to know about the other files.

        Args:
            path: the file to migrate.
        """
        requested: set[str] = set()
        for other in self._importers(path):
            for _, provider, wanted in self._imported(other):
                if provider == path:
                    # A file that imports the module itself, rather than names from it, may use any of its attributes.
                    requested.update(wanted or {"*"})
        around = Around(self._known(path), frozenset(requested))
        if len(self._words) == 1:
            return around
        return around._replace(wraps=bool(self._wrapping - {path}), compiles=bool(self._compiling - {path}))

    def _importers(self, path: str) -> Iterator[str]:
        """Yield the files whose import statements may import the file at `path`."""
        word = _tail(path).encode()
        package = os.path.dirname(path) + os.sep if os.path.basename(path) == "__init__.py" else None
        for other, words in self._words.items():
            if word in words or (package and _DOT in words and other.startswith(package)):
                yield other

    def _find(self, path: str, module: str) -> str | None:
        """Return the file of a module that the file at `path` imports, or None if the module is not in the project."""
        if not module.startswith("."):
            return self._find_absolute(path, module)
        rest = module.lstrip(".")
        stem = path
        for _ in range(_level(module)):
            stem = os.path.dirname(stem)
        stem = os.path.join(stem, rest.replace(".", os.sep)) if rest else stem
        return next((c for c in (f"{stem}.py", os.path.join(stem, "__init__.py")) if c in self._words), None)

    def _find_absolute(self, path: str, module: str) -> str | None:
        ending = module.replace(".", os.sep)
        if not ending or module.split(".", 1)[0] in names.LIBRARIES:
            return None
        candidates = self._by_tail.get(ending.rsplit(os.sep, 1)[-1], ())
        folders = {c: _stem(c)[: -len(ending) - 1] for c in candidates if _stem(c).endswith(os.sep + ending)}
        matches = [candidate for candidate, folder in folders.items() if self._is_top_level(folder, path)]
        folder = os.path.dirname(path)
        nearest = sorted((-len(os.path.commonpath([folder, each])), each.count(os.sep), each) for each in matches)
        is_clear = len(nearest) == 1 or (nearest and nearest[0][:2] != nearest[1][:2])
        return nearest[0][-1] if is_clear else None

    def _is_top_level(self, folder: str, path: str) -> bool:
        """Return whether the file at `path` can import a module in `folder` by the module's name alone.

        This is possible if the folder is not a package, or if it is the folder of the file.
        """
        return os.path.join(folder, "__init__.py") not in self._words or folder == os.path.dirname(path)


def _stem(path: str) -> str:
    stem = path[: -len(".py")]
    return os.path.dirname(stem) if os.path.basename(stem) == "__init__" else stem


def _tail(path: str) -> str:
    """Return the last part of a file's module name."""
    return os.path.basename(_stem(path))


def _level(module: str) -> int:
    return len(module) - len(module.lstrip("."))


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
