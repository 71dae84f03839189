"""Files that are nested deeply: handled, or refused with a sentence, and never the end of the command."""

import re

import pytest

from tf_lossscale.migrate.codemod import files, report
from tf_lossscale.migrate.codemod.migrate_file import migrate

OLD = b"import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(opt)\n"
NEW = b"import tensorflow as tf\nimport tf_lossscale\nopt = tf_lossscale.LossScaleOptimizer(opt)\n"
DEEP = "loss_scale = " + "-" * 20000 + "x\n"


def taken_or_refused(source):
    """Migrates a file; it must come out whole, or be refused with a sentence."""
    try:
        return migrate(OLD + source).source == NEW + source
    except ValueError as error:
        assert re.search(r"nested too deeply|does not parse: .* \(line \d+\)", str(error))
        return False


@pytest.mark.parametrize(
    ("source", "is_taken"),
    [
        (DEEP, False),
        ("loss_scale = x" + "[0]" * 20000, False),
        ("if a, b:\n  pass\n" + "elif a, b:\n  pass\n" * 20000, False),
        ("".join(" " * i + "if a:\n" for i in range(300)) + " " * 300 + "pass\n", False),
        ("loss_scale = f'{" + "-" * 20000 + "1}'\n", False),
        ("loss_scale = " + "(" * 20000 + "\n", False),
        # Long, but not deep: one node has all the parts.
        ("loss_scale = x" + " and a" * 20000, True),
        ("loss_scale = (" + "'a'\n" * 20000 + ")\n", True),
    ],
    ids=range(8),
)
def test_a_deep_file_is_taken_or_refused_with_a_sentence(source, is_taken):
    assert taken_or_refused(source.encode()) == is_taken


@pytest.mark.parametrize(("before", "after"), [("-", ""), ("", " + 1"), ("", ".b"), ("not ", "")])
def test_a_file_as_deep_as_python_takes_it_does_not_end_the_process(before, after):
    taken_or_refused(f"x = {before * 1500}x{after * 1500}\n".encode())


def test_the_other_files_are_migrated_and_the_deep_one_is_left(tmp_path):
    deep = OLD + DEEP.encode()
    (tmp_path / "a.py").write_bytes(deep)
    (tmp_path / "b.py").write_bytes(OLD)
    a, b = files.write(files.run(files.find([str(tmp_path)])))
    assert b.is_changed
    assert a.error.startswith("is nested too deeply")
    assert (tmp_path / "a.py").read_bytes() == deep
    assert b"tf_lossscale" in (tmp_path / "b.py").read_bytes()


@pytest.mark.parametrize("source", ["loss_scale = x" + ".b" * 1500, "if a: pass\n" + "elif a: pass\n" * 900])
def test_a_deep_file_without_uses_does_not_stop_the_command(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    (one,) = files.run([str(tmp_path / "a.py")])
    assert one == report.FileReport(str(tmp_path / "a.py"))
