"""Joins the code cells of a notebook into one module, and puts the rewritten cells back into the file.

In the module, a comment marks the start of each cell, and each line that is valid only in IPython, such as a magic, is
replaced with a placeholder name. The file is written as Jupyter writes it.
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import re
from collections.abc import Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.migrate_file import Outcome, migrate
from tf_lossscale.migrate.codemod.report import NOTICE, Finding
from tf_lossscale.migrate.codemod.source import Source
from tf_lossscale.migrate.codemod.uses import Project

_BETWEEN = "# tf_lossscale: cell {}\n"
_CELLS = re.compile(r"^[ \t]*# tf_lossscale: cell \d+\n", re.MULTILINE)
_NAMES = re.compile(rf"(?<![ \t])[ \t]*{names.IPYTHON}(\d+)_")
# Matches lines that are valid only in IPython: `%magic`, `!shell`, `?help`, `help?`, `x = !shell`, `x = %magic`.
_IPYTHON = re.compile(r"\s*[%!?]|.*\?\s*$|[\w.,\s\[\]]+=\s*[%!]")
# Cell magics, such as `%%time`, that are followed by Python code.
_OF_PYTHON = re.compile(r"%%(time|timeit|capture|prun|debug|mypy)\b")
# The beginning of a notebook file shows its indentation, and whether a space follows a colon.
_LAYOUT = re.compile(r'\s*\{(?:\s*\n( *))?\s*"\w+"\s*:( ?)')
_OLD = {name.rsplit(".", 1)[1] for name in table.OLD if not name.endswith(".get")}
_LEFT = "only Python code is changed. Replace the old name in this line or cell by hand."


class Notebook:
    """A notebook whose code cells can be rewritten. If the file is no notebook, a ValueError says so.

    >>> content = b'{"cells": [{"cell_type": "code", "source": ["%time x\\\\n", "x = 1"]}], "nbformat": 4}'
    >>> print(Notebook(content).source, end="")
    # tf_lossscale: cell 1
    _tf_lossscale_line_0_
    x = 1
    """

    def __init__(self, content: bytes):
        try:
            self._text = content.decode()
            self._notebook = json.loads(self._text)
            self._cells = {
                number: cell
                for number, cell in enumerate(self._notebook["cells"], 1)
                if cell["cell_type"] == "code" and "source" in cell
            }
            self._sources = ["".join(cell["source"]) for cell in self._cells.values()]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"the file is not a notebook: {error}") from error
        if any(_CELLS.search(f"{source}\n") or names.IPYTHON in source for source in self._sources):
            raise ValueError("a code cell contains a comment or name that this command uses itself")
        # The lines and cells that are not Python code. The module has placeholders for them.
        self._kept: list[str] = []
        modules = [
            f"{_BETWEEN.format(number)}{self._as_module(source)}" for number, source in zip(self._cells, self._sources)
        ]
        #: The code cells, joined into the source of one module.
        self.source: str = "".join(modules)
        # The number of lines in the module before each cell.
        self._starts = [0, *itertools.accumulate(len(_lines(module)) for module in modules)]

    def _as_module(self, source: str) -> str:
        """Return a cell's source as Python code that ends with a line break."""
        code = source
        is_python = not source.lstrip().startswith("%%") or _OF_PYTHON.match(source.lstrip())
        if is_python and not _parses(code):
            code = "".join(self._without_ipython(_lines(source)))
        if not is_python or not _parses(code):
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
        """Return the content of the file with the cells of a rewritten module."""
        if source == self.source:
            return self._text.encode()
        before, *new = _CELLS.split(source)
        new[0] = before + new[0]
        for cell, old, changed in zip(self._cells.values(), self._sources, new, strict=True):
            changed = _NAMES.sub(lambda match: self._kept[int(match[1])], changed)
            changed = changed if old.endswith("\n") else changed.removesuffix("\n")
            if changed != old:
                cell["source"] = changed if isinstance(cell["source"], str) else changed.splitlines(keepends=True)
        indent, space = layout.groups() if (layout := _LAYOUT.match(self._text)) else (" ", " ")
        separators = (f",{space}" if indent is None else ",", f":{space}")
        written = json.dumps(self._notebook, ensure_ascii=False, indent=indent, separators=separators)
        return (written + self._text[len(self._text.rstrip()) :]).encode()

    @property
    def words(self) -> set[str]:
        """The words in lines that are valid only in IPython. The import of a name among them is kept."""
        return {word for text in self._kept for word in names.WORD.findall(text)}

    def left(self) -> Iterator[Finding]:
        """Yield a notice, with its line in the joined module, for each kept text that contains an old name."""
        for number, line in enumerate(_lines(self.source), 1):
            match = _NAMES.match(line)
            text = self._kept[int(match[1])] if match else ""
            if not _OLD.isdisjoint(names.WORD.findall(text)):
                yield Finding(number, len(line) - len(line.lstrip()), NOTICE, " ".join(text.split())[:200], _LEFT)

    def in_cell(self, finding: Finding) -> Finding:
        """Convert the line number of a finding from the joined module to its cell."""
        index = bisect.bisect_left(self._starts, finding.line) - 1
        # The module has a comment before each cell.
        line = max(1, finding.line - self._starts[index] - 1)
        return finding._replace(line=line, cell=[*self._cells][index])


def _lines(text: str) -> list[str]:
    """Split a text only at the line breaks that Python's parser knows. `str.splitlines` knows more of them."""
    return list(io.StringIO(text, newline=""))


def _parses(code: str) -> bool:
    try:
        Source(code.encode())
    except ValueError:
        return False
    return True


def migrate_notebook(content: bytes, project: Project) -> Outcome:
    """Rewrite the code cells of a notebook, and return the new content, and the findings with their cells."""
    notebook = Notebook(content)
    project = project._replace(requested=project.requested | notebook.words)
    outcome = migrate(notebook.source.encode(), project)
    findings = (*outcome.findings, *notebook.left())
    return Outcome(notebook.with_source(outcome.source.decode()), tuple(map(notebook.in_cell, findings)))
