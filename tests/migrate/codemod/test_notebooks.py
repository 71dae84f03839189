"""Notebooks are rewritten cell by cell, and are written as Jupyter writes them."""

import json

import pytest

from tf_lossscale.migrate.codemod import files


def notebook(*cells, **layout):
    """The bytes of a notebook, laid out as Jupyter does."""
    made = []
    for cell in cells:
        kind, source = cell if isinstance(cell, tuple) else ("code", cell)
        made.append({"cell_type": kind, "metadata": {"id": "é"}, "source": source.splitlines(keepends=True)})
        if kind == "code":
            made[-1] |= {"execution_count": 1, "outputs": [{"data": {"text/plain": ["mixed_precision.experimental"]}}]}
    content = {"cells": made, "metadata": {"kernelspec": {}}, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(content, **{"indent": 1, "ensure_ascii": False} | layout) + "\n").encode()


def migrated(path, content):
    path.write_bytes(content)
    (one,) = files.write(files.run([str(path)]))
    return one


IMPORTS = "import tensorflow as tf\nfrom tensorflow.keras.mixed_precision import experimental as mp"
NEW_IMPORTS = "import tensorflow as tf\nfrom tensorflow.keras import mixed_precision as mp"
CELLS = (
    ("markdown", "# mixed_precision.experimental.LossScaleOptimizer"),
    "%matplotlib inline\n!pip install \\\n   'tensorflow<2.4'\n" + IMPORTS,
    "%%bash\npython -c 'import tensorflow.keras.mixed_precision.experimental'\nfor x in *; do echo $x; done\n",
    "%%time\nfor _ in range(2):\n    !ls\n    opt = mp.LossScaleOptimizer(tf.keras.optimizers.SGD(), 'dynamic')  # é",
    "files = !ls\nopt?\nprint('%s' % 'a')",
    "",
    "print(opt.loss_scale)\n\n",
    "mp.set_policy('mixed_float16')",
)
AFTER = (
    CELLS[0],
    f"{CELLS[1].replace(IMPORTS, NEW_IMPORTS)}\nimport tf_lossscale",
    CELLS[2],
    CELLS[3].replace("mp.LossScaleOptimizer(tf.keras.optimizers.SGD(), 'dynamic')",
                     "tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD())"),
    *CELLS[4:7],
    "mp.set_global_policy('mixed_float16')",
)  # fmt: skip


@pytest.mark.parametrize("layout", [{}, {"indent": None}, {"indent": 4}, {"separators": (",", ":"), "indent": None}])
def test_cells_are_rewritten_and_all_else_stays(tmp_path, layout):
    one = migrated(tmp_path / "train.ipynb", notebook(*CELLS, **layout))
    assert not one.error
    assert (tmp_path / "train.ipynb").read_bytes() == notebook(*AFTER, **layout)
    assert not migrated(tmp_path / "train.ipynb", one.new).is_changed


@pytest.mark.parametrize("text", ["x = 1\n", "x = '\u2028\x85\x0c'\n", "%time x\r\n", ""])
def test_a_finding_has_its_line_in_a_cell(tmp_path, text):
    call = "opt = tf.keras.mixed_precision.LossScaleOptimizer(opt, 1024)"
    cells = ["%%bash\nls\n", ("markdown", "An import."), "import tensorflow as tf", f"{text}{call}"]
    one = migrated(tmp_path / "train.ipynb", notebook(*cells))
    (todo,) = [f for f in one.findings if f.kind == "todo"]
    assert (todo.cell, todo.line) == (4, 2 if text else 1)
    assert b"TODO(tf-lossscale)" in one.new


def test_a_source_that_is_one_string(tmp_path):
    source = "import tensorflow as tf\ntf.keras.mixed_precision.experimental.set_policy(p)"
    cell = {"cell_type": "code", "source": source}
    one = migrated(tmp_path / "train.ipynb", json.dumps({"cells": [cell]}).encode())
    cell["source"] = source.replace("experimental.set_policy", "set_global_policy")
    assert json.loads(one.new) == {"cells": [cell]}


@pytest.mark.parametrize(
    "content",
    [
        notebook("x = 1", ("markdown", "tf.keras.mixed_precision.experimental")),
        notebook(),
        b'{"cells": []}',
        b"no notebook at all",
        b"",
        notebook("this is no Python", "x = 1"),
    ],
)
def test_a_notebook_without_old_names_is_left_and_is_no_error(tmp_path, content):
    one = migrated(tmp_path / "plain.ipynb", content)
    assert (one.is_changed, one.findings, one.error) == (False, (), None)
    assert (tmp_path / "plain.ipynb").read_bytes() == content


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"cells": [LossScaleOptimizer', "is not a notebook"),
        (b'{"worksheets": ["LossScaleOptimizer"]}', "is not a notebook"),
        (notebook("x = '''\n# tf_lossscale: cell 0\nLossScaleOptimizer'''"), "that this command uses itself"),
        (notebook("_tf_lossscale_line_0_ = LossScaleOptimizer"), "that this command uses itself"),
        (b'{"cells": ["LossScaleOptimizer' + b'"\\' * 100_000, "is not a notebook"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_so(tmp_path, content, error):
    one = migrated(tmp_path / "odd.ipynb", content)
    assert error in one.error
    assert (tmp_path / "odd.ipynb").read_bytes() == content


def test_names_in_lines_of_ipython_keep_their_meaning_and_are_reported(tmp_path):
    content = notebook(IMPORTS + "\n%time mp.set_policy('mixed_float16')\nopt = mp.LossScaleOptimizer(opt, 'dynamic')")
    one = migrated(tmp_path / "train.ipynb", content)
    assert b"from tf_lossscale.legacy import experimental as mp" in one.new
    assert b"opt = mp.LossScaleOptimizer(opt, 'dynamic')" in one.new
    (notice,) = [f for f in one.findings if f.kind == "notice"]
    assert (notice.cell, notice.line, notice.old) == (1, 3, "%time mp.set_policy('mixed_float16')")


def test_a_cell_that_is_no_python_code_is_left_and_reported(tmp_path):
    source = "%%writefile train.py\nopt = mp.LossScaleOptimizer(opt, 'dynamic')"
    one = migrated(tmp_path / "train.ipynb", notebook(source, "LossScaleOptimizer is no Python"))
    assert [(f.cell, f.line, f.kind) for f in one.findings] == [(1, 1, "notice"), (2, 1, "notice")]
    assert not one.is_changed


def test_a_long_line_takes_linear_time(tmp_path):
    cells = [f"%time x\n{' ' * 200_000}y", IMPORTS, "mp.set_policy(p)"]
    assert migrated(tmp_path / "long.ipynb", notebook(*cells)).is_changed


def test_a_cell_that_no_parser_takes_does_not_stop_the_others(tmp_path):
    deep = "y = " + "-" * 20000 + "x"
    one = migrated(tmp_path / "deep.ipynb", notebook(IMPORTS, deep, "mp.set_policy(p)"))
    assert b"mp.set_global_policy(p)" in one.new


def test_a_cell_that_ends_in_comments_is_migrated(tmp_path):
    cell = IMPORTS + "\nmp.set_policy(p)\nif p:\n    x = 1\n    # one\n    # two"
    one = migrated(tmp_path / "train.ipynb", notebook(cell, "y = 2"))
    after = cell.replace(IMPORTS, NEW_IMPORTS).replace("set_policy", "set_global_policy")
    assert one.new == notebook(after, "y = 2")
