"""What `tf-lossscale run` says after the traceback of an error with a known cause."""

import importlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from tests.families import tf_keras
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.legacy.hints import hint


def error_of(program):
    with pytest.raises(Exception) as caught:
        names = {"tf": tf, "keras": keras, "tf_keras": tf_keras, "importlib": importlib, "wrap": LossScaleOptimizer}
        exec(program, names)
    return caught.value


KERAS_2 = "TF_USE_LEGACY_KERAS=1"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).get_scaled_loss(1)", "Keras 3's own"),
        ("keras.optimizers.SGD()._create_all_weights([])", KERAS_2),
        ("keras.optimizers.Adam(decay=0.1, lr=0.1)", KERAS_2),
        ("tf.square(keras.Input((2,)))", KERAS_2),
        ("from keras.engine import base_layer", KERAS_2),
        ("importlib.import_module('tensorflow.python.keras.engine.gone')", KERAS_2),
        (
            "from tensorflow.python.training.gone import slot",
            "tensorflow.python.training.gone is a private TensorFlow name",
        ),
        ("from tensorflow.python.ops import gone_ops", "tensorflow.python.ops.gone_ops is a private TensorFlow name"),
        ("keras.Sequential().compile(tf_keras.optimizers.SGD())", "not from the same Keras"),
        ("keras.Sequential().compile(wrap(tf_keras.optimizers.SGD()))", "not from the same Keras"),
        ("tf_keras.Sequential().compile(keras.optimizers.SGD())", "not from the same Keras"),
        ("tf_keras.Sequential().compile(wrap(keras.optimizers.SGD()))", "not from the same Keras"),
        ("tf.estimator.Estimator", "TensorFlow 2.16 removed tf.estimator"),
        ("tf.compat.v1.estimator.Estimator", "TensorFlow 2.16 removed tf.estimator"),
        ("from tensorflow import estimator", "TensorFlow 2.16 removed tf.estimator"),
        ("from tensorflow.compat.v1 import estimator", "TensorFlow 2.16 removed tf.estimator"),
        ("import tensorflow_estimator", "TensorFlow 2.16 removed tf.estimator"),
        ("importlib.import_module('tensorflow.python.estimator.gone')", "TensorFlow 2.16 removed tf.estimator"),
        ("tf.placeholder", "tf.placeholder is a TensorFlow 1 name, and is now tf.compat.v1.placeholder."),
        ("tf.train.AdamOptimizer", "is now tf.compat.v1.train.AdamOptimizer."),
        ("tf.train.AdamOptimizer", "`import tensorflow.compat.v1 as tf`, and call tf.disable_v2_behavior()"),
        ("tf_keras.optimizers.Adam().get_updates", "Adam cannot train in graph mode. Use"),
        ("raise RuntimeError('input_1: Attempting to capture an EagerTensor without ...')", "Call it first"),
        ("from tensorflow.train import AdamOptimizer", "is now tf.compat.v1.train.AdamOptimizer."),
    ],
)
def test_a_known_cause_is_said(program, said, monkeypatch):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    error = error_of(program)
    assert said in str(hint(error)), error


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError('not recognized')",
        "[].get_scaled_loss",
        "keras.Sequential().compile('no such optimizer')",
        "keras.Sequential().compile(keras.optimizers.SGD)",
        "import nowhere_at_all",
        "from json import gone",
        "tf.nowhere_at_all",
        "keras.layers.Dense(-1)",
        "tf.constant(1) + 'a'",
    ],
)
def test_nothing_is_said_of_other_errors(program):
    assert hint(error_of(program)) is None


def test_who_has_keras_2_is_not_told_to_take_it(monkeypatch):
    error = error_of("importlib.import_module('tensorflow.python.keras.engine.gone')")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert hint(error) is None


def test_who_has_keras_2_and_imports_keras_is_told_to_put_it_in_its_place(monkeypatch):
    error = error_of("from keras.engine import base_layer")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert "sys.modules['keras'] = tf_keras" in str(hint(error))


def test_run_prints_it_after_the_traceback(tmp_path):
    # A Keras of a moment's import time.
    (tmp_path / "keras.py").write_text("")
    (tmp_path / "old.py").write_text("from keras.engine import base_layer\n")
    command = [sys.executable, "-m", "tf_lossscale.cli", "run", str(tmp_path / "old.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    *_, error, hinted = done.stderr.splitlines()
    assert error.startswith("ModuleNotFoundError: ")
    assert hinted.startswith("tf-lossscale: ")
    assert KERAS_2 in hinted
