"""Finds Python files and notebooks, migrates them, and writes the results."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from tf_lossscale.migrate.codemod import names, notebooks, report, unseen
from tf_lossscale.migrate.codemod.migrate_file import migrate
from tf_lossscale.migrate.codemod.uses import ALONE, Project
from tf_lossscale.writing import whole_file

_NEVER = ("__pycache__", "node_modules", "site-packages")
_NOTEBOOK = ".ipynb"
# An import in a Python file, or in a string of a notebook file.
_IMPORT = re.compile(rb"(?:^|\"|\\n)[ \t]*(?:from|import)\b(?:\\\r?\n|[^\n(;])*(?:\([^()]*\))?", re.MULTILINE)


def find(paths: Iterable[str]) -> list[str]:
    """Return the Python files and notebooks at the given paths. Each file is returned once.

    A file that is named directly is always included. The search in a folder skips hidden files and folders, virtual
    environments, `__pycache__`, `node_modules`, `site-packages` and symbolic links. If a path does not exist, this
    function raises a FileNotFoundError.

    >>> find([__file__]) == [__file__]
    True
    """
    absolute: dict[str, str] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"there is no file or folder at this path: {path}")
        for file in [path] if not os.path.isdir(path) else _below(path):
            absolute.setdefault(os.path.realpath(file), file)
    return list(absolute.values())


def _below(folder: str) -> Iterator[str]:
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
        for entry in found:
            if entry.is_file(follow_symlinks=False) and entry.name.endswith((".py", ".pyi", _NOTEBOOK)):
                yield entry.path
        waiting += reversed([entry.path for entry in found if _is_searched(entry)])


def _is_searched(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False) or entry.name in _NEVER:
        return False
    return not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))


def run(paths: Sequence[str]) -> Iterator[report.FileReport]:
    """Migrate files without writing them, and yield a report for each, with the new content if the file changes."""
    contents = {path: _read(path) for path in paths}
    projects = _projects({path: content for path, content in contents.items() if isinstance(content, bytes)})
    reports = [_migrate(path, content, projects.get(path, ALONE)) for path, content in contents.items()]
    if any(
        finding.reason.startswith(unseen.NO_ORIGIN.partition("{")[0]) for each in reports for finding in each.findings
    ):
        # A file reads an old name in an object. The files that keep a module in an object are reported, too.
        projects = {path: project._replace(reads_modules=True) for path, project in projects.items()}
        reports = [_migrate(path, content, projects.get(path, ALONE)) for path, content in contents.items()]
    yield from reports


def _projects(contents: dict[str, bytes]) -> dict[str, Project]:
    """Map the path of each file to what its migration depends on in other files."""
    imports = {path: b" ".join(_IMPORT.findall(content)) for path, content in contents.items()}
    contents = {path: names.COMMENT.sub(b"", content) for path, content in contents.items()}
    words = {path: set(names.WORD.findall(found.decode("utf-8", "replace"))) for path, found in imports.items()}
    module = {path: os.path.basename(os.path.realpath(path)).partition(".")[0] for path in contents}
    near = {}
    for pattern in (names.WRAPS, names.COMPILES):
        found = {module[path] for path, content in contents.items() if pattern.search(content)}
        near[pattern] = {path for path in contents if not found.isdisjoint({module[path], *words[path]})}
    today = [content for content in contents.values() if not names.KEEPS.search(content)]
    makes_wrappers, has_policies = (any(map(each.search, today)) for each in (names.MAKES, names.HAS_POLICIES))
    projects, known = {}, frozenset(module.values())
    for path in contents:
        importing = {other for other in contents if module[path] in words[other]}
        wraps, compiles = (not each.isdisjoint({path, *importing}) for each in near.values())
        # Other files may read the names of a package, and of a module whose name is in any import.
        requested = frozenset("*" if module[path] == "__init__" or importing else ())
        projects[path] = Project(requested, known, wraps and not compiles, makes_wrappers, has_policies)
    return projects


def _read(path: str) -> bytes | OSError:
    try:
        return _content(path)
    except OSError as error:
        return error


def _content(path: str) -> bytes:
    """Return the content of a file. Refuse a pipe or a device, which may never end and cannot be read twice."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("this is not a regular file. Pass a file or a folder")
    return pathlib.Path(path).read_bytes()


def _migrate(path: str, old: bytes | OSError, project: Project) -> report.FileReport:
    if isinstance(old, OSError):
        return _failed(path, old)
    if not names.is_worth_parsing(old) and not (project.reads_modules and b"keras" in old):
        return report.FileReport(path)
    try:
        new, findings = (notebooks.migrate_notebook if path.endswith(_NOTEBOOK) else migrate)(old, project)
    except Exception as error:
        # An error in one file must not stop the migration of the other files.
        return _failed(path, error)
    return report.FileReport(path, findings) if new == old else report.FileReport(path, findings, old=old, new=new)


def _failed(path: str, error: Exception) -> report.FileReport:
    message = str(getattr(error, "strerror", None) or error)
    if not isinstance(error, (OSError, ValueError)):
        message = f"{type(error).__name__}: {error}. Please report this as a bug"
    return report.FileReport(path, error=message)


def write(reports: Iterable[report.FileReport]) -> Iterator[report.FileReport]:
    """Write the files that `run` migrated, each completely or not at all, and yield the final reports.

    No file has been changed if the user interrupts the program before `run` has yielded all reports.
    """
    for each in list(reports):
        try:
            if each.is_changed:
                _write(each)
        except (OSError, ValueError) as error:
            yield _failed(each.path, error)
        else:
            yield each


def _write(changed: report.FileReport) -> None:
    if _content(changed.path) != changed.old:
        raise ValueError("the file changed after it was read, so it was not rewritten. Run the command again")
    with whole_file(pathlib.Path(changed.path), 0o600) as temporary:
        temporary.write_bytes(changed.new)
