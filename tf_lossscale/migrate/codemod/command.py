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
    mode.add_argument("--diff", action="store_true", help="print what would change, as a unified diff (the default)")
    mode.add_argument("--write", action="store_true", help="change the files")
    mode.add_argument("--check", action="store_true", help="only say whether something is left to do")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of the diff")


def run(arguments: argparse.Namespace) -> int:
    """Run the `migrate` subcommand, and return the exit code."""
    reports = list(files.run(files.find(arguments.paths)))
    # The findings are printed before any file is changed. Otherwise, a run that is killed could leave behind changed
    # files without ever having shown the findings for them.
    _print_findings(reports)
    if arguments.write:
        planned, reports = reports, list(files.write(reports))
        _print_findings([new for old, new in zip(planned, reports) if new is not old])
    if arguments.json:
        print(report.as_json(reports, arguments.write))
    elif not arguments.check and not arguments.write:
        for each in reports:
            diff = each.diff.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            sys.stdout.write(printable_lines(diff))
    sys.stdout.flush()
    print(_summary(report.counts(reports), arguments.write), file=sys.stderr)
    if any(each.status == report.ERROR for each in reports):
        return 2
    return int(arguments.check and any(each.left_to_do for each in reports))


def _print_findings(reports: Sequence[report.FileReport]) -> None:
    """Print errors, TODO comments and notices to stderr, so that stdout contains only the diff or JSON."""
    for each in reports:
        if each.status == report.ERROR:
            print(printable(f"{each.path}: {each.error}"), file=sys.stderr)
        for finding in each.findings:
            if finding.kind != report.REWRITTEN:
                place = f"{each.path}:{finding.line}:{finding.column + 1}"
                print(printable(f"{place}: {finding.kind}: {finding.old}: {finding.reason}"), file=sys.stderr)
    sys.stderr.flush()


def _summary(counted: dict[str, int], written: bool) -> str:
    rows = (
        ("files", counted["files"]),
        ("changed" if written else "would change", counted[report.CHANGED]),
        ("not read, parsed or written", counted[report.ERROR]),
        ("uses rewritten" if written else "uses to rewrite", counted[report.REWRITTEN]),
        ("uses left, with a TODO(tf-lossscale) comment", counted[report.TODO]),
        ("notices", counted[report.NOTICE]),
    )
    return "\n".join(f"{label:44}  {count}" for label, count in rows)
