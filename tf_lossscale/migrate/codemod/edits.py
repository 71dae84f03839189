"""The edits to one file: spans of its text that are replaced, comments above statements, and the findings about them.

All edits are planned before the first is applied, because an import can be removed only if no use of it remains.
"""

from __future__ import annotations

import ast
import collections
import functools
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

from tf_lossscale.migrate.codemod import report
from tf_lossscale.migrate.codemod.source import Source, Span

MARK = "# TODO(tf-lossscale):"

_WRAP: dict[str, Any] = {"subsequent_indent": "#   ", "break_long_words": False, "break_on_hyphens": False}

#: A piece of new text: either the text, or a span of the old text, in which other edits are applied.
Part = str | Span


class Edit(NamedTuple):
    """A span of the old text, and the text that replaces it."""

    start: int
    end: int
    parts: tuple[Part, ...]


class Edits:
    """The edits that are planned for one file.

    Args:
        source: the file.
    """

    def __init__(self, source: Source):
        self.source = source
        self._edits: list[Edit] = []
        self._findings: dict[tuple[Span, str, str | None], str | None] = {}
        self._todos: dict[int, list[str]] = {}
        self._moved: dict[int, list[str]] = collections.defaultdict(list)
        self._removed: list[ast.stmt] = []

    # Planning. ------------------------------------------------------------------------------------------------------

    def replace(self, span: Span, *parts: Part) -> None:
        """Plan to replace a span. Comments in it that are in none of the parts move above the statement."""
        self._edits.append(Edit(*span, parts))
        for offset, comment in self.source.comments_in(span):
            if not any(isinstance(part, tuple) and part[0] <= offset < part[1] for part in parts):
                self._moved[self._first_line(span[0])].append(comment.string)

    def insert(self, offset: int, text: str) -> None:
        """Plan to insert text."""
        self._edits.append(Edit(offset, offset, (text,)))

    def rewritten(self, node: ast.AST, shown: str | None = None) -> None:
        """Report that a node is rewritten. By default, the report shows its new code."""
        self._findings[self.source.span(node), report.REWRITTEN, None] = shown

    def todo(self, node: ast.AST, reason: str) -> None:
        """Leave a node unchanged, and put a TODO comment with the reason above its statement."""
        self._findings[self.source.span(node), report.TODO, reason] = None
        statement = self.source.statement(node)
        decorators = getattr(statement, "decorator_list", None)
        line = self._first_line(self.source.span(decorators[0] if decorators else statement)[0])
        reasons = self._todos.setdefault(line, [])
        if reason not in reasons:
            reasons.append(reason)

    def notice(self, node: ast.AST, reason: str) -> None:
        """Leave a node unchanged, and add a notice to the report, but no comment to the file."""
        self._findings[self.source.span(node), report.NOTICE, reason] = None

    def remove_statement(self, statement: ast.stmt) -> None:
        """Plan to remove a statement."""
        self._removed.append(statement)

    def _first_line(self, offset: int) -> int:
        line = self.source.line_of(offset)
        return self.source.first_lines.get(line, line)

    # Applying. ------------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[str, list[report.Finding]]:
        """Apply the edits, and return the new text of the file and the findings, in the order of the file."""
        for statement in self._removed:
            self._remove(statement)
        self._merge_branches()
        findings = self._found()
        if self._edits:
            self._keep_alignment()
        for line, comments in self._comments().items():
            indent, newline = self._indent(line), self.source.newline
            start = self.source.start_of_line(line)
            self.insert(start, "".join(f"{indent}{each}{newline}" for each in comments))
        return self._rendered((0, len(self.source.text))), findings

    def _found(self) -> list[report.Finding]:
        found = []
        for (span, kind, reason), shown in self._findings.items():
            line = self.source.line_of(span[0])
            column = span[0] - self.source.start_of_line(line)
            new = _short(shown or self._rendered(span)) if kind == report.REWRITTEN else None
            found.append(report.Finding(line, column, kind, _short(self.source.text[slice(*span)]), new, reason))
        return sorted(found, key=lambda finding: (finding.line, finding.column))

    def _rendered(self, span: Span, within: Edit | None = None) -> str:
        """Return the new text of a span of the old text, without the edit that the span is a part of."""
        at, end = span
        text: list[str] = []
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end > edit.start, -edit.end)):
            if edit.start < at or edit.end > end or edit is within:
                continue
            text.append(self.source.text[at : edit.start])
            for part in edit.parts:
                text.append(part if isinstance(part, str) else self._rendered(part, edit))
            at = edit.end
        return "".join([*text, self.source.text[at:end]])

    def _comments(self) -> dict[int, list[str]]:
        """Return the comments to put above lines."""
        comments = {line: list(moved) for line, moved in self._moved.items()}
        for line, reasons in self._todos.items():
            present = self._comments_above(line)
            width = min(100, max(79, self.source.longest_line)) - len(self._indent(line))
            for reason in reasons:
                if _joined(f"{MARK} {reason}") not in present:
                    wrapped = textwrap.wrap(f"{MARK} {reason}", width, **_WRAP)
                    comments.setdefault(line, []).extend(wrapped)
        return comments

    def _comments_above(self, line: int) -> str:
        above = []
        while line > 1 and self.source.line(line - 1).lstrip().startswith("#"):
            line -= 1
            above.append(self.source.line(line))
        return _joined("".join(reversed(above)))

    def _indent(self, line: int) -> str:
        text = self.source.line(line)
        return text[: len(text) - len(text.lstrip())]

    def _remove(self, statement: ast.stmt) -> None:
        """Remove a statement with its line. If all statements of a block are removed, the first becomes `pass`."""
        source, span = self.source, self.source.span(statement)
        siblings = _block(source.parents[statement], statement)
        is_empty = not isinstance(source.parents[statement], ast.Module) and not set(siblings) - set(self._removed)
        if is_empty and statement is siblings[0]:
            self.replace(span, "pass")
            return
        first, last = source.line_of(span[0]), source.line_of(span[1] - 1)
        line = source.start_of_line(first), source.start_of_line(last + 1)
        before, after = source.text[line[0] : span[0]], source.text[span[1] : line[1]].split("#")[0]
        if before.strip():
            self.replace((span[0] - len(before) + len(before.rstrip("; \t")), span[1]))
        elif ";" in after:
            self.replace((span[0], span[1] + len(after) - len(after.lstrip("; \t"))))
        else:
            self.replace(line)

    def _merge_branches(self) -> None:
        """If the edits make all branches of a `try` the same import or assignment, keep only one branch."""
        for node in [node for node in self.source.parents if isinstance(node, ast.Try)]:
            bodies = [node.body, *(handler.body for handler in node.handlers)]
            span = self.source.span(node)
            is_plain = all(
                len(b) == 1 and isinstance(b[0], (ast.Import, ast.ImportFrom, ast.Assign, ast.Pass)) for b in bodies
            )
            if not is_plain or node.orelse or node.finalbody or self.source.comments_in(span):
                continue
            inside = [edit for edit in self._edits if span[0] <= edit.start and span[0] < edit.end <= span[1]]
            if not inside:
                continue
            branches = {self._rendered(self.source.span(body[0])) for body in bodies}
            if len(branches) == 1:
                (text,) = branches
                self._edits = [edit for edit in self._edits if edit not in inside]
                if text == "pass":
                    self._removed.append(node)
                    self._remove(node)
                else:
                    self.replace(span, text)

    def _keep_alignment(self) -> None:
        """Move lines that are aligned with an opening bracket as far as the edits move the bracket."""
        source = self.source
        shifts: dict[int, int] = {}
        brackets: list[tuple[int, tokenize.TokenInfo, bool]] = []
        moved = functools.partial(self._moved_by, shifts)
        line = 0
        for (start, _, token), (_, _, following) in zip(source.tokens, source.tokens[1:]):
            if token.start[0] != line and token.type != tokenize.NL:
                line = token.start[0]
                if brackets and token.type != tokenize.DEDENT:
                    bracket, opening, is_aligned = brackets[-1]
                    of_line = shifts.get(opening.start[0], 0)
                    shifts[line] = moved(bracket) if is_aligned and token.start[1] > opening.start[1] else of_line
            if token.type == tokenize.OP and token.string in "([{":
                brackets.append((start, token, following.type not in (tokenize.NL, tokenize.COMMENT)))
            elif token.type == tokenize.OP and token.string in ")]}" and brackets:
                brackets.pop()
        for number, shift in shifts.items():
            start = source.start_of_line(number)
            if shift > 0:
                self.insert(start, " " * shift)
            elif shift < 0:
                self._edits.append(Edit(start, start + min(-shift, len(self._indent(number))), ()))

    def _moved_by(self, shifts: dict[int, int], bracket: int) -> int:
        """Return by how many columns the edits move a bracket."""
        line = self.source.line_of(bracket)
        start = self.source.start_of_line(line)
        before = [edit for edit in self._edits if start <= edit.start and edit.end <= bracket]
        text = [part for edit in before for part in edit.parts]
        if any(not isinstance(part, str) or "\n" in part for part in text):
            return 0
        return shifts.get(line, 0) + sum(map(len, text)) - sum(edit.end - edit.start for edit in before)


def _block(parent: ast.AST, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of the block that contains a statement."""
    blocks: Iterator[list[ast.stmt]] = (getattr(parent, field, []) for field in ("body", "orelse", "finalbody"))
    return next(block for block in blocks if isinstance(block, list) and statement in block)


def _joined(comments: str) -> str:
    """Return comments as one line, however they are wrapped."""
    return " ".join(comments.replace("#", " ").split())


def _short(shown: str, length: int = 200) -> str:
    shown = " ".join(shown.split())
    return shown if len(shown) <= length else shown[: length - 3] + "..."
