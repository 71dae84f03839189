"""The `migrate` subcommand of the command-line tool."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from tf_lossscale import option_types
from tf_lossscale.libraries import optional
from tf_lossscale.migrate.codemod import report

_EXIT_CODES = """\
exit code:
  0  all went well
  1  with --check: something is left to do
  2  bad arguments, or a file could not be read, parsed or written; it is left
     as it was
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of the `migrate` subcommand to its parser.

    Args:
        parser: the parser of the subcommand.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a Python file or notebook, or a folder of them")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--diff", action="store_true", help="print what would change, as a unified diff (the default)")
    mode.add_argument("--write", action="store_true", help="change the files")
    mode.add_argument("--check", action="store_true", help="only say whether something is left to do")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of the diff")
    what = "number of processes; by default one per core"
    parser.add_argument("--jobs", type=option_types.whole_number(1), default=0, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the `migrate` subcommand.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        ImportError: an optional library is missing.
        FileNotFoundError: there is no file or folder at one of the paths.
    """
    for module in ("libcst", "rich", "tqdm"):
        optional.load(module, "migrate")
    from tf_lossscale.migrate.codemod import files, repositories

    paths = files.find(arguments.paths)
    progress = optional.load("tqdm", "migrate").tqdm(
        files.run(paths, arguments.jobs),
        total=len(paths),
        unit="file",
        disable=len(paths) < 2 or not sys.stderr.isatty(),
        leave=False,
    )
    reports = list(progress)
    console = optional.load("rich.console", "migrate").Console(stderr=True, highlight=False, soft_wrap=True)
    # The findings are printed before any file is changed. Otherwise, a run that is killed could leave behind changed
    # files without ever having shown the findings for them.
    _print_findings(reports, console)
    if arguments.write:
        lost = repositories.without_committed_version([r.path for r in reports if r.status == report.CHANGED])
        if lost:
            message = (
                f"tf-lossscale migrate: Git has no committed version of {len(lost)} of the files that change, among "
                f"them {lost[0]}. Only the diff, which this command prints without --write, can bring their old "
                "content back."
            )
            width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
            print(textwrap.fill(message, width, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
        planned, reports = reports, list(files.write(reports))
        _print_findings([new for old, new in zip(planned, reports) if new is not old], console)
    if arguments.json:
        print(report.as_json(reports, arguments.write))
    elif not arguments.check and not arguments.write:
        for each in reports:
            sys.stdout.write(each.diff.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    sys.stdout.flush()
    console.print(_table(report.counts(reports), arguments.write))
    if any(each.status == report.ERROR for each in reports):
        return 2
    return int(arguments.check and any(each.left_to_do for each in reports))


def _print_findings(reports: Sequence[report.FileReport], console: Any) -> None:
    """Print errors, TODO comments and notices to stderr, so that stdout contains only the diff or JSON."""
    for each in reports:
        if each.status == report.ERROR:
            console.print(f"{each.path}: {each.error}", style="red", markup=False)
        for finding in each.findings:
            if finding.kind != report.REWRITTEN:
                place = f"{each.path}:{finding.line}:{finding.column + 1}"
                console.print(f"{place}: {finding.kind}: {finding.old}: {finding.reason}", markup=False)
    console.file.flush()


def _table(counted: dict[str, int], written: bool) -> Any:
    table = optional.load("rich.table", "migrate").Table(show_header=False, box=None, pad_edge=False)
    changed = "changed" if written else "would change"
    for name, label in (
        ("files", "files"),
        (report.CHANGED, changed),
        (report.ERROR, "not read, parsed or written"),
        (report.REWRITTEN, "uses rewritten" if written else "uses to rewrite"),
        (report.TODO, "uses left, with a TODO(tf-lossscale) comment"),
        (report.NOTICE, "notices"),
    ):
        table.add_row(label, str(counted[name]))
    return table
