"""The codemod's tables agree with the TensorFlow that is installed, and with this package."""

import importlib.util
import pathlib

import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names

TENSORFLOW = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent
COPY = "tensorflow.python.keras.mixed_precision"


@pytest.mark.parametrize("module", sorted({*table.PRIVATE, f"{COPY}.policy", f"{COPY}.experimental.policy"}))
def test_tensorflow_has_the_private_modules_that_are_not_gone(module):
    module = module.replace("keras.", "tensorflow.python.keras.") if module.startswith("keras.") else module
    path = TENSORFLOW.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert path.exists() != names.is_gone(module)


def test_the_new_names_exist():
    wanted = {old.new for old in table.OLD.values()} | {*table.MODULES.values()}
    for dotted in wanted | {*table.WRAPPERS_WITH_OLD_ARGUMENTS.values(), names.HELPER, names.EXPERIMENTAL}:
        root, *rest = dotted.split(".")
        found = {"tf_lossscale": tf_lossscale, "keras": tf.keras}[root]
        for part in rest:
            found = getattr(found, part)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"a  # f(\n#g(\nb", b"a  \n\nb"),
        (rb'"# f(\n", "b(\n"', rb'"\n", "b(\n"'),
        (b'["# f("], ["g(h)"]', b'[""], ["g(h)"]'),
        (b'c = "#fff"; g(h)', b'c = ""; g(h)'),
    ],
)
def test_comments_are_found_in_code_and_in_the_strings_of_notebooks(content, code):
    assert names.COMMENT.sub(b"", content) == code
