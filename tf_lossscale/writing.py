"""Writes files completely or not at all. Every failure raises an OSError."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

# Matches the operation names in TensorFlow's error messages. The names are removed, because they do not help users.
_NODES = re.compile(r"\{\{.*?\}\} | \[Op:\w+\]")


@contextlib.contextmanager
def whole_file(path: pathlib.Path, mode: int | None = None) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary file that replaces the file at `path` when the block ends without an error.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.json"
    >>> with whole_file(path) as temporary:
    ...     _ = temporary.write_text("{}")
    >>> os.listdir(path.parent)
    ['state.json']

    Args:
        path: the file to write.
        mode: the permissions with which the temporary file is created, or None if the caller creates the file.

    Yields:
        The path of the temporary file, which has the same suffix as `path`. After an error, the temporary file is
        deleted.

    Raises:
        OSError: the file cannot be written. The old file is then unchanged.
    """
    temporary = path.with_name(f".tf-lossscale-{path.stem}.tmp{path.suffix}")
    try:
        if mode is not None:
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


@contextlib.contextmanager
def checkpoint_errors_are_os_errors() -> Iterator[None]:
    """Convert TensorFlow's file errors to OSError, which the `tf-lossscale` commands report.

    >>> import tensorflow as tf
    >>> try:
    ...     with checkpoint_errors_are_os_errors():
    ...         raise tf.errors.ResourceExhaustedError(None, None, "ckpt: No space left on device [Op:SaveV2]")
    ... except OSError as error:
    ...     print(error)
    ckpt: No space left on device

    Raises:
        OSError: TensorFlow could not read or write a file. The message is TensorFlow's.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(_NODES.sub("", error.message)) from error


def name_latest_checkpoint(folder: pathlib.Path, name: str) -> None:
    """Write the `checkpoint` file, in which `tf.train.latest_checkpoint` finds the name of the latest checkpoint.

    >>> import tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> name_latest_checkpoint(folder, "ckpt-1")
    >>> print((folder / "checkpoint").read_text().splitlines()[0])
    model_checkpoint_path: "ckpt-1"

    Args:
        folder: the checkpoint's folder.
        name: the checkpoint's prefix in that folder.

    Raises:
        OSError: the file cannot be written. The old file is then unchanged.
    """
    with whole_file(folder / "checkpoint") as temporary:
        temporary.write_text(f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n')
