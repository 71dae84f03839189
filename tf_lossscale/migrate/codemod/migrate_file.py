"""Migrates one file: rewrites its source code, and returns the findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tf_lossscale.migrate.codemod import class_tests, policies, unseen
from tf_lossscale.migrate.codemod.edits import MARK, Edits
from tf_lossscale.migrate.codemod.imports import Imports
from tf_lossscale.migrate.codemod.report import TODO, Finding
from tf_lossscale.migrate.codemod.rules import Rules
from tf_lossscale.migrate.codemod.source import TOO_DEEP, Source
from tf_lossscale.migrate.codemod.uses import ALONE, Project, Uses

_BUG = "the file was not changed, because the result would not parse. Please report this as a bug"


class Outcome(NamedTuple):
    """The new source of a migrated file, and the findings about its old names."""

    source: bytes
    findings: tuple[Finding, ...]


def migrate(source: bytes, project: Project = ALONE) -> Outcome:
    """Rewrite the uses of old names in one file.

    >>> old = b"from tensorflow.keras.mixed_precision import LossScaleOptimizer\\nopt = LossScaleOptimizer(inner)\\n"
    >>> print(migrate(old).source.decode(), end="")
    from tf_lossscale import LossScaleOptimizer
    opt = LossScaleOptimizer(inner)

    `project` says what the migration depends on in other files.

    Encoding and line endings stay. If the file does not parse, is nested too deeply, or changes when it is decoded and
    encoded again, a ValueError says so.
    """
    try:
        return _migrated(source, project)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _migrated(content: bytes, project: Project) -> Outcome:
    source = Uses(content, project)
    edits = Edits(source)
    rules = Rules(source, edits)
    rules.apply()
    policies.report_reads(source, edits)
    unseen.report(source, edits)
    class_tests.report(source, edits)
    Imports(source, edits, rules).apply()
    text, findings = edits.finish()
    result = text.encode(source.encoding)
    if result != content:
        try:
            Source(result)
        except ValueError as error:
            raise ValueError(_BUG) from error
    return Outcome(result, (*findings, *_left_by_an_earlier_run(source, findings)))


def _left_by_an_earlier_run(source: Source, findings: list[Finding]) -> Iterator[Finding]:
    """Yield a finding for each TODO comment that an earlier run added and that this run does not add again."""
    current = tuple(f"{MARK} {finding.reason}" for finding in findings if finding.kind == TODO)
    for comment in source.comments_in((0, len(source.text))):
        if comment.string.startswith(MARK) and not any(each.startswith(comment.string) for each in current):
            yield Finding(*comment.start, TODO, comment.string, comment.string.removeprefix(MARK).strip())
