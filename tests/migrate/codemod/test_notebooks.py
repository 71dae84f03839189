"""Notebooks are rewritten cell by cell; all else stays byte for byte."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tf_lossscale.migrate.codemod import files, notebooks, report


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


@pytest.mark.parametrize(
    "layout", [{}, {"indent": None}, {"indent": 4, "ensure_ascii": True}, {"separators": (",", ":"), "indent": None}]
)
def test_cells_are_rewritten_and_all_else_stays(tmp_path, layout):
    one = migrated(tmp_path / "train.ipynb", notebook(*CELLS, **layout))
    assert (one.status, one.error) == (report.CHANGED, None)
    assert (tmp_path / "train.ipynb").read_bytes() == notebook(*AFTER, **layout)
    assert migrated(tmp_path / "train.ipynb", one.new).status == report.UNCHANGED


@pytest.mark.parametrize("text", ["x = 1\n", "x = '\u2028\x85\x0c'\n", "%time x\r\n", "%%bash\nls\n", ""])
@pytest.mark.parametrize("place", [0, 1])
def test_a_finding_has_its_line_in_the_file(tmp_path, text, place):
    call = "opt = tf.keras.mixed_precision.LossScaleOptimizer(opt, 1024)"
    cells = [text, f"import tensorflow as tf\n{call}"] if place == 0 else ["import tensorflow as tf", f"{text}{call}"]
    if text.startswith("%%"):
        cells = [text, "import tensorflow as tf", call]
    content = notebook(*cells)
    one = migrated(tmp_path / "train.ipynb", content)
    (todo,) = [f for f in one.findings if f.kind == "todo"]
    assert b"LossScaleOptimizer(opt, 1024)" in content.splitlines()[todo.line - 1]
    assert b"TODO(tf-lossscale)" in one.new


@pytest.mark.parametrize("split", [["s = 'a\u2028", "b'\n"], ["s = 'a\u2028b'\n"]], ids=["Jupyter", "another program"])
def test_a_line_that_jupyter_splits_stays_as_it_is_in_the_file(tmp_path, split):
    source = ["import tensorflow as tf\n", *split, "tf.keras.mixed_precision.experimental.set_policy(p)"]
    one = migrated(tmp_path / "a.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": source}]}).encode())
    source[-1] = "tf.keras.mixed_precision.set_global_policy(p)"
    assert json.loads(one.new)["cells"][0]["source"] == source


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
        notebook("%%javascript\nvar x = 'LossScaleOptimizer';"),
        notebook("this is no Python", "x = 1"),
    ],
)
def test_a_notebook_without_old_names_is_left_and_is_no_error(tmp_path, content):
    one = migrated(tmp_path / "plain.ipynb", content)
    assert (one.status, one.findings, one.error) == (report.UNCHANGED, (), None)
    assert (tmp_path / "plain.ipynb").read_bytes() == content


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"cells": [LossScaleOptimizer', "is not a notebook"),
        (b'{"worksheets": ["LossScaleOptimizer"]}', "is not a notebook"),
        (notebook("LossScaleOptimizer is no Python"), "code cell 1 parses neither"),
        (notebook("x = '''\n# tf_lossscale: cell 0\nLossScaleOptimizer'''"), "that this command uses itself"),
        (notebook("_tf_lossscale_line_0_ = LossScaleOptimizer"), "that this command uses itself"),
        (b'{"cells": ["LossScaleOptimizer' + b'"\\' * 100_000, "is not a notebook"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_so(tmp_path, content, error):
    one = migrated(tmp_path / "odd.ipynb", content)
    assert one.status == report.ERROR
    assert error in one.error
    assert (tmp_path / "odd.ipynb").read_bytes() == content


def test_names_in_lines_of_ipython_keep_their_meaning_and_are_reported(tmp_path):
    content = notebook(IMPORTS + "\n%time mp.set_policy('mixed_float16')\nopt = mp.LossScaleOptimizer(opt, 'dynamic')")
    one = migrated(tmp_path / "train.ipynb", content)
    assert b"from tf_lossscale.legacy import experimental as mp" in one.new
    assert b"opt = mp.LossScaleOptimizer(opt, 'dynamic')" in one.new
    (notice,) = [f for f in one.findings if f.kind == "notice"]
    assert "IPython" in notice.reason
    assert b"%time mp.set_policy" in content.splitlines()[notice.line - 1]


def test_a_long_line_takes_linear_time(tmp_path):
    cells = [f"%time x\n{' ' * 200_000}y", IMPORTS, "mp.set_policy(p)"]
    assert migrated(tmp_path / "long.ipynb", notebook(*cells)).status == report.CHANGED


def test_a_cell_that_no_parser_takes_does_not_stop_the_others(tmp_path):
    deep = "y = " + "-" * 20000 + "x"
    one = migrated(tmp_path / "deep.ipynb", notebook(IMPORTS, deep, "mp.set_policy(p)"))
    assert (one.status, one.error) == (report.CHANGED, None)
    assert b"mp.set_global_policy(p)" in one.new


def test_a_cell_that_ends_in_comments_is_migrated(tmp_path):
    cell = IMPORTS + "\nmp.set_policy(p)\nif p:\n    x = 1\n    # one\n    # two"
    one = migrated(tmp_path / "train.ipynb", notebook(cell, "y = 2"))
    after = cell.replace(IMPORTS, NEW_IMPORTS).replace("set_policy", "set_global_policy")
    assert one.new == notebook(after, "y = 2")


LOOP = "for i in y:\n    !ls \\\n    -l\n"
LINES = ("x = 1\n", "%time x\n", "!ls\n", LOOP, "'é\\n'\n", "# tf_lossscale: x\n", "a?\n", "\n")


@hypothesis.given(
    st.lists(st.lists(st.sampled_from(LINES), max_size=4).map("".join), max_size=4),
    st.sampled_from([{}, {"indent": None}, {"ensure_ascii": True}, {"separators": (",", ":"), "indent": None}]),
    st.booleans(),
)
def test_any_notebook_that_is_put_together_again_is_the_same(cells, layout, ends):
    content = notebook(*(cell if ends else cell.rstrip("\n") for cell in cells), **layout)
    joined = notebooks.Notebook(content)
    assert joined.with_source(joined.source) == content
