"""Asks Git which files could not be restored after a rewrite."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable


def without_committed_version(paths: Iterable[str]) -> list[str]:
    """Return the files whose current content is not committed to a Git repository.

    >>> import tempfile
    >>> folder = os.path.realpath(tempfile.mkdtemp())
    >>> without_committed_version([os.path.join(folder, "train.py")]) == [os.path.join(folder, "train.py")]
    True

    Args:
        paths: the files to check.

    Returns:
        The paths of the files whose current content Git cannot restore, grouped by folder.
    """
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(os.path.dirname(os.path.realpath(path)), []).append(path)
    return [path for folder, inside in by_folder.items() for path in _lost(folder, inside)]


def _lost(folder: str, paths: list[str]) -> list[str]:
    command = ["git", "-C", folder, "status", "--porcelain", "--ignored", "-z", "--"]
    names = [os.path.basename(os.path.realpath(path)) for path in paths]
    try:
        asked = subprocess.run([*command, *names], capture_output=True, check=False)
    except OSError:
        # Git is not installed, so it can restore none of the files.
        return paths
    if asked.returncode != 0:
        return paths
    changed = {os.path.basename(os.fsdecode(entry[3:])) for entry in asked.stdout.split(b"\0")}
    return [path for path, name in zip(paths, names, strict=True) if name in changed]
