"""private_names.md lists each private name of another library that the code uses, and the library has it."""

import ast
import importlib
import pathlib
import re
import sys
import tempfile

import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.families import tf_keras, with_keras_3

pytestmark = with_keras_3
ROOT = pathlib.Path(__file__).parents[1]
# Private names that the package itself sets, in a way that `names_in_code` does not recognize.
OURS = {"_gets_unscaled_gradients", "_infer", "_loss_scale_manager", "_meaningless", "_tables"}
# Private names that the package calls, and overrides in a class of its own.
OVERRIDDEN = {"_initialize"}
LIBRARY = r"(keras|tf_keras)\.src[\w.]+\w|tensorflow\.(python|compiler)[\w.]+\w"


def rows():
    page = (ROOT / "tests" / "private_names.md").read_text()
    for line in page.splitlines():
        if line.startswith("| `"):
            name, owner, *_ = line.strip("| ").split(" | ")
            yield name.strip("`"), owner


def names_in_code():
    """Private names that the package uses and does not define, and dotted names of private modules."""
    used, own = set(), set()
    for path in (ROOT / "tf_lossscale").rglob("*.py"):
        # The codemod and the reader of checkpoints contain old names as data, and so does the table of old names.
        parts = path.relative_to(ROOT).parts
        if "codemod" in parts or path.name == "table.py":
            continue
        text = path.read_text()
        tree = ast.parse(text)
        used |= set(re.findall(r"\btf(?:_keras)?\.__internal__[\w.]+", text))
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls" | "this"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if re.fullmatch(r"_[a-z]\w*", name):
                    used.add(name)
                case ast.ImportFrom(module=str(name)) if re.fullmatch(LIBRARY, name):
                    used.add(name)
                case ast.Constant(value=str(name)) if re.fullmatch(LIBRARY, name):
                    used.add(name)
                case ast.Constant(value=str(name)) if re.fullmatch(r"_[a-z]\w*", name) and "migrate" not in parts:
                    used.add(name)
    return {name for name in used - (own - OVERRIDDEN) - OURS if "tf_lossscale" not in name}


def built(optimizer):
    optimizer.build([tf.Variable(1.0)])
    return optimizer


def saved(optimizer):
    with tempfile.TemporaryDirectory() as folder:
        tf.train.Checkpoint(optimizer=optimizer).save(f"{folder}/checkpoint")
    return optimizer


def distributed():
    with strategies.get("mirrored_2").scope():
        return tf.Variable(1.0)


def scheduled():
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.1, 10)
    return built(tf_keras.optimizers.SGD(schedule))


OWNERS = {
    "a TensorFlow graph": tf.Graph,
    "the graph of a tf.function": lambda: tf.function(lambda: None).get_concrete_function().graph,
    "an eager tensor": lambda: tf.constant(1.0),
    "a tf.Module": tf.Module,
    "a variable of a MirroredStrategy": distributed,
    "a TensorFlow variable": lambda: tf.Variable(1.0),
    "a Keras 3 optimizer": lambda: built(tf.keras.optimizers.SGD(use_ema=True)),
    "a Keras 3 variable": lambda: tf.keras.Variable(1.0),
    "a Keras 3 layer": lambda: tf.keras.layers.Dense(1),
    "a tensor of Keras 3": lambda: tf.keras.layers.Masking()(tf.ones([1, 2, 1])),
    "a sigmoid's result in Keras 3": lambda: tf.keras.activations.sigmoid(tf.ones([1])),
    "Keras 3's saving module": lambda: importlib.import_module("keras.src.saving.saving_lib"),
    "a tf_keras optimizer": lambda: built(tf_keras.optimizers.Nadam()),
    "a tf_keras optimizer with a schedule": scheduled,
    "a tf_keras optimizer that was saved": lambda: saved(built(tf_keras.optimizers.SGD())),
    "a tf_keras layer": lambda: tf_keras.layers.Dense(1),
    "a legacy tf_keras optimizer": lambda: tf_keras.optimizers.legacy.SGD(),
    "TensorFlow 1's GradientDescentOptimizer": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
    "TensorFlow 1's AdamOptimizer": tf.compat.v1.train.AdamOptimizer,
    "a Sonnet optimizer": lambda: sonnet.optimizers.Adam(0.1),
    "Python's sys module": lambda: sys,
}


def test_the_table_has_every_name_of_the_code_and_no_other():
    assert {name for name, _ in rows()} == names_in_code()


@pytest.mark.parametrize(("name", "owner"), list(rows()))
def test_the_installed_library_has_the_name(name, owner):
    if owner == "modules":
        importlib.import_module(name)
    elif "." in name:
        assert eval(name, {"tf": tf, "tf_keras": tf_keras}) is not None
    else:
        assert hasattr(OWNERS[owner](), name)
