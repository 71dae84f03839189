"""The codemod's cases: data, read here. They are its tests, and the table in docs/migration_table.md."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile

from tf_lossscale.migrate.codemod import files, report
from tf_lossscale.migrate.codemod.migrate_file import Outcome

HERE = pathlib.Path(__file__).parent / "cases"


@dataclasses.dataclass
class Case:
    """One case: files before and after, and what the report has to say.

    In a case file a line `#: case: title` begins one. `#: before` and `#: after` begin code, `#: file: name` one of
    several files, `#: unchanged` says that nothing changes, `#: todo: text` and `#: notice: text` what is reported.
    """

    title: str
    topic: str
    before: dict[str, str] = dataclasses.field(default_factory=dict)
    after: dict[str, str] = dataclasses.field(default_factory=dict)
    unchanged: bool = False
    reported: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def migrated(self) -> dict[str, Outcome]:
        """What the codemod makes of the files before."""
        return migrate_files(frozenset(self.before.items()))


@functools.cache
def migrate_files(sources: frozenset[tuple[str, str]]) -> dict[str, Outcome]:
    """Migrates files that know each other; the same files only once."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, source in sorted(sources):
            paths[name] = pathlib.Path(folder, name)
            paths[name].parent.mkdir(parents=True, exist_ok=True)
            paths[name].write_bytes(source.encode())
        reports = files.run([str(path) for path in paths.values()])
        return {name: _outcome(one, paths[name].read_bytes()) for name, one in zip(paths, reports, strict=True)}


def _outcome(one: report.FileReport, old: bytes) -> Outcome:
    assert one.status != report.ERROR, one.error
    return Outcome(one.new or old, one.findings)


def load() -> list[Case]:
    """All cases, in the order of the table."""
    return [case for path in sorted(HERE.glob("*.py.txt")) for case in _read(path)]


def _read(path: pathlib.Path) -> list[Case]:
    cases: list[Case] = []
    name, into = "train.py", None
    for line in path.read_text().splitlines(keepends=True):
        if not line.startswith("#:"):
            if into is not None:
                into[name] = into.get(name, "") + line
            continue
        keyword, _, rest = line[2:].strip().partition(":")
        if keyword == "case":
            cases.append(Case(rest.strip(), path.name.removesuffix(".py.txt")))
            name, into = "train.py", None
        elif keyword == "file":
            name, into = rest.strip(), None
        elif keyword in ("before", "after"):
            into = getattr(cases[-1], keyword)
        else:
            into = None
            if keyword == "unchanged":
                cases[-1].unchanged = True
            else:
                cases[-1].reported.append((keyword, rest.strip()))
    for case in cases:
        for code in (case.before, case.after):
            for file in code:
                code[file] = code[file].strip("\n") + "\n"
        if case.unchanged:
            case.after = dict(case.before)
    return cases
