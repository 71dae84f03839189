"""What a user sees of the public API: the types under `mypy --strict`, `help`, `dir` and `repr`."""

import importlib
import inspect
import os
import pathlib
import pydoc
import re
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests import families

ROOT = pathlib.Path(__file__).parents[1]
SUBPACKAGES = ["", ".amp", ".diagnosis", ".legacy", ".migrate", ".optimizers"]

# Type checkers know TensorFlow's types from its stubs (types-tensorflow), and this package's from its sources.
RIGHT = """
from collections.abc import Callable
from typing_extensions import assert_type
import tensorflow as tf
import tf_lossscale
from tf_lossscale import LossScaleOptimizer, SharedLossScale, amp, legacy, migrate
from tf_lossscale.amp import DynamicLossScaleManager
from tf_lossscale.legacy import from_loss_scale

weight = tf.Variable(tf.constant(1.0))
optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), dynamic_growth_steps=100, max_scale=2.0**20)
assert_type(optimizer, LossScaleOptimizer)

with tf.GradientTape() as tape:
    loss = weight * tf.constant(2.0)
    scaled_loss = optimizer.get_scaled_loss(loss)
assert_type(scaled_loss, tf.Tensor)
gradients: list[tf.Tensor | tf.IndexedSlices | None] = [tf.constant(1.0), None]
assert_type(optimizer.get_unscaled_gradients(gradients), list[tf.Tensor | tf.IndexedSlices | None])
assert_type(optimizer.get_unscaled_gradients([tf.constant(1.0)]), list[tf.Tensor])
optimizer.apply_gradients(zip(gradients, [weight, weight]))
optimizer.apply([tf.constant(1.0)], [weight])
optimizer.minimize(lambda: weight * tf.constant(2.0), [weight])
optimizer.minimize(loss, lambda: weight, tape=tape)


def loss_fn(labels: tf.Tensor) -> tf.Tensor:
    return labels


assert_type(optimizer.scale_inside(loss_fn)(tf.constant(1.0)), tf.Tensor)
assert_type(optimizer.loss_scale, tf.Tensor)
assert_type(optimizer.dynamic, bool)
assert_type(optimizer.dynamic_counter, tf.Variable | None)
assert_type(optimizer.skipped_in_a_row, tf.Tensor | int)
assert_type(optimizer.last_step_skipped, tf.Tensor | bool)
assert_type(optimizer.state()["loss_scale"], float)
assert_type(optimizer.state().get("skipped_steps"), int | None)
optimizer.set_state(optimizer.state())
optimizer.set_state({"loss_scale": 8.0, "dynamic_counter": 0})
optimizer.learning_rate = optimizer.lr * 0.5  # delegated
optimizer.beta_1 = 0.9
for row in optimizer.overflow_report():
    assert_type(row.variable, str)

shared = SharedLossScale(initial_scale=8.0)
LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=shared)
assert_type(amp.DynamicLossScaleManager(), DynamicLossScaleManager)
assert_type(tf_lossscale.amp.DynamicLossScaleManager().get_loss_scale(), float)
assert_type(from_loss_scale(optimizer, 8), LossScaleOptimizer)
assert_type(legacy.DynamicLossScale()(), tf.Tensor)
assert_type(migrate.restore("ckpt", optimizer, [weight]).loss_scale, float | None)
"""

# A wrong line of a user's program -> a part of the type checker's message.
WRONG = {
    "optimizer.get_unscaled_gradients()": "require at least one argument",
    'LossScaleOptimizer("adam")': 'Argument 1 to "LossScaleOptimizer" has incompatible type "str"',
    'LossScaleOptimizer(tf.keras.optimizers.SGD(), growth_factor="two")': (
        'Argument "growth_factor" to "LossScaleOptimizer" has incompatible type "str"; expected "float"'
    ),
    "optimizer.apply_gradients([(weight, 1.0)])": "incompatible type",
    "optimizer.apply_gradients([weight])": "incompatible type",
    "optimizer.minimize(weight)": 'Missing positional argument "var_list" in call to "minimize"',
    'optimizer.state()["scale"]': 'TypedDict "State" has no key "scale"',
    "optimizer.loss_scale()": '"Tensor" not callable',
    "optimizer.dynamic_growth_steps + 1": 'Unsupported operand types for + ("None" and "int")',
    'legacy.experimental.LossScaleOptimizer(optimizer, "dynamic").get_scaled_loss()': (
        '"get_scaled_loss" of "LossScaleOptimizer" require at least one argument'
    ),
    'DynamicLossScaleManager("high")': 'has incompatible type "str"; expected "float"',
}


# The package is found in its sources here, and is judged by the project's own settings elsewhere.
MYPY = (
    *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--ignore-missing-imports"),
    *("--follow-imports=silent", "--hide-error-context"),
)
PYRIGHT = (shutil.which("pyright"), "--pythonpath", sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [MYPY, PYRIGHT], ids=["mypy", "pyright"])
def test_a_type_checker_takes_a_users_program_and_finds_what_is_wrong_in_it(checker, tmp_path):
    if checker[0] is None:
        pytest.skip("pyright is not installed. The nox session of this name installs it.")
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "\n".join(WRONG))
    checked = subprocess.run(
        [*checker, str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    found = {}
    for line, message in re.findall(r":(\d+)(?:: error:|:\d+ - error:) (.*)$", checked, re.MULTILINE):
        found.setdefault(int(line), []).append(message)
    first = len(RIGHT.splitlines()) + 1
    assert {line: text for line, text in found.items() if line < first} == {}, checked
    for number, (line, expected) in enumerate(WRONG.items(), first):
        messages = found.get(number, [])
        # The two checkers describe an error in different words.
        assert any(expected in message for message in messages) if checker is MYPY else messages, (line, messages)


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_help_and_dir_show_every_public_name(subpackage):
    module = importlib.import_module(f"tf_lossscale{subpackage}")
    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        if not public.startswith("__"):
            assert public in pydoc.render_doc(getattr(module, public), renderer=pydoc.plaintext)
            assert ">>>" in getattr(module, public).__doc__


def test_rooms_are_found_from_the_package():
    assert {f".{subpackage}" for subpackage in tf_lossscale._SUBPACKAGES} == set(SUBPACKAGES) - {""}
    assert set(tf_lossscale._SUBPACKAGES) <= set(dir(tf_lossscale))
    for subpackage in tf_lossscale._SUBPACKAGES:
        assert inspect.ismodule(getattr(tf_lossscale, subpackage))


def test_help_of_the_optimizer_shows_all_arguments():
    cls = tf_lossscale.LossScaleOptimizer
    signature = inspect.signature(cls.__init__)
    assert inspect.signature(cls) == signature.replace(parameters=list(signature.parameters.values())[1:])
    for argument in list(inspect.signature(cls).parameters)[:-1]:
        assert f"{argument}:" in cls.__doc__.partition("Args:")[2], argument


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
