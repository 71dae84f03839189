"""Many files: finding, ordering, migrating in several processes, and writing them."""

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
from tf_lossscale.migrate.codemod.sources import Sources
from tf_lossscale.writing import whole_file

_NEVER = ("__pycache__", "node_modules", "site-packages")
_NOTEBOOK = ".ipynb"
# Up to this many files are migrated in one process, because starting others takes longer.
_FEW = 8


class Job(NamedTuple):
    """One file to migrate, with the facts about other files that it needs."""

    path: str
    shown: str
    known: project.Known
    requested: tuple[str, ...]
    around: project.Around


def find(paths: Iterable[str]) -> list[str]:
    """Return the Python files and notebooks under the given paths, each once, sorted within a folder.

    Named files are always included. In folders, these are skipped: hidden folders, virtual environments, `__pycache__`,
    `node_modules`, `site-packages`, and symbolic links, whose targets are found at their own places.

    >>> find([__file__]) == [__file__]
    True

    Args:
        paths: files and folders.

    Returns:
        The given paths, and for folders the paths of the files in them.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    found: dict[str, str] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"No such file or folder: {path}")
        for file in [path] if not os.path.isdir(path) else _below(path):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


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
        paths: the files, as from `find`.
        jobs: the number of processes; 0 for one per core.

    Yields:
        A report for each file, with its new content.
    """
    real = {path: os.path.realpath(path) for path in paths}
    sources = Sources(real.values(), _source)
    linked = project.Project(sources, sources.importers)
    worth = linked.with_old_names(sources.with_old_names)
    work = [
        Job(at, path, linked.known(at), tuple(sorted(linked.requested(at))), sources.around(at))
        for path in paths
        if (at := real[path]) in worth
    ]
    done = map_in_processes(_migrate, work, min(jobs or os.cpu_count() or 1, max(1, len(work) // _FEW)))
    for path in paths:
        if real[path] in worth:
            yield next(done) or report.FileReport(
                path, report.ERROR, error="the process that migrates this file ended; the file is left as it was"
            )
        else:
            yield report.FileReport(path, report.UNCHANGED)


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def map_in_processes(function: Callable[[_In], _Out], items: Sequence[_In], jobs: int) -> Iterator[_Out | None]:
    """Map a function over items in processes that may die.

    >>> list(map_in_processes(abs, [-1, 2], jobs=1))
    [1, 2]

    Args:
        function: a function of one argument. It, its arguments and its results are pickled, unless `jobs` is 1.
        items: its arguments.
        jobs: the number of processes; with 1 everything runs in this one.

    Yields:
        The results, in order; None for an item that killed its process.
    """
    if jobs < 2:
        yield from map(function, items)
        return
    done = 0
    while done < len(items):
        for result in _until_one_dies(function, items[done:], jobs):
            done += 1
            yield result
        # One of the next items killed a process, so the next item gets its own process.
        if done < len(items):
            yield next(_until_one_dies(function, items[done : done + 1], 1), None)
            done += 1


def _until_one_dies(function: Callable[[_In], _Out], items: Sequence[_In], jobs: int) -> Iterator[_Out]:
    """Map a function over items in processes, and stop when one of the processes dies."""
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
    """Return a file's source, or a notebook's code cells; a zero byte if its job has to report an error."""
    try:
        content = _read(path)
    except OSError:
        return b"\0"
    if not path.endswith(_NOTEBOOK):
        return content
    try:
        return notebooks.Notebook(content).source.encode()
    except ValueError:
        return b"\0" if names.is_worth_parsing(content) else b""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _migrate(job: Job) -> report.FileReport:
    try:
        old = _read(job.path)
        if job.path.endswith(_NOTEBOOK):
            new, findings = notebooks.rewritten(
                old, lambda source, words: migrate(source, job.known, {*job.requested, *words}, job.around)[:2]
            )
        else:
            new, findings = migrate(old, job.known, job.requested, job.around)[:2]
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

    `run` ends before the first write, so a user who stops the command has no changed file, or has seen all notices.

    Args:
        reports: the reports of `run`.

    Yields:
        A report for each file: the same, or the reason why it could not be written.
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
    if _read(path) != changed.old:
        raise ValueError("changed after it was read, and is left as it is. Run the command again")
    write_atomically(path, changed.new)


def write_atomically(path: str, content: bytes) -> None:
    """Replace a file's content atomically, keeping its permissions.

    Args:
        path: the file.
        content: its new bytes.

    Raises:
        OSError: the file cannot be written, and is unchanged.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(f"is not writable: {path}")
    with whole_file(pathlib.Path(path), 0o600) as temporary:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
        _keep_owner(path, temporary)


def _keep_owner(path: str, temporary: pathlib.Path) -> None:
    """Set the new file's owner to the old file's, if the system has owners and permits it."""
    before, now = os.stat(path), os.stat(temporary)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(OSError):
            os.chown(temporary, before.st_uid, before.st_gid)
