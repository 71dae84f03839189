"""The source text of one file, with its syntax tree, and the place of each node in the text."""

from __future__ import annotations

import ast
import bisect
import functools
import io
import itertools
import re
import tokenize
import warnings
from typing import NamedTuple, TypeVar

TOO_DEEP = "is nested too deeply for the parser. Split its longest expression or chain of branches, and migrate again"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
# What follows an argument on its last line: a comma and a comment.
_REST_OF_LINE = re.compile(r"[ \t]*,?[ \t]*(#[^\r\n]*)?(\r\n|\r|\n)")
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)

# The parser uses one object for all nodes of each of these types, so they have no place.
_SHARED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)

_Node = TypeVar("_Node", bound=ast.AST)
#: The offsets of the first character of a piece of text, and of the character after it.
Span = tuple[int, int]


class Argument(NamedTuple):
    """An argument of a call."""

    #: The keyword, "*" or "**". It is None for a positional argument.
    keyword: str | None
    value: ast.expr
    #: The whole argument, with its keyword and the parentheses around its value.
    span: Span
    #: The value, with the parentheses around it.
    value_span: Span


class Source:
    """The text of one file.

    >>> source = Source(b"f(a, key=(b))")
    >>> [source.text[slice(*each.span)] for each in source.arguments(source.tree.body[0].value)]
    ['a', 'key=(b)']

    If the file does not parse, or changes when it is decoded and encoded again, a ValueError says so.
    """

    encoding: str

    def __init__(self, content: bytes):
        try:
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            self.text: str = content.decode(self.encoding)
            self._lines = _LINE.findall(self.text)
            # The parser sees the same lines and columns, but only one kind of line break.
            self._parsed = [f"{line.rstrip(chr(13) + chr(10))}\n" for line in self._lines]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree: ast.Module = ast.parse("".join(self._parsed))
        except (RecursionError, MemoryError) as error:
            raise ValueError(TOO_DEEP) from error
        except (SyntaxError, ValueError, LookupError) as error:
            line = getattr(error, "lineno", None)
            message = getattr(error, "msg", None) or str(error)
            raise ValueError(f"the file does not parse: {message}" + (f" (line {line})" if line else "")) from error
        if self.text.encode(self.encoding) != content:
            raise ValueError("the file cannot be rewritten, because decoding and encoding it changes its bytes")
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        #: The line break of this file.
        self.newline = "\r\n" if self._lines and self._lines[0].endswith("\r\n") else "\n"
        #: Maps each node to its parent. The nodes are in source order, with each parent before its children.
        self.parents: dict[ast.AST, ast.AST] = {}
        waiting: list[tuple[ast.AST, ast.AST]] = [(self.tree, self.tree)]
        while waiting:
            node, parent = waiting.pop()
            self.parents[node] = parent
            children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SHARED)]
            waiting.extend((child, node) for child in reversed(children))

    def nodes(self, kind: type[_Node]) -> list[_Node]:
        """Return the nodes of one type, in the order of the source."""
        return [node for node in self.parents if isinstance(node, kind)]

    def _offset(self, line: int, column: int) -> int:
        """Return the offset of a column that is counted in UTF-8 bytes."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        column = column if text.isascii() else len(text.encode()[:column].decode("utf-8", "ignore"))
        return self._starts[line - 1] + column

    def span(self, node: ast.AST) -> Span:
        """Return the place of a node, without parentheses around it."""
        at: ast.expr = node  # type: ignore[assignment]
        return self._offset(at.lineno, at.col_offset), self._offset(at.end_lineno or 0, at.end_col_offset or 0)

    def code(self, node: ast.AST) -> str:
        """Return the source code of a node."""
        return self.text[slice(*self.span(node))]

    def column(self, node: ast.AST) -> int:
        """Return the column of a node, counted from 0."""
        start = self.span(node)[0]
        return start - self.start_of_line(self.line_of(start))

    def line_of(self, offset: int) -> int:
        """Return the number of the line at an offset, counted from 1."""
        return bisect.bisect(self._starts, offset, 0, max(1, len(self._lines)))

    def line(self, number: int) -> str:
        """Return a line, with its line break."""
        return self._lines[number - 1]

    def start_of_line(self, number: int) -> int:
        """Return the offset of the first character of a line."""
        return self._starts[number - 1]

    @functools.cached_property
    def longest_line(self) -> int:
        """The length of the longest line."""
        return max(map(len, self._parsed), default=1) - 1

    @functools.cached_property
    def _tokens(self) -> list[tuple[int, int, tokenize.TokenInfo]]:
        """The tokens of the file except line breaks and indents, each with its start and end."""
        found = tokenize.generate_tokens(iter([*self._parsed, ""]).__next__)
        starts = [*self._starts, self._starts[-1] + 1]
        spans = ((starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1], t) for t in found)
        return [span for span in spans if span[2].type not in _LAYOUT]

    @functools.cached_property
    def _code(self) -> list[tuple[int, int, tokenize.TokenInfo]]:
        return [token for token in self._tokens if token[2].type != tokenize.COMMENT]

    def comments_in(self, span: Span) -> list[tokenize.TokenInfo]:
        """Return the comments in a span."""
        return [t for start, _, t in self._tokens if t.type == tokenize.COMMENT and span[0] <= start < span[1]]

    @functools.cached_property
    def _first_lines(self) -> list[int]:
        """The numbers of the lines on which a statement begins that nothing precedes on its line."""
        lines = set()
        for node in self.nodes(ast.stmt):
            if not self.line(node.lineno).encode()[: node.col_offset].strip():
                lines.add((getattr(node, "decorator_list", None) or [node])[0].lineno)
        return sorted(lines)

    def first_line(self, offset: int) -> int:
        """Return the number of the first line of the statement at an offset."""
        before = bisect.bisect(self._first_lines, self.line_of(offset))
        return self._first_lines[before - 1] if before else 1

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def arguments(self, call: ast.Call) -> list[Argument]:
        """Return the arguments of a call, in the order of the source."""
        nodes: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=self.span)
        return [self._argument(node, call) for node in nodes]

    def _argument(self, node: ast.expr | ast.keyword, call: ast.Call) -> Argument:
        value = node.value if isinstance(node, (ast.keyword, ast.Starred)) else node
        start, end = self._with_parentheses(value, self.span(call)[1] - 1)
        keyword = (node.arg or "**") if isinstance(node, ast.keyword) else "*" if value is not node else None
        return Argument(keyword, value, (self.span(node)[0] if keyword else start, end), (start, end))

    def _with_parentheses(self, node: ast.expr, limit: int) -> Span:
        """Return the place of a node with the parentheses around it that end before an offset."""
        code, (start, end) = self._code, self.span(node)
        first = bisect.bisect_left(code, start, key=lambda token: token[0])
        last = bisect.bisect_left(code, end, key=lambda token: token[0])
        while code[first - 1][2].string == "(" and code[last][2].string == ")" and code[last][0] < limit:
            first, last = first - 1, last + 1
            start, end = code[first][0], code[last - 1][1]
        return start, end

    def removal(self, arguments: list[Argument], index: int) -> Span:
        """Return the span to remove together with an argument: its line if nothing else is on it, or a comma."""
        start, end = arguments[index].span
        if index == 0:
            return start, arguments[1].span[0] if len(arguments) > 1 else end
        before = arguments[index - 1].span[1]
        line = self.start_of_line(self.line_of(start))
        rest = _REST_OF_LINE.match(self.text, end)
        return (line, rest.end()) if rest and line > before else (before, end)
