"""Which files are taken, and how they are written."""

import os
import pathlib
import stat

import hypothesis
import pytest
from hypothesis import strategies as st

from tf_lossscale.migrate.codemod import files, migrate_file, project, report

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


def test_many_files_on_several_cores_come_out_as_on_one(tmp_path):
    write(tmp_path, ["compat.py"], b"from tensorflow.keras.mixed_precision import LossScaleOptimizer as Scaler\n")
    write(tmp_path, [f"train_{n}.py" for n in range(40)], b"from compat import Scaler\nopt = Scaler(opt, 'dynamic')\n")
    paths = files.find([str(tmp_path)])
    alone = list(files.run(paths, jobs=1))
    assert [one.status for one in alone] == ["changed"] * 41
    assert list(files.run(paths, jobs=2)) == alone


def test_a_name_that_another_file_imports_is_kept(tmp_path):
    provider = b"from tensorflow.keras.mixed_precision import experimental as mp\nopt = mp.LossScaleOptimizer(opt, 8)\n"
    write(tmp_path, ["provider.py"], provider)
    list(files.write(files.run(files.find([str(tmp_path)]))))
    assert b"mixed_precision" not in (tmp_path / "provider.py").read_bytes()
    write(tmp_path, ["provider.py"], provider)
    write(tmp_path, ["user.py"], b"from provider import mp\nmp.set_policy('mixed_float16')\n")
    list(files.write(files.run(files.find([str(tmp_path)]))))
    assert b"from tensorflow.keras import mixed_precision as mp" in (tmp_path / "provider.py").read_bytes()
    assert (tmp_path / "user.py").read_bytes() == b"from provider import mp\nmp.set_global_policy('mixed_float16')\n"


def test_a_file_that_somebody_changes_after_it_was_read_is_left(tmp_path):
    write(tmp_path, ["a.py", "b.py"])
    reports = list(files.run([str(tmp_path / "a.py"), str(tmp_path / "b.py")]))
    write(tmp_path, ["a.py"], b"mine = 1\n")
    a, b = files.write(reports)
    assert (a.status, b.status) == (report.ERROR, report.CHANGED)
    assert "changed after it was read" in a.error
    assert (tmp_path / "a.py").read_bytes() == b"mine = 1\n"


def test_a_panic_of_the_parser_does_not_stop_the_others(tmp_path, monkeypatch):
    class Panic(BaseException):
        pass

    def migrate(source, *others):
        if b"odd" in source:
            raise Panic("unwrap of nothing")
        return migrate_file.migrate(source, *others)

    monkeypatch.setattr(files, "migrate", migrate)
    write(tmp_path, ["a.py"], OLD + b"odd = 1\n")
    write(tmp_path, ["b.py"])
    a, b = files.write(files.run(files.find([str(tmp_path)])))
    assert (a.status, a.error, b.status) == (report.ERROR, "Panic: unwrap of nothing", report.CHANGED)


def test_nothing_is_written_before_the_last_file_is_worked_out(tmp_path):
    write(tmp_path, ["a.py", "b.py"])

    def stopped():
        yield from files.run([str(tmp_path / "a.py"), str(tmp_path / "b.py")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(files.write(stopped()))
    assert (tmp_path / "a.py").read_bytes() == (tmp_path / "b.py").read_bytes() == OLD


def test_an_item_that_kills_its_process_does_not_stop_the_others():
    programs = ["-1", "-2", "__import__('os').kill(__import__('os').getpid(), 9)", "-4", "-5"]
    assert list(files.map_in_processes(eval, programs, jobs=2)) == [-1, -2, None, -4, -5]


NAMES = ("helper", "compat", "package", "package.compat", ".compat", "..helper", ".", "package.sub")
PATHS = ("helper.py", "compat.py", "package/__init__.py", "package/compat.py", "package/sub/__init__.py", "train.py")
LINES = (
    "import tensorflow as tf",
    "from tensorflow.keras import mixed_precision as mp",
    "from tensorflow.keras.mixed_precision import experimental as mp",
    "mp = tf.keras.mixed_precision.experimental",
    "mp.set_policy('mixed_float16')",
    "compat.mp.set_policy('mixed_float16')",
    "import {name} as other; other.mp.set_policy('mixed_float16')",
    "from {name} import mp",
    "from {name} import *",
    "from {name} import (\n    mp as again,  # (\n)\nmp = again",
    "from {name} \\\n    import compat, mp",
    "from {name} import compat",
    "from {name} import compat as mixed",
    "from {name} import mixed",
    "mixed.mp.set_policy('mixed_float16')",
    "# import nothing",
)


@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_the_text_search_finds_what_parsing_every_file_finds(data):
    sources = {}
    for path in PATHS:
        lines = data.draw(st.lists(st.sampled_from(LINES), max_size=3))
        named = [line.replace("{name}", data.draw(st.sampled_from(NAMES))) for line in lines]
        text = "\n".join(line for line in named if not (path.count("/") == 0 and "from ." in line))
        sources[f"/{path}"] = text.replace("import . as other; ", "").replace("import .", "import ").encode()
    searched = project.Project(sources, sources.__getitem__)
    parsed = EveryFile(sources, sources.__getitem__)
    for path, source in sources.items():
        around = parsed.around(path)
        try:
            outcome = migrate_file.migrate(source, around._replace(wraps=None, compiles=None))
        except ValueError:
            continue
        if path not in searched.worth_migrating:
            assert outcome.source == source
            assert not outcome.findings
        else:
            assert searched.around(path) == around


class EveryFile(project.Project):
    """A project that parses every file, and takes every file for one that may import each other one."""

    def _search(self, paths):
        super()._search(paths)
        return list(self._words), []

    def _importers(self, path):
        return iter(self._words)


@pytest.mark.parametrize("order", [1, -1])
def test_files_that_import_each_other_pass_on_the_same_names_in_any_order(order):
    sources = {
        "/helper.py": b"from tensorflow.keras.mixed_precision import experimental as mp",
        "/compat.py": b"from package.sub import mp",
        "/package/__init__.py": b"",
        "/package/sub/__init__.py": b"from helper import mp\nfrom compat import mp",
    }
    linked = project.Project(list(sources)[::order], sources.__getitem__)
    old = {"mp": ["tensorflow.keras.mixed_precision.experimental"]}
    assert linked.around("/package/sub/__init__.py").known == {"helper": old, "compat": old}
    assert linked.around("/compat.py").known == {"package.sub": old}


def test_what_a_circle_of_imports_passes_on_does_not_depend_on_the_order():
    sources = {
        "/helper.py": b"from package import mp\nfrom tensorflow.keras import mixed_precision as mp",
        "/package.py": b"from helper import mp",
    }
    linked = [project.Project(list(sources)[::order], sources.__getitem__) for order in (1, -1)]
    assert linked[0].around("/helper.py") == linked[1].around("/helper.py")
    assert linked[0].around("/package.py") == linked[1].around("/package.py")
