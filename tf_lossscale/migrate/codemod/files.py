"""Finds Python files and notebooks, migrates them in several processes, and writes the results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tf_lossscale.migrate.codemod import names, notebooks, project, report
from tf_lossscale.migrate.codemod.migrate_file import migrate
from tf_lossscale.writing import whole_file

_NEVER = ("__pycache__", "node_modules", "site-packages")
_NOTEBOOK = ".ipynb"
# Up to this many files are migrated in one process, because starting more processes would take longer.
_FEW = 8


class Job(NamedTuple):
    """A file to migrate, with the facts about other files on which its migration depends."""

    path: str
    shown: str
    around: project.Around


def find(paths: Iterable[str]) -> list[str]:
    """Return the Python files and notebooks at the given paths. Each file is returned once.

    A file that is named directly is always included. The search in a folder skips hidden files and folders, virtual
    environments, `__pycache__`, `node_modules`, `site-packages` and symbolic links.

    >>> find([__file__]) == [__file__]
    True

    Args:
        paths: files and folders.

    Returns:
        The paths of the given files and of the files inside the given folders.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    absolute: dict[str, str] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"there is no file or folder at this path: {path}")
        for file in [path] if not os.path.isdir(path) else _below(path):
            absolute.setdefault(os.path.realpath(file), file)
    return list(absolute.values())


def _below(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_source(root, name))
        for name in sorted(files):
            path = os.path.join(root, name)
            if name.endswith((".py", ".pyi", _NOTEBOOK)) and not name.startswith(".") and not os.path.islink(path):
                yield path


def _is_source(root: str, name: str) -> bool:
    path = os.path.join(root, name)
    if name.startswith(".") or name in _NEVER or os.path.islink(path):
        return False
    return not os.path.exists(os.path.join(path, "pyvenv.cfg"))


def run(paths: Sequence[str], jobs: int = 0) -> Iterator[report.FileReport]:
    """Migrate files without writing them, and yield reports in the order of the paths.

    Args:
        paths: the paths of the files, as returned by `find`.
        jobs: the number of processes, or 0 for one process per core.

    Yields:
        A report for each file, with the new content if the file changes.
    """
    real = {path: os.path.realpath(path) for path in paths}
    files = project.Project(real.values(), _source)
    worth = files.worth_migrating
    work = [Job(real[path], path, files.around(real[path])) for path in paths if real[path] in worth]
    reports = map_in_processes(_migrate, work, min(jobs or os.cpu_count() or 1, max(1, len(work) // _FEW)))
    for path in paths:
        if real[path] in worth:
            yield next(reports) or report.FileReport(
                path, report.ERROR, error="the process that migrates this file ended; the file is left as it was"
            )
        else:
            yield report.FileReport(path, report.UNCHANGED)


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def map_in_processes(function: Callable[[_In], _Out], items: Sequence[_In], jobs: int) -> Iterator[_Out | None]:
    """Map a function over items in several processes, and continue if an item kills its process.

    >>> list(map_in_processes(abs, [-1, 2], jobs=1))
    [1, 2]

    Args:
        function: a function of one argument. Unless `jobs` is 1, the function, its arguments and its results must
            be picklable.
        items: the arguments of the calls.
        jobs: the number of processes. If it is 1, the function runs in the current process.

    Yields:
        The results, in the order of the items. An item that killed its process has the result None.
    """
    if jobs < 2:
        yield from map(function, items)
        return
    finished = 0
    while finished < len(items):
        for result in _until_one_dies(function, items[finished:], jobs):
            finished += 1
            yield result
        # If items remain, one of them killed its process, but it is not known which one. The first remaining item may
        # be the one, so it now runs alone.
        if finished < len(items):
            yield next(_until_one_dies(function, items[finished : finished + 1], 1), None)
            finished += 1


def _until_one_dies(function: Callable[[_In], _Out], items: Sequence[_In], jobs: int) -> Iterator[_Out]:
    """Map a function over items in several processes, and stop when one of the processes dies."""
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as executor:
        try:
            for future in [executor.submit(function, item) for item in items]:
                yield future.result()
        except concurrent.futures.BrokenExecutor:
            pass
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _source(path: str) -> bytes:
    """Return the source of a file, or the code cells of a notebook as one module.

    If the file cannot be read, return a null byte, so that the text search selects the file for migration. The
    migration then reports the error.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError:
        return b"\0"
    if not path.endswith(_NOTEBOOK):
        return content
    try:
        return notebooks.Notebook(content).source.encode()
    except ValueError:
        return b"\0" if names.is_worth_parsing(content) else b""


def _migrate(job: Job) -> report.FileReport:
    try:
        old = pathlib.Path(job.path).read_bytes()
        if job.path.endswith(_NOTEBOOK):
            new, findings = notebooks.rewritten(old, job.around)
        else:
            new, findings = migrate(old, job.around)
        if new == old:
            return report.FileReport(job.shown, report.UNCHANGED, findings)
        return report.FileReport(job.shown, report.CHANGED, findings, old=old, new=new)
    except (OSError, ValueError) as error:
        return _failed(job.shown, error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic in LibCST's parser is a BaseException, not an Exception.
        return report.FileReport(job.shown, report.ERROR, error=f"{type(error).__name__}: {error}")


def _failed(path: str, error: OSError | ValueError) -> report.FileReport:
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return report.FileReport(path, report.ERROR, error=message)


def write(reports: Iterable[report.FileReport]) -> Iterator[report.FileReport]:
    """Write the files that `run` migrated, each completely or not at all.

    Call this function only after `run` has yielded all reports. If the user interrupts the program before that, no file
    has been changed.

    Args:
        reports: the reports of `run`.

    Yields:
        A report for each file: the given report, or an error report if the file could not be written.
    """
    for each in list(reports):
        try:
            if each.status == report.CHANGED:
                _write(each)
        except (OSError, ValueError) as error:
            yield _failed(each.path, error)
        else:
            yield each


def _write(changed: report.FileReport) -> None:
    path = os.path.realpath(changed.path)
    if pathlib.Path(path).read_bytes() != changed.old:
        raise ValueError("the file changed after it was read, so it was not rewritten. Run the command again")
    write_atomically(path, changed.new)


def write_atomically(path: str, content: bytes) -> None:
    """Replace the content of a file atomically, and keep its permissions.

    Args:
        path: the file.
        content: the new content of the file.

    Raises:
        OSError: the file cannot be written. It stays unchanged.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(f"the file is not writable: {path}")
    with whole_file(pathlib.Path(path), 0o600) as temporary:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
        _keep_owner(path, temporary)


def _keep_owner(path: str, temporary: pathlib.Path) -> None:
    """Give the new file the owner and group of the old file, if the operating system permits it."""
    before, now = os.stat(path), os.stat(temporary)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(OSError):
            os.chown(temporary, before.st_uid, before.st_gid)
