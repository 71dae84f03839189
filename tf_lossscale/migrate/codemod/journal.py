"""The journal of `migrate --write`: the old content of the files that a run changes, kept until it has reported on all.

A run that finds the journal of one that was stopped takes these files as they were before: it finds the same uses in
them, and makes the same files of them. What stands in a journal is never written to a file.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence

from tf_lossscale import __version__
from tf_lossscale.writing import whole_file

NAME = ".tf-lossscale-migrate.json"


class Journal:
    """The journal in the folder that the paths of a run have in common.

    >>> import tempfile
    >>> folder = os.path.realpath(tempfile.mkdtemp())
    >>> file = os.path.join(folder, "train.py")
    >>> _ = pathlib.Path(file).write_bytes(b"new")
    >>> Journal([folder]).save({file: b"old"})
    >>> again = Journal([folder])
    >>> again.load()[file]
    b'old'
    >>> again.discard([file])
    >>> os.listdir(folder)
    ['train.py']

    Args:
        paths: files and folders, as the command was given them.
    """

    def __init__(self, paths: Sequence[str]):
        real = [os.path.realpath(path) for path in paths]
        folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in real]
        #: The file; it need not exist.
        self.path = pathlib.Path(os.path.commonpath(folders), NAME)
        self._old: dict[str, bytes] = {}

    def load(self) -> Mapping[str, bytes]:
        """Return the old content of each file of the journal, by real path; nothing if there is no journal.

        Raises:
            ValueError: it is damaged, or of another version.
            OSError: it cannot be read.
        """
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_bytes())
            version, files = content["tf_lossscale"], content["files"]
            old = {os.path.join(self.path.parent, name): text.encode("latin-1") for name, text in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(self._refused("is damaged")) from error
        if version != __version__:
            raise ValueError(self._refused(f"was written by tf-lossscale {version}, and this is {__version__}"))
        self._old = {path: text for path, text in old.items() if os.path.exists(path)}
        return dict(self._old)

    def _refused(self, why: str) -> str:
        return (
            f"The journal of a run that was stopped {why}: {self.path}. Restore the files that the run changed, or "
            "keep them as they are and lose what it reported of them. Then delete it, and run the command again"
        )

    def save(self, old: Mapping[str, bytes]) -> None:
        """Add files to the journal.

        Args:
            old: real path -> content of the files that will be changed.

        Raises:
            OSError: it cannot be written.
        """
        self._old.update(old)
        if not self._old:
            return
        folder = self.path.parent
        files = {os.path.relpath(path, folder): text.decode("latin-1") for path, text in self._old.items()}
        with whole_file(self.path, 0o600) as temporary:
            temporary.write_text(json.dumps({"tf_lossscale": __version__, "files": files}), "ascii")

    def discard(self, paths: Collection[str]) -> None:
        """Take files out of the journal, and delete it if it holds no other.

        Args:
            paths: the real paths of files on which the run has reported.

        Raises:
            OSError: it cannot be written or deleted.
        """
        done = set(paths)
        self._old = {path: text for path, text in self._old.items() if path not in done}
        if self._old:
            self.save({})
        elif self.path.exists():
            self.path.unlink()
