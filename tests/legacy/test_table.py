"""One row of the table of old names is all that an old name needs."""

import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import files, names
from tools import migration_table

NEW = "tf_lossscale.legacy.DynamicLossScale"


@pytest.fixture(params=["tensorflow.train.experimental", "tensorflow.splines", "tensorflow.splines.deep"])
def row(request, monkeypatch):
    """A new row, in a module that TensorFlow has and in those that it does not have."""
    with monkeypatch.context() as context:
        context.setitem(table.OLD, f"{request.param}.reticulate", table.Old(table.LEGACY, NEW))
        yield request.param.replace("tensorflow.", "tf.")


def test_a_row_is_enough_for_search_rewrite_install_and_docs(row, tmp_path):
    old = f"import tensorflow as tf\nscale = {row}.reticulate(8, multiplier=4)\n"
    assert names.is_worth_parsing(old.encode())
    (tmp_path / "train.py").write_text(old)
    (report,) = files.write(files.run([str(tmp_path / "train.py")]))
    new = f"import tensorflow as tf\nimport tf_lossscale\nscale = {NEW}(8, multiplier=4)\n"
    assert (tmp_path / "train.py").read_text() == new
    assert not [finding for finding in report.findings if finding.kind != "rewritten"]

    with tf_lossscale.install():
        run, migrated = {}, {}
        exec(old, run)
        exec(new, migrated)
        assert run["scale"].get_config() == migrated["scale"].get_config()
        exec(old.replace("tensorflow as tf", "tensorflow.compat.v1 as tf"), run)
    assert not hasattr(tf, "splines")
    assert not hasattr(tf.train.experimental, "reticulate")

    assert f"`reticulate` -> `{NEW}`" in migration_table.tables()
