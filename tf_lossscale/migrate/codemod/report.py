"""The codemod's report: what is left to do in a file, and the new content of the file."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import NamedTuple

from tf_lossscale.writing import printable

TODO = "todo"
NOTICE = "notice"


class Finding(NamedTuple):
    """A place that the codemod does not change, and the reason."""

    #: The line in the old file, or in a cell of an old notebook, counted from 1.
    line: int
    #: The column in the old file, counted from 0.
    column: int
    #: TODO or NOTICE. TODO adds a comment above the code.
    kind: str
    #: The code that is not changed.
    old: str
    reason: str
    #: The number of the cell in a notebook, counted from 1.
    cell: int | None = None


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The codemod's result for one file."""

    path: str
    findings: tuple[Finding, ...] = ()
    error: str | None = None
    # The content before and after the rewrite. Both are empty if the file does not change.
    old: bytes = b""
    new: bytes = b""

    @property
    def is_changed(self) -> bool:
        """Whether the file is, or would be, rewritten."""
        return self.new != self.old

    @property
    def diff(self) -> str:
        """The change as a unified diff, or an empty string if the file did not change."""
        shown = printable(self.path.replace(os.sep, "/").lstrip("/"))
        lines = difflib.unified_diff(_lines(self.old), _lines(self.new), f"a/{shown}", f"b/{shown}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    @property
    def left_to_do(self) -> bool:
        """Whether `migrate --check` fails because of this file."""
        return self.is_changed or bool(self.error) or any(finding.kind == TODO for finding in self.findings)


def _lines(content: bytes) -> list[str]:
    return [line.decode("utf-8", "surrogateescape") for line in content.splitlines(keepends=True)]
