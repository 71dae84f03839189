"""The files of a project. A text search decides which of them have to be parsed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.project import Around, Bindings, read, tail

_WORD = re.compile(rb"\w+")
_IMPORT = re.compile(rb"\b(?:from|import)\b(?:\\\r?\n|[^\n(;])*(?:\([^)]*\))?")
_RELATIVE = re.compile(rb"from[ \t]+\.")
_COMPILE = re.compile(rb"(?<!\bre)(?<!regex)\.compile\(")
_CALLED = re.compile(rb"\.loss_scale\(\)")
_WRAPS = re.compile(rb"LossScaleOptimizer|enable_mixed_precision_graph_rewrite")
# Stands for a relative import in the set of words that a file's imports contain.
_DOT = b"."


class Sources(Mapping[str, Bindings]):
    """A mapping from paths to bindings. A file is parsed when its bindings are first accessed.

    >>> sources = Sources(["/p/compat.py", "/p/train.py"], {
    ...     "/p/compat.py": b"from tensorflow.keras import mixed_precision as mp",
    ...     "/p/train.py": b"from compat import mp",
    ... }.__getitem__)
    >>> sources.with_old_names, list(sources.importers("/p/compat.py"))
    (['/p/compat.py'], ['/p/train.py'])

    Args:
        paths: the absolute paths of the files.
        load: a function that returns the source of a file.
    """

    def __init__(self, paths: Iterable[str], load: Callable[[str], bytes]):
        self._load = load
        self._bindings: dict[str, Bindings] = {}
        self._words: dict[str, set[bytes]] = {}
        #: The files that have to be migrated, because they may use the old API.
        self.with_old_names: list[str] = []
        self._wrapping: set[str] = set()
        self._compiling: set[str] = set()
        calling: list[str] = []
        for path in paths:
            source = load(path)
            # The pattern also matches imports in comments and strings.
            imports = b" ".join(_IMPORT.findall(source))
            self._words[path] = {*_WORD.findall(imports), *([_DOT] if _RELATIVE.search(imports) else [])}
            if names.is_worth_parsing(source):
                self.with_old_names.append(path)
            elif _CALLED.search(source):
                calling.append(path)
            if _WRAPS.search(source):
                self._wrapping.add(path)
            if _COMPILE.search(source):
                self._compiling.add(path)
        self._is_alone = len(self._words) == 1
        # A call of `loss_scale()` is an old use only if some file may wrap the optimizer. A single file may belong to a
        # project whose other files do so.
        if self._wrapping or self._is_alone:
            self.with_old_names += calling

    def __getitem__(self, path: str) -> Bindings:
        if path not in self._bindings:
            self._bindings[path] = read(self._load(path))
        return self._bindings[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, path: object) -> bool:
        return path in self._words

    def around(self, path: str) -> Around:
        """Return facts about all files of the project except one.

        Args:
            path: the file that is left out.
        """
        return Around() if self._is_alone else Around(bool(self._wrapping - {path}), bool(self._compiling - {path}))

    def importers(self, path: str) -> Iterator[str]:
        """Yield the files whose import statements may import a file, according to the words in them.

        Args:
            path: the imported file.
        """
        word = tail(path).encode()
        package = os.path.dirname(path) + os.sep if os.path.basename(path) == "__init__.py" else None
        for other, words in self._words.items():
            if word in words or (package and _DOT in words and other.startswith(package)):
                yield other
