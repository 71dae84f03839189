"""Writes files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def whole_file(path: pathlib.Path, mode: int) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary file that replaces the file at `path` when the block ends without an error.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.json"
    >>> with whole_file(path, 0o600) as temporary:
    ...     _ = temporary.write_text("{}")
    >>> os.listdir(path.parent)
    ['state.json']

    Args:
        path: the file to write.
        mode: the permissions with which the temporary file is created.

    Yields:
        The path of the temporary file, which has the same suffix as `path`. After an error, the temporary file is
        deleted.

    Raises:
        OSError: the file cannot be written. The old file is then unchanged.
    """
    temporary = path.with_name(f".tf-lossscale-{path.stem}.tmp{path.suffix}")
    try:
        # A killed process may have left its temporary file behind.
        temporary.unlink(missing_ok=True)
        temporary.touch(mode, exist_ok=False)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None or os.fspath(error.filename) != str(temporary):
            raise
        # The message should name the file that the user passed, not the temporary file.
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
