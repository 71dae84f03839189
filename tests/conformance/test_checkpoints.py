"""Checkpoints that the originals wrote are read, and training goes on as it did there."""

import json
import pathlib
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from tests.conformance import recordings
from tests.families import FAMILIES, tf_keras
from tf_lossscale import LossScaleOptimizer

ARCHIVE = pathlib.Path(__file__).parent / "data" / "checkpoints.tar.gz"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def names():
    with tarfile.open(ARCHIVE) as archive:
        folders = sorted({member.name.split("/")[1] for member in archive.getmembers() if "/" in member.name[2:]})
    return [n for n in folders if any(kind in n for kind in ("_lso_", "_plain_")) and not n.startswith("tf1")]


def require_that_tensorflow_says_who_wrote(name):
    if name.startswith("keras3") and "_lso_" in name and not hasattr(tf.Module, "_checkpoint_adapter"):
        pytest.skip("TensorFlow 2.15 and 2.16 do not: refused with an error, which is tested")


def optimizers(name):
    if name.startswith("keras3"):
        return FAMILIES[0].optimizers
    return tf_keras.optimizers if "_new_" in name else tf_keras.optimizers.legacy


def make(name, meta):
    cls, kwargs = meta["optimizer"]
    config = meta["config"] or {"initial_scale": 256.0, "dynamic_growth_steps": 4}
    return LossScaleOptimizer(getattr(optimizers(name), cls)(**kwargs), **config)


def variables(meta):
    return [tf.Variable(np.zeros_like(recordings.array(meta["initial"][w], "float32")), name=w) for w in ("w0", "w1")]


def counts_skipped(name):
    """Whether a skipped step advanced `iterations` in the original: from TensorFlow 2.3 on, but not in Keras 3."""
    return not name.startswith(("keras3", "tf1", "tf2.0", "tf2.1", "tf2.2"))


def step(name, optimizer, weights, event):
    values = [tf.constant(recordings.array(g, "float32")) for g in event["grads"]]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, values)])
        loss = optimizer.get_scaled_loss(loss) if counts_skipped(name) else optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, weights)
    if counts_skipped(name):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), weights))
    else:
        optimizer.apply(gradients, weights)


def check(optimizer, weights, expected, where, scaled):
    for weight, w in zip(weights, ("w0", "w1")):
        np.testing.assert_allclose(weight, recordings.array(expected[w]), 1e-5, 1e-6, err_msg=f"{where}: {w}")
    assert int(optimizer.iterations) == expected["iterations"], where
    if scaled:
        assert float(optimizer.loss_scale) == expected["loss_scale"], where
        if optimizer.dynamic:
            assert int(optimizer.dynamic_counter) == expected["dynamic_counter"], where


@pytest.mark.table(
    "tf2.4.4_lso_adam-before the first step",
    "tf2.2.3_lso_ftrl-into a built optimizer",
    "tfkeras2.21_new_lso_fixed_adam-before the first step",
    "keras3.15.1_lso_adam-into a built optimizer",
    every=1,
)
@pytest.mark.parametrize("when", ["before the first step", "into a built optimizer"])
@pytest.mark.parametrize("name", names())
def test_a_checkpoint_of_the_original_restores_and_training_goes_on(checkpoints, name, when):
    require_that_tensorflow_says_who_wrote(name)
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer, weights = make(name, meta), variables(meta)
    if when == "into a built optimizer":
        optimizer.build(weights)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1])
    status = checkpoint.read(str(checkpoints / name / "ckpt"))
    ftrl_without_beta = name.endswith("_ftrl")  # `beta` is a hyperparameter of Ftrl only from TensorFlow 2.4 on
    if ftrl_without_beta:
        status.expect_partial()
    elif "_plain_" not in name and when == "into a built optimizer":
        status.assert_consumed()
    else:
        status.assert_existing_objects_matched() if "_plain_" not in name else status.expect_partial()
    scaled = "_plain_" not in name
    if when == "into a built optimizer":
        check(optimizer, weights, meta["at_save"], "after the restore", scaled)
        for slot, values in meta["at_save"].get("slots", {}).items() if "legacy" in type(optimizer).__module__ else ():
            for weight, w in zip(weights, ("w0", "w1")):
                np.testing.assert_array_equal(
                    optimizer.get_slot(weight, slot), recordings.array(values[w], "float32"), f"slot {slot} of {w}"
                )
    for i, event in enumerate(meta["steps_after"]):
        if not scaled and event["event"] != "finite":
            break  # the plain optimizer applied it
        step(name, optimizer, weights, event)
        check(optimizer, weights, meta["trace_after"][i], f"step {i}", scaled)


def test_the_checkpoint_of_another_class_with_a_part_named_inner_optimizer_restores_nothing(tmp_path):
    if not hasattr(tf.Module, "_checkpoint_adapter"):
        pytest.skip("TensorFlow 2.15 and 2.16 do not say which class wrote a checkpoint")
    inner = tf.keras.optimizers.SGD(0.5)
    path = tf.train.Checkpoint(optimizer=tf.train.Checkpoint(inner_optimizer=inner)).write(str(tmp_path / "ckpt"))
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), dynamic=False, initial_scale=8.0)
    tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    assert float(optimizer.learning_rate) == 0.25


def test_where_tensorflow_does_not_say_who_wrote_it_keras_own_checkpoint_is_refused(checkpoints, monkeypatch):
    name = "keras3.15.1_lso_adam"
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer, weights = make(name, meta), variables(meta)
    optimizer.build(weights)
    before = [variable.numpy() for variable in (*optimizer.variables, *weights)]
    monkeypatch.setattr(type(optimizer), "_checkpoint_adapter", lambda self, path: None)  # as in TensorFlow 2.16
    with pytest.raises(ValueError, match=r"keras.optimizers.LossScaleOptimizer wrote .*2\.17 or newer"):
        tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1]).read(str(checkpoints / name / "ckpt"))
    for variable, value in zip((*optimizer.variables, *weights), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("name", [n for n in names() if "_lso_adam" in n])
def test_a_plain_optimizer_reads_what_the_wrapper_saves_and_the_other_way_round(checkpoints, tmp_path, name):
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer, weights = make(name, meta), variables(meta)
    for event in meta["steps_before"]:
        step(name, optimizer, weights, event)
    path = tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1]).write(str(tmp_path / "ours"))

    cls, kwargs = meta["optimizer"]
    plain, twins = getattr(optimizers(name), cls)(**kwargs), variables(meta)
    plain.build(twins) if hasattr(plain, "build") else plain._create_all_weights(twins)
    tf.train.Checkpoint(optimizer=plain, w0=twins[0], w1=twins[1]).read(path).expect_partial()
    for a, b in zip(optimizer.weights, plain.variables() if callable(plain.variables) else plain.variables):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    again, triplets = make(name, meta), variables(meta)
    again.build(triplets)
    tf.train.Checkpoint(optimizer=again, w0=triplets[0], w1=triplets[1]).read(path).assert_consumed()
    assert float(again.loss_scale) == float(optimizer.loss_scale)
    assert int(again.dynamic_counter) == int(optimizer.dynamic_counter)


@pytest.mark.parametrize("name", ["tfkeras2.21_legacy_lso_adam", "tfkeras2.21_new_lso_adam"])
def test_the_originals_read_what_the_wrapper_saves(checkpoints, tmp_path, name):
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer, weights = make(name, meta), variables(meta)
    for event in meta["steps_before"]:
        step(name, optimizer, weights, event)
    path = tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1]).write(str(tmp_path / "ours"))
    cls, kwargs = meta["optimizer"]
    original = tf_keras.mixed_precision.LossScaleOptimizer(getattr(optimizers(name), cls)(**kwargs), **meta["config"])
    twins = variables(meta)
    original.build(twins) if hasattr(original, "build") else original._create_all_weights(twins)
    tf.train.Checkpoint(optimizer=original, w0=twins[0], w1=twins[1]).read(path).assert_consumed()
    assert float(original.loss_scale) == float(optimizer.loss_scale)
    assert int(original.dynamic_counter) == int(optimizer.dynamic_counter)


def weight_files():
    with tarfile.open(ARCHIVE) as archive:
        return sorted({m.name.split("/")[1] for m in archive.getmembers() if "_weights_tf/weights.index" in m.name})


def model_of(name, meta):
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(3, activation="tanh", name="d1"), tf_keras.layers.Dense(1, name="d2")]
    )
    model.build((None, 4))
    model.compile(make(name, meta), "mse")
    return model


@pytest.mark.table(
    "tf2.2.3_model_adam_weights_tf", "tf2.0.4_model_adam_weights_tf", "tf2.4.4_model_adam_weights_tf", every=1
)
@pytest.mark.parametrize("name", weight_files())
def test_weights_that_the_original_saved_load_into_a_model_with_the_wrapper_and_training_goes_on(checkpoints, name):
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    if name.startswith("tf1"):
        pytest.skip("Keras of TensorFlow 1.15 does not count skipped steps: its trajectory is another one")
    model = model_of(name, meta)
    x, y = (recordings.array(meta[key], "float32") for key in ("x", "y"))
    bad = x.copy()
    bad[1, 2] = np.nan
    model.load_weights(str(checkpoints / name / "weights"))
    for i in range(meta["steps_after"]):
        model.train_on_batch(bad if i in meta["nan_steps_after"] else x, y)
        expected = meta["trace_after"][i]
        for weight, wanted in zip(model.get_weights(), expected["weights"]):
            np.testing.assert_allclose(weight, recordings.array(wanted), 2e-5, 2e-6, err_msg=f"step {i}")
        assert float(model.optimizer.loss_scale) == expected["loss_scale"], i
        assert int(model.optimizer.dynamic_counter) == expected["dynamic_counter"], i
        assert int(model.optimizer.iterations) == expected["iterations"], i
