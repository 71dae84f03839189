"""Creates the new module from the old one and the planned edits."""

from __future__ import annotations

import collections
import io
import textwrap
import tokenize
from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from tf_lossscale.migrate.codemod.edits import MARK, Edits
from tf_lossscale.migrate.codemod.names import IPYTHON

_LINES = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class Rewriter(cst.CSTTransformer):
    """Applies the edits of one module.

    Args:
        edits: the planned edits.
    """

    def __init__(self, edits: Edits):
        super().__init__()
        self._edits = edits
        self._touched = edits.touched()
        self._now: dict[cst.CSTNode, cst.CSTNode] = {}
        self._header: Sequence[cst.EmptyLine] = ()
        self._first: cst.CSTNode | None = None
        self._names_package = False  # whether a new expression has `tf_lossscale.something`
        #: Whether statements that bound one name in several ways were merged.
        self.joined = False

    def visit_Module(self, node: cst.Module) -> None:
        # Comments above the first statement of a file belong to the module.
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
            updated = self._with_lines(original_node, updated)
        return updated

    def _current(self, original: cst.BaseExpression) -> cst.BaseExpression:
        return self._now.get(original, original)

    # Statements. ------------------------------------------------------------------------------------------------

    def _with_lines(self, original: cst.CSTNode, updated: cst.CSTNode) -> cst.CSTNode:
        """Put comments and lines above a statement."""
        comments = [_wrapped(reason) for reason in self._edits.todos.get(original, ())]
        lines = self._edits.lines.get(original, ())
        if not comments and not lines:
            return updated
        if isinstance(updated, cst.FlattenSentinel):
            first, *others = updated.nodes
            return cst.FlattenSentinel([self._with_lines(original, first), *others])
        if not isinstance(updated, _LINES):
            return updated
        leading = list(updated.leading_lines)
        above = [*self._header, *leading] if original is self._first else leading
        present = "\n".join(line.comment.value for line in above if line.comment)
        leading += [
            cst.EmptyLine(comment=cst.Comment(text))
            for texts in comments
            if "\n".join(texts) not in present
            for text in texts
        ]
        if not lines:
            return updated.with_changes(leading_lines=leading)
        first, *others = [_line(line) for line in lines]
        return cst.FlattenSentinel(
            [first.with_changes(leading_lines=leading), *others, updated.with_changes(leading_lines=())]
        )

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel | cst.RemovalSentinel:
        body, changed = self._body(original_node.body, updated_node.body)
        if not changed:
            return updated_node
        lost = _comments(*original_node.body) - _comments(*body)
        above = [*updated_node.leading_lines, *(cst.EmptyLine(comment=cst.Comment(text)) for text in lost.elements())]
        updated_node = updated_node.with_changes(leading_lines=above)
        if not body:
            return updated_node.with_changes(body=[_REMOVED])  # the block around it keeps the comments
        if len(original_node.body) > 1:
            return updated_node.with_changes(body=_joined(body))
        lines = [cst.SimpleStatementLine([_alone(small)]) for small in body]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        body, changed = self._body(original_node.body, updated_node.body)
        return updated_node.with_changes(body=_joined(body or [cst.Pass()])) if changed else updated_node

    def _body(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement]
    ) -> tuple[list[cst.BaseSmallStatement], bool]:
        body: list[cst.BaseSmallStatement] = []
        changed = False
        for old, new in zip(original, updated):
            statements = self._imports(old) if isinstance(old, (cst.Import, cst.ImportFrom)) else None
            changed = changed or statements is not None
            body.extend([new] if statements is None else statements)
        return body, changed

    def _imports(self, statement: cst.Import | cst.ImportFrom) -> list[cst.BaseSmallStatement] | None:
        """Return the statements that replace an import; None to keep it."""
        planned = self._edits.imports
        aliases = [statement.names] if isinstance(statement.names, cst.ImportStar) else list(statement.names)
        kept: list[Any] = [alias for alias in aliases if alias not in planned]
        if len(kept) == len(aliases):
            return None
        statements: list[cst.BaseSmallStatement] = []
        if kept:
            kept[-1] = kept[-1].with_changes(comma=aliases[-1].comma)
            statements.append(statement.with_changes(names=kept))
        new = dict.fromkeys(planned.get(alias) for alias in aliases)
        return statements + [_line(code).body[0] for code in new if code]

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
        """Merge branches of a `try` that have become equal, and remove a `try` whose branches are empty."""
        blocks = [updated_node.body, *(handler.body for handler in updated_node.handlers)]
        if updated_node.orelse or updated_node.finalbody or original_node.deep_equals(updated_node):
            return updated_node
        rungs = [block.body[0] for block in blocks if len(block.body) == 1]
        if len(rungs) != len(blocks) or not blocks[1:] or not all(self._is_plain(rung) for rung in rungs):
            return updated_node
        if _comments(updated_node.with_changes(leading_lines=())):
            return updated_node
        first = rungs[0]
        bare = [rung.with_changes(leading_lines=()) for rung in rungs]
        if not all(bare[0].deep_equals(rung) for rung in bare[1:]):
            return updated_node
        if m.matches(first, m.SimpleStatementLine([m.Pass()])):
            return cst.SimpleStatementLine([_REMOVED], leading_lines=updated_node.leading_lines)
        self.joined = True
        return first.with_changes(leading_lines=updated_node.leading_lines)

    def _is_plain(self, rung: cst.BaseStatement) -> bool:
        """Return whether a statement is an import, or assigns a dotted name to a name."""
        if not isinstance(rung, cst.SimpleStatementLine) or len(rung.body) != 1:
            return False
        (small,) = rung.body
        if isinstance(small, (cst.Import, cst.ImportFrom, cst.Pass)):
            return True
        return isinstance(small, cst.Assign) and isinstance(small.value, (cst.Name, cst.Attribute))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        updated_node = _without_removed(updated_node)
        if not self._names_package or _imports_package(updated_node):
            return updated_node
        at = _import_place(updated_node.body)
        line = _line("import tf_lossscale")
        return updated_node.with_changes(body=[*updated_node.body[:at], line, *updated_node.body[at:]])


_REMOVED = cst.Pass()
_OF_PACKAGE = m.Attribute(m.Name("tf_lossscale"))
_IPYTHON_LINE = m.SimpleStatementLine([m.Expr(m.Name(m.MatchIfTrue(lambda name: name.startswith(IPYTHON))))])


def _comments(*nodes: cst.CSTNode) -> collections.Counter[str]:
    found = [comment for node in nodes for comment in m.findall(node, m.Comment())]
    return collections.Counter(cst.ensure_type(comment, cst.Comment).value for comment in found)


def comments(source: bytes) -> list[tokenize.TokenInfo]:
    """Return the comments of a file, with their positions."""
    tokens = tokenize.tokenize(io.BytesIO(source).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def loses_comments(old: bytes, new: bytes) -> bool:
    """Return whether the new source lacks a comment of the old one."""
    before, after = (collections.Counter(token.string for token in comments(source)) for source in (old, new))
    return bool(before - after)


def _wrapped(reason: str) -> list[str]:
    return textwrap.wrap(f"{MARK} {reason}", 100, subsequent_indent="#   ", break_long_words=False)


def _line(code: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.parse_statement(code).body[0]])


def _alone(small: cst.BaseSmallStatement) -> cst.BaseSmallStatement:
    return small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)


def _joined(body: list[cst.BaseSmallStatement]) -> list[cst.BaseSmallStatement]:
    semicolon = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
    return [*(small.with_changes(semicolon=semicolon) for small in body[:-1]), _alone(body[-1])]


def _without_removed(block: Any) -> Any:
    """Remove emptied lines from a block or module, and move the comments above them to the next line."""
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


def _imports_package(module: cst.Module) -> bool:
    top = [small for line in module.body if isinstance(line, cst.SimpleStatementLine) for small in line.body]
    for small in top:
        if isinstance(small, cst.Import):
            for alias in small.names:
                if not alias.asname and alias.evaluated_name.split(".", 1)[0] == "tf_lossscale":
                    return True
    return False


def _import_place(body: Sequence[cst.BaseStatement]) -> int:
    """Return the position after the docstring and the first imports, among which IPython's lines may be."""
    place = 0
    for index, line in enumerate(body):
        if not isinstance(line, cst.SimpleStatementLine):
            break
        is_import = all(isinstance(small, (cst.Import, cst.ImportFrom)) for small in line.body)
        is_docstring = index == 0 and m.matches(line, m.SimpleStatementLine([m.Expr(m.SimpleString())]))
        is_ipython = m.matches(line, _IPYTHON_LINE)
        if not is_import and not is_docstring and not is_ipython:
            break
        place = place if is_ipython else index + 1
    return place
