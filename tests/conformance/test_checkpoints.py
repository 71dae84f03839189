"""Checkpoints that the originals wrote are read, and training goes on as it did there."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations
from tests.conformance import checkpoints, recordings
from tests.families import FAMILIES, tf_keras
from tf_lossscale import LossScaleOptimizer


def optimizers(name):
    if name.startswith("keras3"):
        return FAMILIES[0].optimizers
    return tf_keras.optimizers if "_new_" in name else tf_keras.optimizers.legacy


def make(name, meta, wrapper=LossScaleOptimizer):
    cls, kwargs = meta["optimizer"]
    config = meta["config"] or {"initial_scale": 256.0, "dynamic_growth_steps": 4}
    return wrapper(getattr(optimizers(name), cls)(**kwargs), **config)


def plain(optimizer, **config):
    return optimizer


def build(optimizer, weights):
    optimizer.build(weights) if hasattr(optimizer, "build") else optimizer._create_all_weights(weights)


def in_checkpoint(optimizer, weights):
    return tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1])


def require_that_tensorflow_says_who_wrote(name):
    if name.startswith("keras3") and "_lso_" in name and not hasattr(tf.Module, "_checkpoint_adapter"):
        pytest.skip("TensorFlow 2.15 and 2.16 do not: refused with an error, which is tested")


@pytest.mark.parametrize(
    ("name", "when"),
    combinations(
        checkpoints.OF_OPTIMIZERS, ["before the first step", "into a built optimizer"], usual=6, others=pytest.mark.slow
    ),
)
def test_a_checkpoint_of_the_original_restores_and_training_goes_on(name, when):
    require_that_tensorflow_says_who_wrote(name)
    folder, meta = recordings.checkpoint(name)
    optimizer, weights = make(name, meta), checkpoints.variables(meta)
    is_built, scaled = when == "into a built optimizer", "_plain_" not in name
    if is_built:
        optimizer.build(weights)
    status = in_checkpoint(optimizer, weights).read(str(folder / "ckpt"))
    if not scaled or name.endswith("_ftrl"):  # `beta` is a hyperparameter of Ftrl only from TensorFlow 2.4 on
        status.expect_partial()
    else:
        status.assert_consumed() if is_built else status.assert_existing_objects_matched()
    if is_built:
        checkpoints.check(optimizer, weights, meta["at_save"], "after the restore", scaled)
        for slot, values in meta["at_save"].get("slots", {}).items() if "legacy" in type(optimizer).__module__ else ():
            for weight, w in zip(weights, ("w0", "w1")):
                np.testing.assert_array_equal(
                    optimizer.get_slot(weight, slot), recordings.array(values[w], "float32"), f"slot {slot} of {w}"
                )
    for i, event in enumerate(meta["steps_after"]):
        if not scaled and event["event"] != "finite":
            break  # the plain optimizer applied it
        checkpoints.step_of(name, optimizer, weights, event)
        checkpoints.check(optimizer, weights, meta["trace_after"][i], f"step {i}", scaled)


def test_the_checkpoint_of_another_class_with_a_part_named_inner_optimizer_restores_nothing(tmp_path):
    if not hasattr(tf.Module, "_checkpoint_adapter"):
        pytest.skip("TensorFlow 2.15 and 2.16 do not say which class wrote a checkpoint")
    inner = tf.keras.optimizers.SGD(0.5)
    path = tf.train.Checkpoint(optimizer=tf.train.Checkpoint(inner_optimizer=inner)).write(str(tmp_path / "ckpt"))
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), dynamic=False, initial_scale=8.0)
    tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    assert float(optimizer.learning_rate) == 0.25


def test_where_tensorflow_does_not_say_who_wrote_it_keras_own_checkpoint_is_refused(monkeypatch):
    name = "keras3.15.1_lso_adam"
    folder, meta = recordings.checkpoint(name)
    optimizer, weights = make(name, meta), checkpoints.variables(meta)
    optimizer.build(weights)
    before = [variable.numpy() for variable in (*optimizer.variables, *weights)]
    monkeypatch.setattr(type(optimizer), "_checkpoint_adapter", lambda self, path: None)  # as in TensorFlow 2.16
    with pytest.raises(ValueError, match=r"keras.optimizers.LossScaleOptimizer wrote .*2\.17 or newer"):
        in_checkpoint(optimizer, weights).read(str(folder / "ckpt"))
    for variable, value in zip((*optimizer.variables, *weights), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("name", [n for n in checkpoints.OF_OPTIMIZERS if "_lso_adam" in n])
def test_plain_optimizers_and_the_originals_read_what_the_wrapper_saves(tmp_path, name):
    _, meta = recordings.checkpoint(name)
    optimizer, weights = make(name, meta), checkpoints.variables(meta)
    for event in meta["steps_before"]:
        checkpoints.step_of(name, optimizer, weights, event)
    path = in_checkpoint(optimizer, weights).write(str(tmp_path / "ours"))
    wrappers = [plain, LossScaleOptimizer]
    wrappers += [tf_keras.mixed_precision.LossScaleOptimizer] if name.startswith("tfkeras") else []
    for wrapper in wrappers:
        again, twins = make(name, meta, wrapper), checkpoints.variables(meta)
        build(again, twins)
        status = in_checkpoint(again, twins).read(path)
        if wrapper is plain:
            status.expect_partial()
            values = again.variables() if callable(again.variables) else again.variables
            for a, b in zip(optimizer.weights, values):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            status.assert_consumed()
            assert float(again.loss_scale) == float(optimizer.loss_scale)
            assert int(again.dynamic_counter) == int(optimizer.dynamic_counter)


@pytest.mark.parametrize(
    "name",
    combinations(
        [n for n in checkpoints.OF_MODELS if n.endswith("_weights_tf") and n[:3] != "tf1"],
        usual=["tf2.2.3_model_adam_weights_tf", "tf2.0.4_model_adam_weights_tf", "tf2.4.4_model_adam_weights_tf"],
        others=pytest.mark.slow,
    ),
)
def test_weights_that_the_original_saved_load_into_a_model_with_the_wrapper_and_training_goes_on(name):
    _, meta = recordings.checkpoint(name)
    dense = tf_keras.layers.Dense
    model = tf_keras.Sequential([dense(3, activation="tanh", name="d1"), dense(1, name="d2")])
    model.build((None, 4))
    model.compile(make(name, meta), "mse")
    model.load_weights(str(checkpoints.path(name)))
    for i, (x, y) in enumerate(checkpoints.batches(meta)):
        model.train_on_batch(x, y)
        checkpoints.check(model.optimizer, model.get_weights(), meta["trace_after"][i], f"step {i}", tolerance=2e-5)
