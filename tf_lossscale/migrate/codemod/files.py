"""Many files: which ones, in which order, on how many cores, and how they are written."""

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
_FEW = 8  # starting a process costs more than this many files


class Job(NamedTuple):
    """One file to be migrated, with what other files have to do with it."""

    path: str
    shown: str
    known: project.Known
    requested: tuple[str, ...]
    around: project.Around


def find(paths: Iterable[str]) -> list[str]:
    """Return the Python files and notebooks under the given paths, each once, sorted within a folder.

    A file that is named is always taken. In folders are left out: hidden ones, virtual environments, `__pycache__`,
    `node_modules`, `site-packages`, and symbolic links (what they lead to is found where it is).

    >>> find([__file__]) == [__file__]
    True

    Args:
        paths: files and folders.

    Returns:
        Paths as they were given, joined with what is below.

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
    """Migrate files, one report after the other, in the order of the paths; change none.

    Args:
        paths: the files, as from `find`.
        jobs: the number of processes; 0 for one for each core.

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
        function: of one argument; it and what it takes and returns are pickled, unless `jobs` is 1.
        items: its arguments.
        jobs: the number of processes; with 1 everything runs in this one.

    Yields:
        The results, in order; None for an item that ended the process it was in.
    """
    if jobs < 2:
        yield from map(function, items)
        return
    done = 0
    while done < len(items):
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as executor:
            try:
                for future in [executor.submit(function, item) for item in items[done:]]:
                    result = future.result()
                    done += 1
                    yield result
            except concurrent.futures.BrokenExecutor:
                pass
            except BaseException:
                executor.shutdown(cancel_futures=True)
                raise
        if done < len(items):  # one of the next items ended a process: alone it can end its own only
            yield _alone(function, items[done])
            done += 1


def _alone(function: Callable[[_In], _Out], item: _In) -> _Out | None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(function, item).result()
        except concurrent.futures.BrokenExecutor:
            return None


def _source(path: str) -> bytes:
    """A file's source, of a notebook that of its code cells; a zero byte if its job has to report what is wrong."""
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
    except BaseException as error:  # one odd file must not stop the others; a panic of LibCST's parser is no Exception
        return report.FileReport(job.shown, report.ERROR, error=f"{type(error).__name__}: {error}")


def _failed(path: str, error: OSError | ValueError) -> report.FileReport:
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return report.FileReport(path, report.ERROR, error=message)


def write(reports: Iterable[report.FileReport]) -> Iterator[report.FileReport]:
    """Write what `run` made of the files, each as a whole or not at all.

    `run` ends before the first write. A user who stops the command has either no changed file or all notices.

    Args:
        reports: those of `run`.

    Yields:
        A report for each file: the same, or what stood in the way.
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
    """Replace a file's content at once, keeping its permissions: a reader sees the old or the new, never a part.

    Args:
        path: the file.
        content: its new bytes.

    Raises:
        OSError: it cannot be written; then it is as it was.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(f"is not writable: {path}")
    with whole_file(pathlib.Path(path), 0o600) as temporary:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
        _keep_owner(path, temporary)


def _keep_owner(path: str, temporary: pathlib.Path) -> None:
    """Give the new file the old one's owner, where the system knows owners and lets us."""
    before, now = os.stat(path), os.stat(temporary)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(OSError):
            os.chown(temporary, before.st_uid, before.st_gid)
