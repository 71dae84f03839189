"""A program may import any public name first: nothing warns, and wrapped models load."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_lossscale
from tests.families import tf_keras, with_keras_3

pytestmark = [pytest.mark.slow, with_keras_3]

# One public name for each module that one comes from: what is imported with it is the same for the others.
MODULES = (
    "tf_lossscale",
    *(f"tf_lossscale.{subpackage}" for subpackage in tf_lossscale._SUBPACKAGES),
    "tf_lossscale.legacy.experimental",
)


def public_names():
    for module in map(importlib.import_module, MODULES):
        homes = {}
        for name in getattr(module, "__all__", ["LossScaleOptimizer"]):
            homes.setdefault(getattr(getattr(module, name), "__module__", None), name)
        for home, name in homes.items():
            if home is not None:
                yield f"from {module.__name__} import {name}"
    yield from ("import tf_lossscale.optimizers.keras3", "import tf_lossscale.optimizers.tf_keras")


LOADS_MODELS = """
import json, os, sys, tempfile, traceback
models = json.loads(sys.argv[1])

def loads_models():
    import tensorflow as tf, tf_keras
    for library, path in models.items():
        wrapper = {"keras": tf.keras, "tf_keras": tf_keras}[library].models.load_model(path).optimizer
        assert type(wrapper).__module__.startswith("tf_lossscale."), type(wrapper)
        assert float(wrapper.loss_scale) == 64.0, wrapper
"""

# Importing TensorFlow takes seconds: one process imports it and forks for each statement, before there are threads.
AFTER = f"""
{LOADS_MODELS}
def outcome(line):
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            code = 1
            try:
                exec(line, {{}})
                loads_models()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitpid(child, 0)[1]
        output.seek(0)
        return code, output.read().decode()

outcomes = {{}}
for stage, lines in json.loads(sys.argv[2]).items():
    exec(stage)
    outcomes.update({{f"{{stage}}; {{line}}": outcome(line) for line in lines}})
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Files with models of Keras 3 and tf_keras, both compiled with a wrapper."""
    paths = {}
    for library in (tf.keras, tf_keras):
        name = "tf_keras" if library is tf_keras else "keras"
        model = library.Sequential([library.Input((2,)), library.layers.Dense(1)])
        model.compile(tf_lossscale.LossScaleOptimizer(library.optimizers.SGD(0.1), initial_scale=64.0), "mse")
        model.train_on_batch(tf.ones((2, 2)), tf.ones((2, 1)))
        paths[name] = str(tmp_path_factory.mktemp(name) / "model.keras")
        model.save(paths[name])
    return paths


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(json.dumps, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tf_lossscale" not in done.stderr, "a warning"
    return done.stdout


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_public_names_may_be_imported_first_after_tensorflow_and_after_tf_keras(models, share):
    names = list(public_names())  # each takes a third of a second
    stages = {"import tensorflow": names[::share], "import tf_keras": names[1::share]}
    outcomes = json.loads(run(AFTER, models, stages).splitlines()[-1])
    assert len(outcomes) == len(names[::share]) + len(names[1::share])
    assert {line: text for line, (code, text) in outcomes.items() if code or "tf_lossscale" in text} == {}


@pytest.mark.parametrize(
    "program",
    [
        "from tf_lossscale import LossScaleOptimizer; import tensorflow",
        pytest.param("from tf_lossscale.legacy import get; import tf_keras", marks=pytest.mark.exhaustive),
        pytest.param("from tf_lossscale.migrate import restore; import keras", marks=pytest.mark.exhaustive),
    ],
)
def test_a_public_name_may_be_imported_first_before_tensorflow(program, models):
    run(f"{program}\n{LOADS_MODELS}\nloads_models()", models)


@pytest.mark.slow
@pytest.mark.parametrize("legacy", ["0", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_tf_keras_may_stand_in_the_place_of_keras(models, legacy):
    program = """
import sys
import tensorflow as tf
before = tf.keras.optimizers.SGD(0.1)
import tf_keras
sys.modules["keras"] = tf_keras
from tf_lossscale import LossScaleOptimizer
for inner in (before, tf_keras.optimizers.SGD(0.1), tf_keras.optimizers.legacy.SGD(0.1)):
    assert LossScaleOptimizer(inner).inner_optimizer is inner
"""
    run(f"{program}\n{LOADS_MODELS}\nloads_models()", {"tf_keras": models["tf_keras"]}, TF_USE_LEGACY_KERAS=legacy)
