"""Migrates one file: rewrites its source code, and returns the findings."""

from __future__ import annotations

import collections
from typing import NamedTuple

from tf_lossscale.migrate.codemod import policies, strategies, unseen
from tf_lossscale.migrate.codemod.edits import MARK, Edits
from tf_lossscale.migrate.codemod.imports import Imports
from tf_lossscale.migrate.codemod.report import TODO, Finding
from tf_lossscale.migrate.codemod.rules import Rules
from tf_lossscale.migrate.codemod.source import TOO_DEEP, Source
from tf_lossscale.migrate.codemod.uses import ALONE, Around, Uses

_BUG = "the file was not changed, because the rewrite would {}. Please report this as a bug"


class Outcome(NamedTuple):
    """The new source of a migrated file, and the findings about its old names."""

    source: bytes
    findings: tuple[Finding, ...]


def migrate(source: bytes, around: Around = ALONE) -> Outcome:
    """Rewrite the uses of old names in one file.

    >>> old = b"from tensorflow.keras.mixed_precision import LossScaleOptimizer\\nopt = LossScaleOptimizer(inner)\\n"
    >>> print(migrate(old).source.decode(), end="")
    from tf_lossscale import LossScaleOptimizer
    opt = LossScaleOptimizer(inner)

    Args:
        source: the content of the file, in any encoding that Python reads.
        around: facts about the other files of the project.

    Returns:
        The new content, in the same encoding and with the same line endings, and the findings. If nothing changes,
        the new content is identical to the old content.

    Raises:
        ValueError: the file does not parse, is nested too deeply, or changes when it is decoded and encoded again.
    """
    try:
        return _migrated(source, around)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _migrated(content: bytes, around: Around) -> Outcome:
    source = Uses(content, around)
    edits = Edits(source)
    rules = Rules(source, edits)
    rules.apply()
    policies.report_reads(source, edits)
    unseen.report(source, edits)
    strategies.rename_run(source, edits)
    Imports(source, edits, rules).apply()
    text, findings = edits.finish()
    result = text.encode(source.encoding)
    if result != content:
        try:
            lost = _comments(source) - _comments(Source(result))
        except ValueError as error:
            raise ValueError(_BUG.format("not parse")) from error
        if lost:
            raise ValueError(_BUG.format("lose a comment"))
    return Outcome(result, (*findings, *_left_by_an_earlier_run(source, findings)))


def _comments(source: Source) -> collections.Counter[str]:
    return collections.Counter(token.string for token in source.comments_in((0, len(source.text) + 1)))


def _left_by_an_earlier_run(source: Source, findings: list[Finding]) -> list[Finding]:
    """Return a finding for each TODO comment that an earlier run added and that this run does not add again."""
    if MARK not in source.text:
        return []
    current = [finding.reason or "" for finding in findings if finding.kind == TODO]
    comments = [token for token in source.comments_in((0, len(source.text))) if token.string.startswith(MARK)]
    reasons = [(comment, comment.string.removeprefix(MARK).strip()) for comment in comments]
    return [
        Finding(*comment.start, TODO, comment.string, reason=reason)
        for comment, reason in reasons
        if not any(each.startswith(reason) for each in current)
    ]
