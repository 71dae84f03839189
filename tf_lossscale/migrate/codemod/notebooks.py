"""Joins the code cells of a notebook into one module, and puts the rewritten cells back into the file.

In the module, a comment marks the start of each cell, and each line that is valid only in IPython, such as a magic, is
replaced with a placeholder name. The bytes of the file outside rewritten cells do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.migrate_file import Outcome, migrate
from tf_lossscale.migrate.codemod.report import NOTICE, Finding
from tf_lossscale.migrate.codemod.source import Source
from tf_lossscale.migrate.codemod.uses import Around

_BETWEEN = "# tf_lossscale: cell {}\n"
_CELLS = re.compile(r"^[ \t]*# tf_lossscale: cell \d+\n", re.MULTILINE)
_NAMES = re.compile(rf"(?<![ \t])[ \t]*{names.IPYTHON}(\d+)_")
# Matches lines that are valid only in IPython: `%magic`, `!shell`, `?help`, `help?`, `x = !shell`, `x = %magic`.
_IPYTHON = re.compile(r"\s*[%!?]|.*\?\s*$|[\w.,\s\[\]]+=\s*[%!]")
# Cell magics, such as `%%time`, that are followed by Python code.
_OF_PYTHON = re.compile(r"%%(time|timeit|capture|prun|debug|mypy)\b")
_OLD = {"mixed_precision", *(name.rsplit(".", 1)[1] for name in table.OLD if not name.endswith(".get"))}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RESERVED = f"`{_BETWEEN.format('N').strip()}` or `{names.IPYTHON}...`. Change it, and migrate again"
_LEFT = "lines of IPython syntax are not changed. Replace the old name in this line by hand."


class _Cell(NamedTuple):
    """A code cell: its source, and the JSON strings in the notebook file that make up this source."""

    source: str
    parts: list[re.Match[str]]
    is_list: bool


class Notebook:
    """A notebook whose code cells can be rewritten, or a ValueError if it is none or a cell with an old name is broken.

    >>> content = '{"cells": [{"cell_type": "code", "source": ["%time x\\\\n", "x = 1"]}], "nbformat": 4}'
    >>> notebook = Notebook(content.encode())
    >>> print(notebook.source, end="")
    # tf_lossscale: cell 0
    _tf_lossscale_line_0_
    x = 1
    >>> notebook.with_source(notebook.source) == content.encode()
    True
    """

    def __init__(self, content: bytes):
        try:
            self._text = content.decode()
            self._cells = list(_cells(self._text))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"the file is not a notebook: {error}") from error
        if any(_CELLS.search(f"{cell.source}\n") or names.IPYTHON in cell.source for cell in self._cells):
            raise ValueError(f"a code cell contains a comment or name that this command uses itself: {_RESERVED}")
        self._kept: list[str] = []
        self._modules = [
            f"{_BETWEEN.format(number)}{self._as_module(number, cell.source)}"
            for number, cell in enumerate(self._cells)
        ]
        #: The code cells, joined into the source of one module.
        self.source: str = "".join(self._modules)

    def _as_module(self, number: int, source: str) -> str:
        """Return a cell's source as Python code that ends with a line break."""
        code = source
        if not _parses(code):
            if code.lstrip().startswith("%%") and not _OF_PYTHON.match(code.lstrip()):
                code = self._keep(source.removesuffix("\n"))
            else:
                code = "".join(self._without_ipython(_lines(source)))
        if not _parses(code):
            if names.is_worth_parsing(source.encode()):
                raise ValueError(f"code cell {number + 1} parses neither as Python nor as IPython code")
            code = self._keep(source.removesuffix("\n"))
        return code if code.endswith("\n") or not code else code + "\n"

    def _without_ipython(self, lines: list[str]) -> Iterator[str]:
        indent, goes_on = "", False
        for line in lines:
            if goes_on or _IPYTHON.match(line):
                indent = indent if goes_on else line[: len(line) - len(line.lstrip())]
                text = line.rstrip("\r\n")
                goes_on = text.endswith("\\")
                yield f"{indent}{self._keep(text)}{line[len(text) :]}"
            else:
                yield line

    def _keep(self, text: str) -> str:
        self._kept.append(text)
        return f"{names.IPYTHON}{len(self._kept) - 1}_"

    def with_source(self, source: str) -> bytes:
        """Return the content of the file with the cells of a rewritten module. All else stays byte for byte."""
        before, *new = _CELLS.split(source)
        new[:1] = [before + first for first in new[:1]]
        result, copied_to = [], 0
        for cell, changed in zip(self._cells, new, strict=True):
            changed = _NAMES.sub(lambda match: self._kept[int(match[1])], changed)
            if not cell.source.endswith("\n"):
                changed = changed.removesuffix("\n")
            if changed != cell.source:
                result += [self._text[copied_to : cell.parts[0].start()], _encoded(changed, cell, self._text)]
                copied_to = cell.parts[-1].end()
        return "".join([*result, self._text[copied_to:]]).encode()

    @property
    def words(self) -> set[str]:
        """The words in lines that are valid only in IPython. The import of a name among them is kept."""
        return {word for text in self._kept for word in names.WORD.findall(text)}

    def left(self) -> Iterator[Finding]:
        """Yield a notice, with its line in the joined module, for each line of IPython that contains an old name."""
        for number, line in enumerate(_lines(self.source), 1):
            match = _NAMES.match(line)
            text = self._kept[int(match[1])] if match else ""
            if not _OLD.isdisjoint(names.WORD.findall(text)):
                yield Finding(number, len(line) - len(line.lstrip()), NOTICE, " ".join(text.split())[:200], None, _LEFT)

    def in_file(self, finding: Finding) -> Finding:
        """Convert the line number of a finding from the joined module to the notebook file."""
        return dataclasses.replace(finding, line=self._lines_in_file[finding.line - 1])

    @functools.cached_property
    def _lines_in_file(self) -> list[int]:
        """Map each line of the joined module, counted from 0, to its line in the file, counted from 1."""
        result, line, counted_to = [], 1, 0
        for cell, module in zip(self._cells, self._modules):
            of_cell, is_new_line = [], True
            for part in cell.parts:
                line += self._text.count("\n", counted_to, part.start())
                counted_to = part.start()
                for text in _lines(json.loads(part[0])):
                    of_cell += [line] * is_new_line
                    is_new_line = text.endswith(("\r", "\n"))
            # The module has a comment before the cell, and a cell magic as a single line.
            of_cell += [line] * len(_lines(module))
            result += [of_cell[0], *of_cell[: len(_lines(module)) - 1]]
        return result


def _lines(text: str) -> list[str]:
    """Split a text only at the line breaks that Python's parser knows. `str.splitlines` knows more of them."""
    return list(io.StringIO(text, newline=""))


def _parses(code: str) -> bool:
    try:
        Source(code.encode())
    except ValueError:
        return False
    return True


def _cells(text: str) -> Iterator[_Cell]:
    """Yield the code cells of a notebook in order."""
    # In a file that is not JSON, `_STRING` might search from each quotation mark to the end of the file.
    json.loads(text)
    strings = list(_STRING.finditer(text))
    # The JSON parser loses the positions of strings. Before parsing, each string is therefore replaced by its index.
    numbers = itertools.count()
    numbered = _STRING.sub(lambda _: f'"{next(numbers)}"', text)

    def decoded(number: str) -> str:
        return str(json.loads(strings[int(number)][0]))

    notebook = json.loads(numbered, object_pairs_hook=lambda pairs: {decoded(key): value for key, value in pairs})
    for cell in notebook["cells"]:
        source = cell.get("source")
        if source is not None and decoded(cell["cell_type"]) == "code":
            parts = [source] if isinstance(source, str) else source
            yield _Cell("".join(map(decoded, parts)), [strings[int(part)] for part in parts], source is parts)


def _encoded(source: str, cell: _Cell, text: str) -> str:
    """Return a cell's new source as JSON, in the layout of the old JSON, with the same bytes for unchanged lines."""
    first, last = cell.parts[0], cell.parts[-1]
    only_ascii = text[first.start() : last.end()].isascii()
    if not cell.is_list:
        return json.dumps(source, ensure_ascii=only_ascii)
    kept = {json.loads(part[0]): part[0] for part in cell.parts}
    before = text[text.rindex("[", 0, first.start()) + 1 : first.start()]
    between = text[first.end() : cell.parts[1].start()] if len(cell.parts) > 1 else f",{before}"
    # Jupyter splits a source like `str.splitlines`, but other programs may not.
    lines = (part for line in _lines(source) for part in ([line] if line in kept else line.splitlines(keepends=True)))
    return between.join(kept.get(line) or json.dumps(line, ensure_ascii=only_ascii) for line in lines)


def rewritten(content: bytes, around: Around) -> Outcome:
    """Rewrite the code cells of a notebook, and return the new bytes, and the findings with their lines in the file."""
    notebook = Notebook(content)
    outcome = migrate(notebook.source.encode(), around._replace(requested=around.requested | notebook.words))
    findings = (*outcome.findings, *notebook.left())
    return Outcome(notebook.with_source(outcome.source.decode()), tuple(map(notebook.in_file, findings)))
