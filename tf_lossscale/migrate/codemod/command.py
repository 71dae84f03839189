"""The `migrate` subcommand of the command-line tool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tf_lossscale.migrate.codemod import files, report
from tf_lossscale.writing import printable, printable_lines

_EXIT_CODES = """\
exit code:
  0  all went well
  1  with --check: something is left to do
  2  bad arguments, or a file could not be read, parsed or written; it is left
     as it was
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of the `migrate` subcommand to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a Python file or notebook, or a folder of them")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="change the files instead of printing the changes as a diff")
    mode.add_argument("--check", action="store_true", help="only say whether something is left to do")


def run(arguments: argparse.Namespace) -> int:
    """Run the `migrate` subcommand, and return the exit code."""
    reports = list(files.run(files.find(arguments.paths)))
    # The findings are printed before any file is changed. Otherwise, a run that is killed could leave behind changed
    # files without ever having shown the findings for them.
    _print_findings(reports)
    if arguments.write:
        planned, reports = reports, list(files.write(reports))
        _print_findings([new for old, new in zip(planned, reports) if new is not old])
    elif not arguments.check:
        for each in reports:
            diff = each.diff.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            sys.stdout.write(printable_lines(diff))
    sys.stdout.flush()
    print(_summary(reports, arguments.write), file=sys.stderr)
    if any(each.error for each in reports):
        return 2
    return int(arguments.check and any(each.left_to_do for each in reports))


def _print_findings(reports: Sequence[report.FileReport]) -> None:
    """Print errors, TODO comments and notices to stderr, so that stdout contains only the diff."""
    for each in reports:
        if each.error:
            print(printable(f"{each.path}: {each.error}"), file=sys.stderr)
        for finding in each.findings:
            cell = f"cell {finding.cell}:" if finding.cell else ""
            place = f"{each.path}:{cell}{finding.line}:{finding.column + 1}"
            print(printable(f"{place}: {finding.kind}: {finding.old}: {finding.reason}"), file=sys.stderr)
    sys.stderr.flush()


def _summary(reports: Sequence[report.FileReport], written: bool) -> str:
    kinds = [finding.kind for each in reports for finding in each.findings]
    rows = (
        ("files", len(reports)),
        ("changed" if written else "would change", sum(each.is_changed for each in reports)),
        ("not read, parsed or written", sum(bool(each.error) for each in reports)),
        ("uses left, with a TODO(tf-lossscale) comment", kinds.count(report.TODO)),
        ("notices", kinds.count(report.NOTICE)),
    )
    return "\n".join(f"{label:44}  {count}" for label, count in rows)
