"""Writes files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def whole_file(path: pathlib.Path, mode: int) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary file that replaces the file at `path` when the block ends without an error.

    After an error, the temporary file is deleted, and the old file is unchanged.
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
