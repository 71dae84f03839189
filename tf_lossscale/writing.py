"""Writes files completely or not at all, makes text from files printable, and aligns the columns of tables."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

# A terminal acts on these characters, except that a line may end with \r\n.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def printable(text: str) -> str:
    r"""Replace line breaks, and all other characters that a terminal does not simply show, with escape sequences.

    >>> print(printable("kernel\n\x1b[2J"))
    kernel\n\x1b[2J
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Replace control characters like `printable`, but keep tabs, form feeds and line breaks."""
    return _CONTROL.sub(lambda match: printable(match[0]), text)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a line for each row of a table. The first `left` columns are aligned on the left, the others on the right.

    >>> aligned([("name", "steps"), ("bias", "7")])
    ['name  steps', 'bias      7']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]).rstrip()
        for row in rows
    ]


@contextlib.contextmanager
def whole_file(path: pathlib.Path, mode: int) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary file that replaces the file at `path` when the block ends without an error.

    The new file has the owner, group, permissions, ACL and extended attributes of the old file. If one of them cannot
    be kept, this function raises an OSError. After any error, the temporary file is deleted and the old file is
    unchanged. If there is no old file, the new file gets the permissions in `mode`.
    """
    path = pathlib.Path(os.path.realpath(path))
    before = _properties(path) if path.exists() else None
    if before is not None:
        _require_replaceable(path)
    # Every run has its own temporary file, so that no run can replace a file with what another one has half written.
    handle, name = tempfile.mkstemp(prefix=".tf-lossscale-", dir=path.parent)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            if before is None:
                temporary.chmod(mode)
            else:
                _keep(before, temporary)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _require_replaceable(path: pathlib.Path) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("the file is not a regular file, so it cannot be replaced")
    if not os.access(path, os.W_OK):
        raise PermissionError("the file is not writable")
    if status.st_nlink > 1:
        raise OSError(
            f"the file has {status.st_nlink} hard links, and only one of them would get the new content. Replace the "
            "others with copies or symbolic links"
        )


def _properties(path: pathlib.Path) -> dict[str, Any]:
    """Return everything about a file that its replacement must keep, by the names that error messages use."""
    status, names = path.stat(), []
    # Linux stores ACLs as extended attributes. Other systems and some file systems do not have them.
    with contextlib.suppress(AttributeError, OSError):
        names = os.listxattr(path)
    attributes = {name: os.getxattr(path, name) for name in names}
    owner = {"owner": status.st_uid, "group": status.st_gid}
    return {**owner, "permissions": stat.S_IMODE(status.st_mode), **attributes}


def _keep(before: dict[str, Any], temporary: pathlib.Path) -> None:
    """Give a file the properties of another one. Raise an error that names the properties for which this fails."""
    now = _properties(temporary)
    if (before["owner"], before["group"]) != (now["owner"], now["group"]):
        with contextlib.suppress(OSError):
            os.chown(temporary, before["owner"], before["group"])
    # A file in a folder with a default ACL starts with an ACL, which the old file may not have.
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name) and isinstance(before.get(name, b""), bytes):
            with contextlib.suppress(OSError):
                os.setxattr(temporary, name, before[name]) if name in before else os.removexattr(temporary, name)
    # A change of the owner clears setuid and setgid, so the permissions are set last.
    with contextlib.suppress(OSError):
        temporary.chmod(before["permissions"])
    now = _properties(temporary)
    lost = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if lost:
        raise OSError(
            f"the file was not replaced, because its {' and '.join(lost)} cannot be kept. Run the command as the owner "
            "of the file, or edit the file by hand"
        )
