"""The codemod's cases: data, read here. They are its tests, and the table in docs/migration_table.md."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Iterator

from tf_lossscale.migrate.codemod import files, report
from tf_lossscale.migrate.codemod.migrate_file import Outcome

HERE = pathlib.Path(__file__).parent / "cases"


@dataclasses.dataclass
class Case:
    """One case: files before and after, and the notices.

    In a case file, a line `#: case: title` begins a case, `#: file: name` begins one of several files, and `#: notice:
    text` is the beginning or a part of a notice. The other lines are code, in which "-" and "+" mark the lines that the
    codemod removes and adds. A TODO comment is one line, however the codemod wraps it, and may end with " …".
    """

    title: str
    topic: str
    before: dict[str, str] = dataclasses.field(default_factory=dict)
    after: dict[str, str] = dataclasses.field(default_factory=dict)
    notices: list[str] = dataclasses.field(default_factory=list)

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
    assert not one.error
    return Outcome(one.new or old, one.findings)


def load() -> list[Case]:
    """All cases, in the order of the table."""
    return [case for path in sorted(HERE.glob("*.py.txt")) for case in _read(path)]


def _read(path: pathlib.Path) -> Iterator[Case]:
    for text in path.read_text().split("#: case: ")[1:]:
        title, _, body = text.partition("\n")
        case, name = Case(title, path.name.removesuffix(".py.txt")), "train.py"
        for line in body.rstrip("\n").splitlines(keepends=True):
            if line.startswith("#: file: "):
                name = line[len("#: file: ") :].strip()
            elif line.startswith("#: notice: "):
                case.notices.append(line[len("#: notice: ") :].strip())
            else:
                sides = {"-": [case.before], "+": [case.after]}.get(line[0], [case.before, case.after])
                for side in sides:
                    side[name] = side.get(name, "") + (line if len(sides) == 2 else line[1:])
        for side in (case.before, case.after):
            side.update({name: f"{code.rstrip()}\n" for name, code in side.items()})
        yield case


_TODO = re.compile(r"^([ \t]*# TODO\(tf-lossscale\):)(.*(?:\n[ \t]*#   .*)*)", re.MULTILINE)


def joined(source: str) -> str:
    """The source, with each TODO comment on one line."""
    return _TODO.sub(lambda comment: f"{comment[1]} {' '.join(comment[2].replace('#', ' ').split())}", source)
