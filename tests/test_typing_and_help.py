"""What a user sees of the public API: the types under `mypy --strict`, `help`, `dir` and `repr`."""

import importlib
import inspect
import os
import pathlib
import pydoc
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests import families

ROOT = pathlib.Path(__file__).parents[1]
SUBPACKAGES = ["", ".amp", ".legacy", ".migrate", ".optimizers", ".probability"]

PROGRAM = """
from typing import Any
from typing_extensions import assert_type
import tensorflow as tf
import tf_lossscale
from tf_lossscale import LossScaleOptimizer, amp, legacy, probability
from tf_lossscale.amp import DynamicLossScaleManager
from tf_lossscale.legacy import from_loss_scale

optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), dynamic_growth_steps=100, max_scale=2.0**20)
assert_type(optimizer, LossScaleOptimizer)
assert_type(optimizer.get_unscaled_gradients([1.0, None]), list[Any])
assert_type(optimizer.compute_gradients(lambda: 1.0, []), list[tuple[Any, Any]])
assert_type(optimizer.dynamic, bool)
assert_type(amp.DynamicLossScaleManager(), DynamicLossScaleManager)
assert_type(tf_lossscale.amp.DynamicLossScaleManager(), DynamicLossScaleManager)
from_loss_scale(optimizer, 8)
probability.minimize(lambda: 1.0, num_steps=3, optimizer=optimizer)
optimizer.get_unscaled_gradients()
LossScaleOptimizer(object(), growth_factor="two")
probability.minimize(lambda: 1.0, optimizer=optimizer)
legacy.experimental.LossScaleOptimizer(optimizer, "dynamic").get_scaled_loss()
"""
WRONG = [
    'Missing positional argument "grads" in call to "get_unscaled_gradients"',
    'Argument "growth_factor" to "LossScaleOptimizer" has incompatible type "str"; expected "float"',
    'Missing positional argument "num_steps" in call to "minimize"',
    'Missing positional argument "loss" in call to "get_scaled_loss"',
]


@pytest.mark.slow
def test_a_type_checker_takes_a_users_program_and_finds_what_is_wrong_in_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # The package is found in its sources here, and is judged by the project's own settings elsewhere.
    flags = ["--strict", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    *found, summary = checked.splitlines()
    assert len(found) == len(WRONG), checked
    for line, expected in zip(found, WRONG):
        assert expected in line
    assert "Found 4 errors in 1 file" in summary


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_help_and_dir_show_every_public_name(subpackage):
    module = importlib.import_module(f"tf_lossscale{subpackage}")
    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        if not public.startswith("__"):
            text = pydoc.render_doc(getattr(module, public), renderer=pydoc.plaintext)
            assert public in text
            assert ">>>" in text


def test_rooms_are_found_from_the_package():
    assert {f".{subpackage}" for subpackage in tf_lossscale._SUBPACKAGES} == set(SUBPACKAGES) - {""}
    assert set(tf_lossscale._SUBPACKAGES) <= set(dir(tf_lossscale))
    for subpackage in tf_lossscale._SUBPACKAGES:
        assert inspect.ismodule(getattr(tf_lossscale, subpackage))


def test_help_of_the_optimizer_shows_all_arguments_and_documents_every_public_member():
    cls = tf_lossscale.LossScaleOptimizer
    assert inspect.signature(cls) == inspect.signature(cls.__init__).replace(
        parameters=list(inspect.signature(cls.__init__).parameters.values())[1:]
    )
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for argument in list(inspect.signature(cls).parameters)[:-1]:
        assert f"{argument}:" in cls.__doc__.partition("Args:")[2], argument
        assert argument in text
    for name, member in inspect.getmembers(cls):
        if not name.startswith("_"):
            assert name in text
            assert inspect.getdoc(member), name


@pytest.mark.parametrize("family", families.ALL_FAMILIES, ids=families.ALL_IDS)
def test_dir_and_repr_of_an_optimizer(family):
    optimizer = tf_lossscale.LossScaleOptimizer(family.sgd(), initial_scale=1024, dynamic_growth_steps=20)
    weight = tf.Variable(1.0)
    optimizer.minimize(lambda: weight**2, var_list=[weight])
    inner = type(optimizer.inner_optimizer).__name__
    assert repr(optimizer) == (
        f"<LossScaleOptimizer loss_scale=1024, dynamic_counter=1, dynamic_growth_steps=20, inner_optimizer={inner}>"
    )
    assert {"get_scaled_loss", "apply_gradients", "loss_scale", "inner_optimizer", "learning_rate"} <= set(
        dir(optimizer)
    )
    fixed = tf_lossscale.LossScaleOptimizer(family.sgd(), dynamic=False, initial_scale=8)
    assert repr(fixed) == f"<LossScaleOptimizer loss_scale=8, fixed, inner_optimizer={inner}>"
    with tf.Graph().as_default():
        assert "loss_scale=8 at the start" in repr(tf_lossscale.LossScaleOptimizer(family.sgd(), False, 8))
