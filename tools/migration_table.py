"""Writes docs/migration_table.md from the codemod's cases: `python -m tools.migration_table`."""

from __future__ import annotations

import difflib
import re
import textwrap

from tests.migrate.codemod import case_files
from tf_lossscale.legacy import table
from tools import pages

PAGE = pages.DOCS / "migration_table.md"

_TOPICS = {
    "constructors": "Constructors",
    "imports": "Imports",
    "policies": "Policies",
    "graph_rewrite": "Graph rewrite",
    "contrib": "contrib",
    "attributes": "Attributes",
    "classes": "Classes as values",
    "probes": "Probes",
    "loops": "Training loops",
    "unseen": "What syntax cannot see",
    "look_alikes": "Look-alikes",
    "programs": "Programs",
}


def tables() -> str:
    """The tables, as Markdown."""
    cases = case_files.load()
    assert {case.topic for case in cases} == set(_TOPICS), "a topic without a heading"
    lines = []
    for topic, heading in _TOPICS.items():
        lines += [f"## {heading}", "", "| | old | new |", "|---|---|---|"]
        lines += [row for case in cases if case.topic == topic for row in _rows(case)]
        lines.append("")
    return "\n".join([*lines, *_every_name()])


def _every_name() -> list[str]:
    """The table of old names, a row for each module."""
    lines = ["## Every old name", "", "| module | old name -> new name |", "|---|---|"]
    for module in sorted({name.rpartition(".")[0] for name in table.OLD} - {"tf_lossscale"}):
        rows = [f"`{name}` -> `{_new_name(old)}`" for name, old in table.rows_in(module).items()]
        lines.append(f"| `{_public(module)}` | {'<br>'.join(rows)} |")
    return lines


def _new_name(old: table.Old) -> str:
    return _public(table.WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new))


def _public(dotted: str) -> str:
    return f"tf.{dotted}" if dotted.startswith("keras.") else re.sub(r"^tensorflow\.(?!python)", "tf.", dotted)


def _rows(case: case_files.Case) -> list[str]:
    rows = []
    for name in case.before:
        old, new = _changed(case.before[name], case.after[name])
        where = f" (`{name}`)" if len(case.before) > 1 else ""
        said = "".join(f"<br>reported: {text} …" for text in case.notices)
        if old == new:
            shown = [line for line in case.before[name].splitlines() if line.strip()]
            rows.append(f"| {case.title}{where} | {_code(shown)} | unchanged{said} |")
        else:
            rows.append(f"| {case.title}{where} | {_code(old)} | {_code(new)}{said} |")
    return rows


def _changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """The lines that differ; where lines only come in, with the line that they come in front of."""
    a, b = before.splitlines(), [line for line in after.splitlines() if line != "import tf_lossscale"]
    old: list[str] = []
    new: list[str] = []
    for kind, a1, a2, b1, b2 in difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        if kind == "insert":
            old += a[a1 : a1 + 1]
            new += b[b1 : b2 + 1]
        elif kind != "equal":
            old += a[a1:a2]
            new += b[b1:b2]
    return [line for line in old if line.strip()], [line for line in new if line.strip()]


def _code(lines: list[str]) -> str:
    if not lines:
        return "(removed)"
    return "<br>".join(_span(line) for line in textwrap.dedent("\n".join(lines)).splitlines())


def _span(line: str) -> str:
    indent = min(len(line) - len(line.lstrip()), 8)  # lines may be aligned with a distant bracket
    return "&nbsp;" * indent + "`" + line.strip().replace("|", "\\|") + "`"


def page() -> str:
    """The page with its tables up to date."""
    return pages.with_part(PAGE.name, "migration_table", tables())


if __name__ == "__main__":
    PAGE.write_text(page())
