"""Which files are taken, and how they are written."""

import contextlib
import json
import os
import struct
import sys
import traceback

import pytest

from tf_lossscale.migrate.codemod import files, migrate_file
from tf_lossscale.writing import whole_file

OLD = b"import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(opt)\n"
NEW = b"import tensorflow as tf\nimport tf_lossscale\nopt = tf_lossscale.LossScaleOptimizer(opt)\n"


def put(root, content, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def run(folder):
    return files.run(files.find([str(folder)]))


def write(folder):
    return list(files.write(run(folder)))


def test_folders_are_searched_but_not_hidden_ones_environments_and_links(tmp_path):
    wanted = ["a.py", "package/b.py", "package/deep/c.pyi"]
    put(tmp_path, OLD, *wanted)
    put(tmp_path, OLD, ".git/x.py", "package/.hidden/x.py", "__pycache__/x.py", "lib/site-packages/x.py", ".x.py")
    put(tmp_path, OLD, "data.txt", "env/lib/x.py", "env/pyvenv.cfg")
    (tmp_path / "linked").symlink_to(tmp_path / "package")
    (tmp_path / "linked.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [os.path.relpath(path, tmp_path) for path in files.find([str(tmp_path)])] == wanted


def test_a_file_that_is_named_is_taken_whatever_it_is_called_and_only_once(tmp_path):
    put(tmp_path, OLD, "script", "a.py")
    (tmp_path / "linked.py").symlink_to(tmp_path / "a.py")
    named = [str(tmp_path / name) for name in ("script", "a.py", "linked.py", "")]
    assert files.find(named) == named[:2]


def test_a_run_changes_no_file_and_shows_the_difference(tmp_path):
    put(tmp_path, OLD.rstrip(), "a.py")
    (one,) = run(tmp_path)
    assert one.is_changed
    assert "+opt = tf_lossscale.LossScaleOptimizer(opt)" in one.diff
    assert one.diff.count("\\ No newline at end of file\n") == 2
    assert (tmp_path / "a.py").read_bytes() == OLD.rstrip()


OWN, FOLDERS = ("system.posix_acl_access", "user.note"), "system.posix_acl_default"
# Another user may read and write, the file's group may not.
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *each)
    for each in ((1, 6, 2**32 - 1), (2, 6, 4002), (4, 0, 2**32 - 1), (16, 6, 2**32 - 1), (32, 0, 2**32 - 1))
)


def set_attributes(path, *names):
    """Set extended attributes. Return whether the file system has them."""
    with contextlib.suppress(OSError, AttributeError):
        for name in names:
            os.setxattr(path, name, b"mine" if name.startswith("user") else ACL)
        return True
    return False


def properties(path):
    status, names = path.stat(), os.listxattr(path) if hasattr(os, "listxattr") else ()
    return status.st_uid, status.st_gid, oct(status.st_mode), {name: os.getxattr(path, name) for name in names}


@pytest.mark.parametrize("of_file", [True, False], ids=["ACL of the file", "default ACL of the folder"])
def test_write_keeps_everything_but_the_content_and_leaves_nothing_else_behind(tmp_path, of_file):
    path = tmp_path / "a.py"
    put(tmp_path, OLD, "a.py")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # only root writes the files of others
        os.chown(path, 12345, 54321)
    path.chmod(0o2751)
    has_attributes = set_attributes(path, *OWN) if of_file else set_attributes(tmp_path, FOLDERS)
    before = properties(path)
    (one,) = write(tmp_path)
    assert one.is_changed
    assert path.read_bytes() == NEW
    assert properties(path) == before
    assert not of_file or not has_attributes or before[3].keys() == {*OWN}
    assert os.listdir(tmp_path) == ["a.py"]


def test_two_runs_at_once_each_write_a_whole_file(tmp_path):
    put(tmp_path, OLD, "a.py")
    with whole_file(tmp_path / "a.py", 0o600) as first:
        first.write_bytes(b"first")
        with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "a.py", 0o600) as second:
            second.write_bytes(b"sec")
            raise KeyboardInterrupt
    assert (tmp_path / "a.py").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a.py"]


def into_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("make", [lambda path: os.link(path, f"{path}.other"), into_a_pipe], ids=["hard link", "pipe"])
def test_a_file_that_cannot_be_replaced_is_left_and_reported(tmp_path, make):
    put(tmp_path, OLD, "a.py")
    make(tmp_path / "a.py")
    before = (tmp_path / "a.py").stat()
    (one,) = write(tmp_path / "a.py")
    assert "hard links, and only one" in one.error or "not a regular file" in one.error
    assert (tmp_path / "a.py").stat() == before


def test_folders_may_be_nested_deeper_than_the_recursion_limit(tmp_path, monkeypatch):
    folder = tmp_path.joinpath(*["d"] * 300)
    put(folder, OLD, "a.py")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(traceback.extract_stack()) + 100)
    try:
        assert files.find([str(tmp_path)]) == [str(folder / "a.py")]
    finally:
        sys.setrecursionlimit(limit)


def test_a_search_for_imports_takes_linear_time(tmp_path):
    put(tmp_path, b"import a (\n" * 200_000, "a.py")
    assert len(list(run(tmp_path))) == 1


def test_a_named_link_stays_a_link_and_its_file_is_changed(tmp_path):
    put(tmp_path, OLD, "real/a.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "real/a.py")
    write(tmp_path / "link.py")
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real/a.py").read_bytes() == NEW


def no_space(*paths, **options):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("name", "instead", "error"),
    [
        ("replace", no_space, "No space left"),
        ("access", lambda path, mode: False, "not writable"),
        ("chmod", no_space, "because its permissions cannot be kept"),
        ("chown", no_space, "because its group and owner cannot be kept"),
        ("setxattr", no_space, "because its user.note cannot be kept"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_and_as_it_was(tmp_path, monkeypatch, name, instead, error):
    put(tmp_path, OLD, "a.py")
    if name == "chown" and os.geteuid():
        pytest.skip("only root writes the files of others")
    if name == "chown":
        os.chown(tmp_path / "a.py", 12345, 54321)
    if name == "setxattr" and not set_attributes(tmp_path / "a.py", "user.note"):
        pytest.skip("the file system has no extended attributes")
    monkeypatch.setattr(files.os, name, instead)
    (one,) = write(tmp_path)
    assert error in one.error
    assert (tmp_path / "a.py").read_bytes() == OLD
    assert os.listdir(tmp_path) == ["a.py"]


def test_odd_files_and_a_bug_in_the_codemod_are_reported_and_do_not_stop_the_others(tmp_path, monkeypatch):
    def migrate(source, *others):
        if b"odd" in source:
            raise KeyError("a node")
        return migrate_file.migrate(source, *others)

    monkeypatch.setattr(files, "migrate", migrate)
    odd = {
        "b.py": (b"print 'LossScaleOptimizer'\n", "line 1"),
        "c.py": (OLD.decode().encode("utf-16"), "does not parse"),
        "d.py": (OLD + b"odd = 1\n", "KeyError: 'a node'"),
    }
    for name, (content, _) in odd.items():
        put(tmp_path, content, name)
    put(tmp_path, OLD, "a.py", "z.py")
    (tmp_path / "e.py").symlink_to(tmp_path / "nowhere.py")
    paths = [str(tmp_path / f"{name}.py") for name in "abcdez"]
    reports = list(files.write(files.run(paths)))
    assert [one.path for one in reports] == paths
    assert [one.is_changed for one in reports] == [True, False, False, False, False, True]
    for one, message in zip(reports[1:], [*(message for _, message in odd.values()), "No such file"]):
        assert message in one.error
    assert {name: (tmp_path / name).read_bytes() for name in odd} == {name: odd[name][0] for name in odd}


def test_a_result_that_does_not_parse_is_an_error(monkeypatch):
    monkeypatch.setattr(migrate_file.Edits, "finish", lambda self: ("(", []))
    with pytest.raises(ValueError, match="the file was not changed, because the result would not parse"):
        migrate_file.migrate(OLD)


PROVIDER = b"from tensorflow.keras.mixed_precision import experimental as mp\nopt = mp.LossScaleOptimizer(opt, 8)\n"
KEPT = b"from tf_lossscale.legacy import experimental as mp\nopt = mp.LossScaleOptimizer(opt, 8)\n"


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        ("from provider import (\n    other,\n    mp as again,\n)", True),
        ("import os, a.provider as p", True),
        ("    from a.provider import \\\n        mp", True),
        ("from . import provider", True),
        ("from elsewhere import mp", False),
        ("# import nothing", False),
    ],
)
def test_a_module_that_another_file_imports_keeps_the_old_names(tmp_path, line, is_kept):
    put(tmp_path, PROVIDER, "provider.py")
    put(tmp_path, f"if True:\n    pass\n{line}\nmp.set_policy(p)\n".encode(), "deep/user.py")
    write(tmp_path)
    assert ((tmp_path / "provider.py").read_bytes() == KEPT) == is_kept


@pytest.mark.parametrize("indent", [None, 1])
def test_a_module_that_a_notebook_imports_keeps_the_old_names(tmp_path, indent):
    cell = {"cell_type": "code", "source": ["import os\n", "from provider import mp"]}
    put(tmp_path, PROVIDER, "provider.py")
    put(tmp_path, json.dumps({"cells": [cell]}, indent=indent).encode(), "user.ipynb")
    write(tmp_path)
    assert (tmp_path / "provider.py").read_bytes() == KEPT


def test_a_package_keeps_the_old_names(tmp_path):
    put(tmp_path, PROVIDER, "provider/__init__.py")
    write(tmp_path)
    assert (tmp_path / "provider/__init__.py").read_bytes() == KEPT


def test_a_file_that_somebody_changes_after_it_was_read_is_left(tmp_path):
    put(tmp_path, OLD, "a.py", "b.py")
    reports = list(run(tmp_path))
    put(tmp_path, b"mine = 1\n", "a.py")
    a, b = files.write(reports)
    assert b.is_changed
    assert "changed after it was read" in a.error
    assert (tmp_path / "a.py").read_bytes() == b"mine = 1\n"


def test_nothing_is_written_before_the_last_file_is_worked_out(tmp_path):
    put(tmp_path, OLD, "a.py", "b.py")

    def stopped():
        yield from run(tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(files.write(stopped()))
    assert (tmp_path / "a.py").read_bytes() == (tmp_path / "b.py").read_bytes() == OLD
