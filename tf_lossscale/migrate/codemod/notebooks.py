"""Notebooks: the code cells as one module, and the rewritten cells back in their places, byte for byte as they were.

The cells are joined with a comment between them, and each line of IPython's own syntax stands as a name.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.report import NOTICE, Finding

_BETWEEN = "# tf_lossscale: cell {}\n"
_CELLS = re.compile(r"^[ \t]*# tf_lossscale: cell \d+\n", re.MULTILINE)
_NAMES = re.compile(rf"[ \t]*{names.IPYTHON}(\d+)_")
# `%magic`, `!shell`, `?help`, `help?`, `x = !shell`, `x = %magic`.
_IPYTHON = re.compile(r"\s*[%!?]|.*\?\s*$|\s*[\w.,\s\[\]]+=\s*[%!]")
# Cell magics of which the other lines are Python.
_OF_PYTHON = re.compile(r"%%(time|timeit|capture|prun|debug|mypy)\b")
_WORD = re.compile(r"[^\W\d]\w*")
_OLD = {"mixed_precision", *(name.rsplit(".", 1)[1] for name in table.OLD if not name.endswith(".get"))}
_LEFT = "lines of IPython's own syntax are not changed. An old name in it has to be replaced by hand."
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class _Cell(NamedTuple):
    """The source of a code cell, and where it stands in the file."""

    source: str
    start: int  # of its JSON value
    end: int
    lines: list[int]  # the number in the file of each of its lines


class Notebook:
    """A notebook whose code cells can be rewritten.

    >>> content = '{"cells": [{"cell_type": "code", "source": ["%time x\\\\n", "x = 1"]}], "nbformat": 4}'
    >>> notebook = Notebook(content.encode())
    >>> print(notebook.source, end="")
    # tf_lossscale: cell 0
    _tf_lossscale_line_0_
    x = 1
    >>> notebook.with_source(notebook.source) == content.encode()
    True

    Args:
        content: the file's bytes.

    Raises:
        ValueError: it is no notebook of nbformat 4 or 3, or a cell with an old name does not parse.
    """

    def __init__(self, content: bytes):
        try:
            self._text = content.decode()
            self._cells = list(_cells(self._text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"is not a notebook: {error}") from error
        self._kept: list[str] = []
        self._starts: list[int] = []  # the line of the module at which each cell starts
        parts: list[str] = []
        line = 1
        for number, cell in enumerate(self._cells):
            parts += [_BETWEEN.format(number), self._as_module(number, cell.source)]
            self._starts.append(line + 1)
            line += 1 + parts[-1].count("\n")
        #: The cells as one module.
        self.source = "".join(parts)

    def _as_module(self, number: int, source: str) -> str:
        """A cell's source as Python, with a line end."""
        lines = source.splitlines(keepends=True)
        if not _parses(source):
            if source.lstrip().startswith("%%") and not _OF_PYTHON.match(source.lstrip()):
                lines = [self._keep(source.removesuffix("\n"))]
            else:
                lines = list(self._without_ipython(lines))
                if not _parses("".join(lines)):
                    if names.is_worth_parsing(source.encode()):
                        raise ValueError(f"does not parse: code cell {number + 1} is neither Python nor IPython")
                    lines = [self._keep(source.removesuffix("\n"))]
        joined = "".join(lines)
        return joined if joined.endswith("\n") or not joined else joined + "\n"

    def _without_ipython(self, lines: list[str]) -> Iterator[str]:
        indent, goes_on = "", False
        for line in lines:
            if goes_on or _IPYTHON.match(line):
                indent = indent if goes_on else line[: len(line) - len(line.lstrip())]
                goes_on = line.rstrip("\n").endswith("\\")
                yield f"{indent}{self._keep(line.removesuffix(chr(10)))}\n"
            else:
                yield line

    def _keep(self, text: str) -> str:
        self._kept.append(text)
        return f"{names.IPYTHON}{len(self._kept) - 1}_"

    def with_source(self, source: str) -> bytes:
        """Return the file with other cells.

        Args:
            source: `source` of this notebook, rewritten.

        Returns:
            The bytes; those of cells that are the same, and all between the cells, are as they were.

        Raises:
            ValueError: the cells cannot be separated any more.
        """
        before, *new = _CELLS.split(source)
        if len(new) != len(self._cells):
            raise ValueError("would lose a cell, which is our fault")
        if before and new:
            new[0] = before + new[0]
        result, done = [], 0
        for cell, changed in zip(self._cells, new):
            changed = _NAMES.sub(lambda match: self._kept[int(match[1])], changed)
            if not cell.source.endswith("\n"):
                changed = changed.removesuffix("\n")
            if changed != cell.source:
                result += [self._text[done : cell.start], _encoded(changed, self._text[cell.start : cell.end])]
                done = cell.end
        return "".join([*result, self._text[done:]]).encode()

    @property
    def words(self) -> set[str]:
        """The words in lines of IPython's own syntax, which may be names that are used nowhere else."""
        return {word for text in self._kept for word in _WORD.findall(text)}

    def left(self) -> Iterator[Finding]:
        """Return a notice for each line of IPython's own syntax with an old name, in the module's lines."""
        for number, line in enumerate(self.source.splitlines(), 1):
            match = _NAMES.match(line)
            text = self._kept[int(match[1])] if match else ""
            if not _OLD.isdisjoint(_WORD.findall(text)):
                yield Finding(number, len(line) - len(line.lstrip()), NOTICE, " ".join(text.split())[:200], None, _LEFT)

    def in_file(self, finding: Finding) -> Finding:
        """Return a finding with its line in the file.

        Args:
            finding: one of the module.
        """
        cell = bisect.bisect(self._starts, finding.line) - 1
        lines = self._cells[cell].lines
        return dataclasses.replace(finding, line=lines[min(finding.line - self._starts[cell], len(lines) - 1)])


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# JSON with places. ------------------------------------------------------------------------------------------------


def _cells(text: str) -> Iterator[_Cell]:
    """The code cells of a notebook, in order; of nbformat 3 those of its worksheets."""
    newlines = [match.start() for match in re.finditer("\n", text)]
    start = _skip(text, 0)
    if text[start : start + 1] != "{":
        raise ValueError("it does not start with {")
    for key, at in _members(text, start):
        if key == "cells":
            yield from _code_cells(text, at, newlines)
        elif key == "worksheets":
            for sheet in _elements(text, at):
                for inner, place in _members(text, sheet):
                    if inner == "cells":
                        yield from _code_cells(text, place, newlines)


def _code_cells(text: str, at: int, newlines: list[int]) -> Iterator[_Cell]:
    for place in _elements(text, at):
        members = dict(_members(text, place))
        start = members.get("source", members.get("input"))
        if start is None or "cell_type" not in members or _value(text, members["cell_type"])[0] != "code":
            continue
        source, end = _value(text, start)
        starts = list(_elements(text, start)) if isinstance(source, list) else [start]
        joined = source if isinstance(source, str) else "".join(cast("list[str]", source))
        lines = [1 + bisect.bisect(newlines, each) for each in starts] or [1]
        if len(lines) != max(1, len(joined.splitlines())):  # not one element for each line
            lines = lines[:1] * max(1, len(joined.splitlines()))
        yield _Cell(joined, start, end, lines)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int) -> tuple[object, int]:
    return _DECODER.raw_decode(text, at)


def _members(text: str, at: int) -> Iterator[tuple[str, int]]:
    """The keys of a JSON object, with the places of their values."""
    if text[at] != "{":
        return
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, end = _value(text, at)
        at = _skip(text, _skip(text, end) + 1)
        yield str(key), at
        at = _skip(text, _value(text, at)[1])
        at = _skip(text, at + 1) if text[at] == "," else at


def _elements(text: str, at: int) -> Iterator[int]:
    """The places of the elements of a JSON array."""
    if text[at] != "[":
        return
    at = _skip(text, at + 1)
    while text[at] != "]":
        yield at
        at = _skip(text, _value(text, at)[1])
        at = _skip(text, at + 1) if text[at] == "," else at


def _encoded(source: str, old: str) -> str:
    """The JSON of a cell's new source, in the layout of the old one; lines that stay keep their bytes."""
    only_ascii = old.isascii()
    if old[0] != "[":
        return json.dumps(source, ensure_ascii=only_ascii)
    spans = [(at, _value(old, at)) for at in _elements(old, 0)]
    kept = {value: old[at:end] for at, (value, end) in spans}
    first = spans[0][0] if spans else 1
    between = old[spans[0][1][1] : spans[1][0]] if len(spans) > 1 else "," + old[1:first]
    last = spans[-1][1][1] if spans else 1
    lines = [kept.get(line) or json.dumps(line, ensure_ascii=only_ascii) for line in source.splitlines(keepends=True)]
    return old[:first] + between.join(lines) + old[last:]


def rewritten(
    content: bytes, migrate: Callable[[bytes, set[str]], tuple[bytes, tuple[Finding, ...]]]
) -> tuple[bytes, tuple[Finding, ...]]:
    """Rewrite the code cells of a notebook.

    Args:
        content: the file's bytes.
        migrate: rewrites a module, and keeps imports of the names that it gets.

    Returns:
        The new bytes and the findings, with their lines in the file.

    Raises:
        ValueError: see `Notebook`, and what `migrate` raises.
    """
    notebook = Notebook(content)
    new, findings = migrate(notebook.source.encode(), notebook.words)
    findings = (*findings, *notebook.left())
    return notebook.with_source(new.decode()), tuple(notebook.in_file(finding) for finding in findings)
