"""Which files are taken, and how they are written."""

import os
import pathlib
import stat

import pytest

from tf_lossscale.migrate.codemod import files, migrate_file, report

OLD = b"import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(opt)\n"
NEW = b"import tensorflow as tf\nimport tf_lossscale\nopt = tf_lossscale.LossScaleOptimizer(opt)\n"


def write(root, names, content=OLD):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_folders_are_searched_but_not_hidden_ones_environments_and_links(tmp_path):
    wanted = ["a.py", "package/b.py", "package/deep/c.pyi"]
    write(tmp_path, wanted)
    write(tmp_path, [".git/x.py", "package/.hidden/x.py", "__pycache__/x.py", "lib/site-packages/x.py", ".x.py"])
    write(tmp_path, ["data.txt", "env/lib/x.py"])
    write(tmp_path, ["env/pyvenv.cfg"], b"")
    (tmp_path / "linked").symlink_to(tmp_path / "package")
    (tmp_path / "linked.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [os.path.relpath(path, tmp_path) for path in files.find([str(tmp_path)])] == wanted


def test_a_file_that_is_named_is_taken_whatever_it_is_called_and_only_once(tmp_path):
    write(tmp_path, ["script", "a.py"])
    named = [str(tmp_path / "script"), str(tmp_path / "a.py"), str(tmp_path)]
    assert files.find(named) == named[:2]


def test_a_missing_path_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        files.find([str(tmp_path / "nowhere")])


def test_without_write_no_file_changes(tmp_path):
    write(tmp_path, ["a.py"])
    (one,) = files.run([str(tmp_path / "a.py")])
    assert one.status == report.CHANGED
    assert "+opt = tf_lossscale.LossScaleOptimizer(opt)" in one.diff
    assert (tmp_path / "a.py").read_bytes() == OLD


def test_write_keeps_permissions_and_leaves_nothing_else_behind(tmp_path):
    write(tmp_path, ["a.py"])
    (tmp_path / "a.py").chmod(0o751)
    (one,) = files.write(files.run([str(tmp_path / "a.py")]))
    assert one.status == report.CHANGED
    assert (tmp_path / "a.py").read_bytes() == NEW
    assert stat.S_IMODE((tmp_path / "a.py").stat().st_mode) == 0o751
    assert os.listdir(tmp_path) == ["a.py"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root writes others' files")
def test_write_keeps_the_owner(tmp_path):
    write(tmp_path, ["a.py"])
    os.chown(tmp_path / "a.py", 12345, 54321)
    (one,) = files.write(files.run([str(tmp_path / "a.py")]))
    after = (tmp_path / "a.py").stat()
    assert (one.status, after.st_uid, after.st_gid) == (report.CHANGED, 12345, 54321)


def test_a_named_link_stays_a_link_and_its_file_is_changed(tmp_path):
    write(tmp_path, ["real/a.py"])
    (tmp_path / "link.py").symlink_to(tmp_path / "real/a.py")
    list(files.write(files.run([str(tmp_path / "link.py")])))
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real/a.py").read_bytes() == NEW


def test_when_writing_fails_the_file_is_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, ["a.py"])

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    (one,) = files.write(files.run([str(tmp_path / "a.py")]))
    assert (one.status, one.error) == (report.ERROR, "No space left on device")
    assert (tmp_path / "a.py").read_bytes() == OLD
    assert os.listdir(tmp_path) == ["a.py"]


def test_a_file_that_may_not_be_written_is_reported_and_left(tmp_path, monkeypatch):
    write(tmp_path, ["a.py"])
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    (one,) = files.write(files.run([str(tmp_path / "a.py")]))
    assert one.status == report.ERROR
    assert "not writable" in one.error
    assert (tmp_path / "a.py").read_bytes() == OLD


def test_odd_files_are_reported_and_do_not_stop_the_others(tmp_path):
    write(tmp_path, ["a.py"])
    write(tmp_path, ["b.py"], b"print 'LossScaleOptimizer'\n")
    write(tmp_path, ["c.py"], OLD.decode().encode("utf-16"))
    (tmp_path / "d.py").symlink_to(tmp_path / "nowhere.py")
    paths = [str(tmp_path / name) for name in ("a.py", "b.py", "c.py", "d.py")]
    reports = list(files.write(files.run(paths)))
    assert [one.status for one in reports] == ["changed", "error", "error", "error"]
    assert [pathlib.Path(one.path).name for one in reports] == ["a.py", "b.py", "c.py", "d.py"]
    assert "line 1" in reports[1].error
    assert "No such file" in reports[3].error
    assert (tmp_path / "b.py").read_bytes() == b"print 'LossScaleOptimizer'\n"


def test_a_diff_says_where_the_last_line_does_not_end(tmp_path):
    write(tmp_path, ["a.py"], OLD.rstrip())
    (one,) = files.run([str(tmp_path / "a.py")])
    assert one.diff.count("\\ No newline at end of file\n") == 2


PROVIDER = b"from tensorflow.keras.mixed_precision import experimental as mp\nopt = mp.LossScaleOptimizer(opt, 8)\n"
KEPT = b"from tf_lossscale.legacy import experimental as mp\nopt = mp.LossScaleOptimizer(opt, 8)\n"


@pytest.mark.parametrize(
    ("user", "line", "is_kept"),
    [
        ("user.py", "from provider import mp", True),
        ("user.py", "from provider import (\n    other,\n    mp as again,\n)", True),
        ("user.py", "from provider import *", True),
        ("user.py", "import provider", True),
        ("user.py", "import os, a.provider as p", True),
        ("user.py", "from . import provider", True),
        ("user.py", "    from a.provider import \\\n        mp", True),
        ("user.py", "from provider import other", False),
        ("user.py", "from elsewhere import mp", False),
        ("user.py", "# import nothing", False),
        ("deep/user.py", "from ..provider import mp", True),
    ],
)
def test_a_module_that_another_file_imports_keeps_the_old_names(tmp_path, user, line, is_kept):
    write(tmp_path, ["provider.py"], PROVIDER)
    write(tmp_path, [user], f"if True:\n    pass\n{line}\nmp.set_policy(p)\n".encode())
    list(files.write(files.run(files.find([str(tmp_path)]))))
    assert ((tmp_path / "provider.py").read_bytes() == KEPT) == is_kept


def test_a_package_that_another_file_imports_from_keeps_the_old_names(tmp_path):
    write(tmp_path, ["package/__init__.py"], PROVIDER)
    write(tmp_path, ["user.py"], b"from package import mp\n")
    list(files.write(files.run(files.find([str(tmp_path)]))))
    assert (tmp_path / "package/__init__.py").read_bytes() == KEPT


def test_a_project_gets_one_hint(tmp_path):
    write(tmp_path, ["a.py", "b.py"], b"print(model.optimizer.get_scaled_loss(1.0))\n")
    reports = list(files.run(files.find([str(tmp_path)])))
    assert [[finding.kind for finding in one.findings] for one in reports] == [["notice"], []]


def test_a_file_that_somebody_changes_after_it_was_read_is_left(tmp_path):
    write(tmp_path, ["a.py", "b.py"])
    reports = list(files.run([str(tmp_path / "a.py"), str(tmp_path / "b.py")]))
    write(tmp_path, ["a.py"], b"mine = 1\n")
    a, b = files.write(reports)
    assert (a.status, b.status) == (report.ERROR, report.CHANGED)
    assert "changed after it was read" in a.error
    assert (tmp_path / "a.py").read_bytes() == b"mine = 1\n"


def test_a_bug_in_the_codemod_does_not_stop_the_others(tmp_path, monkeypatch):
    def migrate(source, *others):
        if b"odd" in source:
            raise KeyError("a node")
        return migrate_file.migrate(source, *others)

    monkeypatch.setattr(files, "migrate", migrate)
    write(tmp_path, ["a.py"], OLD + b"odd = 1\n")
    write(tmp_path, ["b.py"])
    a, b = files.write(files.run(files.find([str(tmp_path)])))
    assert (a.status, b.status) == (report.ERROR, report.CHANGED)
    assert a.error.startswith("KeyError: 'a node'")


def test_nothing_is_written_before_the_last_file_is_worked_out(tmp_path):
    write(tmp_path, ["a.py", "b.py"])

    def stopped():
        yield from files.run([str(tmp_path / "a.py"), str(tmp_path / "b.py")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(files.write(stopped()))
    assert (tmp_path / "a.py").read_bytes() == (tmp_path / "b.py").read_bytes() == OLD
