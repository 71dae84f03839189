"""The codemod's report: its findings, the result for each file, and the totals. It can be written as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable
from typing import Any

from tf_lossscale.writing import printable

REWRITTEN = "rewritten"
TODO = "todo"
NOTICE = "notice"

CHANGED = "changed"
UNCHANGED = "unchanged"
ERROR = "error"


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One use of an old name in a file, and what the codemod did about it.

    >>> Finding(3, 6, REWRITTEN, "mp.LossScaleOptimizer(o, 'dynamic')", "tf_lossscale.LossScaleOptimizer(o)").line
    3
    """

    # The line in the old file, counted from 1.
    line: int
    # The column in the old file, counted from 0.
    column: int
    # REWRITTEN, TODO or NOTICE. TODO and NOTICE mean that the code was not changed. TODO adds a comment above the code.
    kind: str
    old: str
    new: str | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The codemod's result for one file."""

    path: str
    # One of CHANGED, UNCHANGED and ERROR.
    status: str
    findings: tuple[Finding, ...] = ()
    error: str | None = None
    # The content before and after the rewrite; both are empty unless the status is CHANGED.
    old: bytes = b""
    new: bytes = b""

    @property
    def diff(self) -> str:
        """The change as a unified diff, or an empty string if the file did not change."""
        shown = printable(self.path.replace(os.sep, "/").lstrip("/"))
        lines = difflib.unified_diff(_lines(self.old), _lines(self.new), f"a/{shown}", f"b/{shown}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    @property
    def left_to_do(self) -> bool:
        """Whether `migrate --check` fails because of this file."""
        return self.status != UNCHANGED or any(finding.kind == TODO for finding in self.findings)


def _lines(content: bytes) -> list[str]:
    return [line.decode("utf-8", "surrogateescape") for line in content.splitlines(keepends=True)]


def counts(reports: Iterable[FileReport]) -> dict[str, int]:
    """Return the number of files, of files with each status, and of findings of each kind.

    >>> counts([FileReport("a.py", UNCHANGED)])["files"]
    1
    """
    keys = [key for report in reports for key in ("files", report.status, *(f.kind for f in report.findings))]
    return {key: keys.count(key) for key in ("files", CHANGED, UNCHANGED, ERROR, REWRITTEN, TODO, NOTICE)}


def as_json(reports: Iterable[FileReport], written: bool) -> str:
    """Return the machine-readable report, whose schema is in docs/migration.md.

    >>> json.loads(as_json([], written=False))["version"]
    1
    """
    reports = list(reports)
    content: dict[str, Any] = {
        "version": 1,
        "written": written,
        "summary": counts(reports),
        "files": [
            {key: value for key, value in dataclasses.asdict(report).items() if key not in ("old", "new")}
            for report in reports
            if report.status != UNCHANGED or report.findings
        ],
    }
    return json.dumps(content, indent=2)
