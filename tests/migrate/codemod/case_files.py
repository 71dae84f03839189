"""The codemod's cases: data, read here. They are its tests, and the table in docs/migration.md."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from tf_lossscale.migrate.codemod import project
from tf_lossscale.migrate.codemod.migrate_file import Outcome, migrate

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
        return migrate_files(self.before)


def others(sources: dict[str, str]) -> dict[str, project.Around]:
    """What each file has to know of the other ones."""
    linked = project.Project([f"/{name}" for name in sources], lambda path: sources[path[1:]].encode())
    return {name: linked.around(f"/{name}") for name in sources}


def migrate_files(sources: dict[str, str]) -> dict[str, Outcome]:
    """Migrates files that know each other; the same files only once."""
    return _migrated(tuple(sources.items()))


@functools.cache
def _migrated(sources: tuple[tuple[str, str], ...]) -> dict[str, Outcome]:
    arguments = others(dict(sources))
    return {name: migrate(source.encode(), arguments[name]) for name, source in sources}


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
        for files in (case.before, case.after):
            for file in files:
                files[file] = files[file].strip("\n") + "\n"
        if case.unchanged:
            case.after = dict(case.before)
    return cases
