"""Applies the planned edits to the syntax tree of a module."""

from __future__ import annotations

import collections
import io
import textwrap
import tokenize
from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from tf_lossscale.migrate.codemod.arguments import code
from tf_lossscale.migrate.codemod.edits import MARK, Edits
from tf_lossscale.migrate.codemod.names import IPYTHON

_LINES = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class Rewriter(cst.CSTTransformer):
    """Applies the planned edits to one module.

    Args:
        edits: the edits that the planners have planned.
    """

    def __init__(self, edits: Edits):
        super().__init__()
        self._edits = edits
        self._touched = edits.touched()
        self._changed = edits.changed_statements()
        self._now: dict[cst.CSTNode, cst.CSTNode] = {}
        self._header: Sequence[cst.EmptyLine] = ()
        self._first: cst.CSTNode | None = None
        # True if a new expression contains `tf_lossscale.name`. The module must then import tf_lossscale.
        self._names_package = False

    def visit_Module(self, node: cst.Module) -> None:
        # LibCST stores comments above the first statement of a file in the module node, not in the statement.
        self._header = node.header
        self._first = node.body[0] if node.body else None

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._touched and super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        updated = super().on_leave(original_node, updated_node)
        make = self._edits.expressions.get(original_node)
        if make is not None and isinstance(updated, cst.CSTNode):
            updated = make(updated, self._current)
            self._names_package = self._names_package or bool(m.findall(updated, _OF_PACKAGE))
        if isinstance(original_node, cst.BaseExpression) and isinstance(updated, cst.CSTNode):
            self._now[original_node] = updated
        if isinstance(original_node, _LINES):
            updated = self._with_comments(original_node, updated)
        return updated

    def _current(self, original: cst.BaseExpression) -> cst.BaseExpression:
        return self._now.get(original, original)

    # Statements. ------------------------------------------------------------------------------------------------

    def _with_comments(self, original: cst.CSTNode, updated: Any) -> Any:
        """Put a statement's TODO comments, and the comments that its rewrite removed, above the statement."""
        first, *others = updated.nodes if isinstance(updated, cst.FlattenSentinel) else [updated]
        if not isinstance(first, _LINES):
            return updated
        changes = original in self._changed
        lost = _comments(original) - _comments(first, *others) if changes else collections.Counter()
        present = "\n".join(
            line.comment.value
            for line in (*(self._header if original is self._first else ()), *first.leading_lines)
            if line.comment
        )
        todos = [_wrapped(reason) for reason in self._edits.todos.get(original, ())]
        new = [*lost.elements(), *(line for lines in todos if "\n".join(lines) not in present for line in lines)]
        above = [*first.leading_lines, *(cst.EmptyLine(comment=cst.Comment(line)) for line in new)]
        first = first.with_changes(leading_lines=above)
        return cst.FlattenSentinel([first, *others]) if others else first

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel | cst.RemovalSentinel:
        """Put each import on its own line if several imports replace one import."""
        if not updated_node.body:
            # `_without_removed` later removes this empty statement, and keeps its comments.
            return updated_node.with_changes(body=[_REMOVED])
        if len(original_node.body) > 1 or len(updated_node.body) == 1:
            return updated_node
        lines = [cst.SimpleStatementLine([small]) for small in updated_node.body]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    def leave_ImportFrom(self, original_node: Any, updated_node: Any) -> Any:
        """Return the statements that replace an import statement."""
        statement = original_node
        planned = self._edits.imports
        aliases = [statement.names] if isinstance(statement.names, cst.ImportStar) else list(statement.names)
        kept: list[Any] = [alias for alias in aliases if alias not in planned]
        if len(kept) == len(aliases):
            return statement
        statements: list[cst.BaseSmallStatement] = []
        if kept:
            kept[-1] = kept[-1].with_changes(comma=aliases[-1].comma)
            statements.append(statement.with_changes(names=kept))
        new = dict.fromkeys(planned.get(alias) for alias in aliases)
        statements += [_line(each).body[0] for each in new if each]
        if not statements:
            return cst.RemoveFromParent()
        statements[-1] = statements[-1].with_changes(semicolon=statement.semicolon)
        return cst.FlattenSentinel(statements)

    leave_Import = leave_ImportFrom

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        updated_node = _without_removed(updated_node)
        if updated_node.body:
            return updated_node
        return updated_node.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])

    def leave_Try(
        self, original_node: cst.Try, updated_node: cst.Try
    ) -> cst.BaseStatement | cst.FlattenSentinel | cst.RemovalSentinel:
        """If the edits have made all branches of a `try` identical, replace it with one branch.

        Remove it if the branches are empty.
        """
        branches = {code(each.body) for each in (updated_node, *updated_node.handlers)}
        has_comment = m.findall(updated_node.with_changes(leading_lines=()), m.Comment())
        is_plain = m.matches(updated_node, _PLAIN_TRY) and not has_comment
        if len(branches) > 1 or not is_plain or original_node.deep_equals(updated_node):
            return updated_node
        line = updated_node.body.body[0]
        if m.matches(line, m.SimpleStatementLine([m.Pass()])):
            line = cst.SimpleStatementLine([_REMOVED])
        return line.with_changes(leading_lines=updated_node.leading_lines)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        updated_node = _without_removed(updated_node)
        if not self._names_package or any(m.matches(line, _IMPORTS_PACKAGE) for line in updated_node.body):
            return updated_node
        at = _import_place(updated_node.body)
        line = _line("import tf_lossscale")
        return updated_node.with_changes(body=[*updated_node.body[:at], line, *updated_node.body[at:]])


_REMOVED = cst.Pass()
_OF_PACKAGE = m.Attribute(m.Name("tf_lossscale"))
_IMPORTS = m.Import() | m.ImportFrom()
_IMPORT_LINE = m.SimpleStatementLine([m.AtLeastN(_IMPORTS, n=1)])
_DOCSTRING = m.SimpleStatementLine([m.Expr(m.SimpleString())])
_IPYTHON_LINE = m.SimpleStatementLine([m.Expr(m.Name(m.MatchIfTrue(lambda name: name.startswith(IPYTHON))))])
# Matches a `try` whose branches may be merged into one. Each branch is an import, `pass`, or an assignment to a name or
# attribute.
_PLAIN = m.IndentedBlock([m.SimpleStatementLine([_IMPORTS | m.Pass() | m.Assign(value=m.Name() | m.Attribute())])])
_PLAIN_TRY = m.Try(_PLAIN, [m.AtLeastN(m.ExceptHandler(_PLAIN), n=1)], orelse=None, finalbody=None)
_PACKAGE = m.ImportAlias(m.Name("tf_lossscale") | _OF_PACKAGE, None)
_IMPORTS_PACKAGE = m.SimpleStatementLine(
    [m.ZeroOrMore(), m.Import([m.ZeroOrMore(), _PACKAGE, m.ZeroOrMore()]), m.ZeroOrMore()]
)


def _comments(*nodes: cst.CSTNode) -> collections.Counter[str]:
    """Count the comments attached to the given statements, but not those inside the statements' blocks."""
    counts = collections.Counter(node.value for node in nodes if isinstance(node, cst.Comment))
    for node in nodes:
        counts += _comments(*(child for child in node.children if not isinstance(child, (cst.BaseSuite, cst.If))))
    return counts


def comments(source: bytes) -> list[tokenize.TokenInfo]:
    """Return the comments of a file as tokens, which contain their positions."""
    tokens = tokenize.tokenize(io.BytesIO(source).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def loses_comments(old: bytes, new: bytes) -> bool:
    """Return whether the new source lacks a comment that the old source contains."""
    before, after = (collections.Counter(token.string for token in comments(source)) for source in (old, new))
    return bool(before - after)


def _wrapped(reason: str) -> list[str]:
    return textwrap.wrap(f"{MARK} {reason}", 100, subsequent_indent="#   ", break_long_words=False)


def _line(statement: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.parse_statement(statement).body[0]])


def _without_removed(block: Any) -> Any:
    """In a block or module, remove the lines whose code was deleted. Their comments move above the next line."""
    body: list[Any] = []
    held: list[cst.EmptyLine] = []
    for line in block.body:
        if isinstance(line, cst.SimpleStatementLine) and line.body[0] is _REMOVED:
            held += line.leading_lines
            if line.trailing_whitespace.comment:
                held.append(cst.EmptyLine(comment=line.trailing_whitespace.comment))
            continue
        if held:
            has_comment = any(empty.comment for empty in held)
            above = [*held, *line.leading_lines] if has_comment or not line.leading_lines else line.leading_lines
            line, held = line.with_changes(leading_lines=above), []
        body.append(line)
    if len(body) == len(block.body):
        return block
    footer = [*held, *block.footer] if any(empty.comment for empty in held) else block.footer
    return block.with_changes(body=body, footer=footer)


def _import_place(body: Sequence[cst.BaseStatement]) -> int:
    """Return the position for a new import, after the docstring and the imports at the beginning of the file.

    Lines that are valid only in IPython, such as magics, may appear between these imports.
    """
    place = 0
    for index, line in enumerate(body):
        if m.matches(line, _IMPORT_LINE) or (index == 0 and m.matches(line, _DOCSTRING)):
            place = index + 1
        elif not m.matches(line, _IPYTHON_LINE):
            break
    return place
