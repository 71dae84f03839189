"""The edits to one file: spans of its text that are replaced, comments above statements, and the findings about them.

All edits are planned before the first is applied, because an import can be removed only if no use of it remains.
"""

from __future__ import annotations

import ast
import collections
import re
import textwrap
from typing import Any, NamedTuple

from tf_lossscale.migrate.codemod import report
from tf_lossscale.migrate.codemod.source import Source, Span

MARK = "# TODO(tf-lossscale):"
# The user writes this mark above a statement that needs no change. The statement gets no TODO comment again.
_DONE = MARK.replace("TODO", "DONE")

_WRAP: dict[str, Any] = {"subsequent_indent": "#   ", "break_long_words": False, "break_on_hyphens": False}
_COMMENTS_ABOVE = re.compile(r"(?:^[ \t]*#.*\n)*\Z", re.MULTILINE)


class Edit(NamedTuple):
    """A span of the old text, and the text that replaces it."""

    start: int
    end: int
    text: str


class Edits:
    """The edits that are planned for one file."""

    def __init__(self, source: Source):
        self.source = source
        self._edits: list[Edit] = []
        self._findings: dict[tuple[Span, str, str], None] = {}
        #: Maps the numbers of lines to the comments to put above them.
        self._comments: dict[int, list[str]] = collections.defaultdict(list)
        #: The statements to remove.
        self.removed: list[ast.stmt] = []

    def replace(self, span: Span, text: str = "") -> None:
        """Plan to replace a span. Comments in it move above the statement."""
        self._edits.append(Edit(*span, text))
        line = self.source.first_line(span[0])
        self._comments[line] += [comment.string for comment in self.source.comments_in(span)]

    def rewrite(self, node: ast.AST, text: str) -> None:
        """Plan to replace a node."""
        self.replace(self.source.span(node), text)

    def todo(self, node: ast.AST, reason: str) -> None:
        """Leave a node unchanged, and put a TODO comment with the reason above its statement."""
        source = self.source
        line = source.first_line(source.span(source.statement(node))[0])
        present = _COMMENTS_ABOVE.findall(source.text[: source.start_of_line(line)].replace("\r", ""))
        if _DONE in present[0]:
            return
        self._findings[source.span(node), report.TODO, reason] = None
        width = min(100, max(79, source.longest_line)) - len(self._indent(line))
        wrapped = textwrap.wrap(f"{MARK} {reason}", width, **_WRAP)
        if wrapped[0] not in self._comments[line] and _joined(" ".join(wrapped)) not in _joined(present[0]):
            self._comments[line] += wrapped

    def notice(self, node: ast.AST, reason: str) -> None:
        """Leave a node unchanged, and add a notice to the report, but no comment to the file, once for each reason."""
        if not any(reason == each for _, _, each in self._findings):
            self._findings[self.source.span(node), report.NOTICE, reason] = None

    def finish(self) -> tuple[str, list[report.Finding]]:
        """Apply the edits, and return the new text of the file and the findings, in the order of the file."""
        for statement in self.removed:
            self._remove(statement)
        findings = sorted(self._found(*key) for key in self._findings)
        if self._edits:
            self._keep_alignment()
        for line, comments in self._comments.items():
            start = self.source.start_of_line(line)
            text = "".join(f"{self._indent(line)}{comment}{self.source.newline}" for comment in comments)
            self._edits.append(Edit(start, start, text))
        return self._rendered((0, len(self.source.text))), findings

    def _found(self, span: Span, kind: str, reason: str) -> report.Finding:
        line = self.source.line_of(span[0])
        shown = " ".join(self.source.text[slice(*span)].split())[:200]
        return report.Finding(line, span[0] - self.source.start_of_line(line), kind, shown, reason)

    def _rendered(self, span: Span) -> str:
        """Return the new text of a span of the old text."""
        at, end = span
        text: list[str] = []
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end > edit.start, -edit.end)):
            if at <= edit.start and edit.end <= end:
                text += self.source.text[at : edit.start], edit.text
                at = edit.end
        return "".join([*text, self.source.text[at:end]])

    def _indent(self, line: int) -> str:
        text = self.source.line(line)
        return text[: len(text) - len(text.lstrip())]

    def _remove(self, statement: ast.stmt) -> None:
        """Remove the line of a statement, or write `pass` if it shares the line or would leave its block empty."""
        source, span = self.source, self.source.span(statement)
        fields = (value for _, value in ast.iter_fields(source.parents[statement]) if isinstance(value, list))
        siblings = next(field for field in fields if statement in field)
        line = source.start_of_line(statement.lineno), source.start_of_line((statement.end_lineno or 0) + 1)
        others = source.text[line[0] : span[0]] + source.text[span[1] : line[1]].split("#")[0]
        is_empty = set(siblings) <= set(self.removed) and statement is siblings[0]
        self.replace(span, "pass") if is_empty or others.strip() else self.replace(line)

    def _keep_alignment(self) -> None:
        """Move arguments that are aligned with the first argument as far as the edits move the first argument."""
        source = self.source
        for call in source.nodes(ast.Call):
            first, *others = sorted(source.span(each)[0] for each in (*call.args, *call.keywords)) or [0]
            column = first - source.start_of_line(source.line_of(first))
            for start in others:
                if source.text[start - column - 1] in "\r\n" and not source.text[start - column : start].strip():
                    moved = len(self._rendered((first - column, first))) - column
                    self._edits.append(Edit(start - column, start - column - min(0, moved), " " * moved))


def _joined(comments: str) -> str:
    """Return comments as one line, however they are wrapped."""
    return " ".join(comments.replace("#", " ").split())
