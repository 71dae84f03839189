"""Migrates one file: rewrites its source code, and returns the findings."""

from __future__ import annotations

import ast
import concurrent.futures
import threading
import warnings
from typing import NamedTuple

import libcst as cst

from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.edits import MARK, Edits, Visitor
from tf_lossscale.migrate.codemod.imports import ImportPlanner
from tf_lossscale.migrate.codemod.objects import ObjectPlanner
from tf_lossscale.migrate.codemod.plan import Planner
from tf_lossscale.migrate.codemod.policies import PolicyPlanner, RefusalPlanner
from tf_lossscale.migrate.codemod.project import Around
from tf_lossscale.migrate.codemod.report import TODO, Finding
from tf_lossscale.migrate.codemod.rewrite import Rewriter, comments, loses_comments
from tf_lossscale.migrate.codemod.strategies import StrategyPlanner
from tf_lossscale.migrate.codemod.unseen import UnseenPlanner

_ALONE = Around()
# The rows of planners run in this order. All planners in a row share one walk over the syntax tree.
_PLANNERS: tuple[tuple[type[Visitor], ...], ...] = (
    (RefusalPlanner, PolicyPlanner),
    (Planner,),
    (ObjectPlanner, StrategyPlanner, UnseenPlanner),
    # Imports are planned last, because the remaining uses of each imported name are known only then.
    (ImportPlanner,),
)
# The stack size of the parsing thread, in bytes. Only deeply nested files use much of it.
_STACK = 512 * 2**20
_TOO_DEEP = "is nested too deeply for the parser. Split its longest expression or chain of branches, and migrate again"


class Outcome(NamedTuple):
    """The new source of a migrated file, and the findings about its old names."""

    source: bytes
    findings: tuple[Finding, ...]


def migrate(source: bytes, around: Around = _ALONE) -> Outcome:
    """Rewrite the uses of old names in one file.

    >>> old = b"from tensorflow.keras.mixed_precision import LossScaleOptimizer\\nopt = LossScaleOptimizer(inner)\\n"
    >>> print(migrate(old).source.decode(), end="")
    from tf_lossscale import LossScaleOptimizer
    opt = LossScaleOptimizer(inner)

    Args:
        source: the content of the file, in any encoding that Python reads.
        around: facts about the other files of the project; see `project.Project`.

    Returns:
        The new content, in the same encoding and with the same line endings, and the findings. If nothing changes,
        the new content is identical to the old content.

    Raises:
        ValueError: the file does not parse, is nested too deeply, or changes when it is decoded and encoded again.
    """
    try:
        return _migrated(source, around)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def _migrated(source: bytes, around: Around) -> Outcome:
    module = _parsed(source)
    if module.bytes != source:
        raise ValueError("the file cannot be rewritten, because decoding and encoding it changes its bytes")
    analysis = Calls(module, around)
    edits = Edits(analysis)
    for planners in _PLANNERS:
        visitors = [planner(analysis, edits) for planner in planners]
        analysis.visit(*visitors)
        for visitor in visitors:
            visitor.finish()
    result = module.visit(Rewriter(edits)).bytes
    if result != source:
        wrong = python_error(result)
        if wrong or loses_comments(source, result):
            raise ValueError(
                f"the file was not changed, because the rewrite would {'not parse' if wrong else 'lose a comment'}. "
                "Please report this as a bug"
            )
    findings = (*sorted(edits.findings), *_left_by_an_earlier_run(source, edits))
    return Outcome(result, findings)


def _left_by_an_earlier_run(source: bytes, edits: Edits) -> list[Finding]:
    """Return a finding for each TODO comment that an earlier run added and that this run does not add again."""
    current_reasons = [finding.reason or "" for finding in edits.findings if finding.kind == TODO]
    left = [each for each in comments(source) if each.string.startswith(MARK)] if MARK.encode() in source else []
    reasons = [(comment, comment.string.removeprefix(MARK).strip()) for comment in left]
    return [
        Finding(*comment.start, TODO, comment.string, reason=reason)
        for comment, reason in reasons
        if not any(each.startswith(reason) for each in current_reasons)
    ]


def _parsed(source: bytes) -> cst.Module:
    """Parse a file in a thread with a large stack, because LibCST's native parser recurses deeply."""
    # Parse the file with Python's parser first. Its error messages are clearer, and unlike LibCST's parser, it limits
    # the depth of the recursion.
    wrong = python_error(source)
    if isinstance(wrong, (RecursionError, MemoryError)):
        raise ValueError(_TOO_DEEP)
    if wrong is not None:
        raise ValueError(f"the file does not parse: {_first_line(wrong)}")
    usual = threading.stack_size(_STACK)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(cst.parse_module, source).result()
    except (cst.ParserSyntaxError, SyntaxError, UnicodeError, LookupError) as error:
        raise ValueError(f"the file does not parse: {_first_line(error)}") from error
    finally:
        threading.stack_size(usual)


def python_error(source: str | bytes) -> Exception | None:
    """Return the exception that Python raises when it parses source code, or None if the code is valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error
    return None


def _first_line(error: Exception) -> str:
    message = getattr(error, "message", None) or getattr(error, "msg", None) or str(error) or type(error).__name__
    line = getattr(error, "raw_line", None) or getattr(error, "lineno", None)
    return f"{str(message).splitlines()[0]}" + (f" (line {line})" if line else "")
