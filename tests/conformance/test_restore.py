"""What the originals wrote goes into today's optimizers by `migrate.restore`, and training goes on as it did there."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.cases import combinations, slow_one_in
from tests.conformance import checkpoints, recordings
from tf_lossscale import LossScaleOptimizer, migrate

TARGETS = {
    "keras3": tf.keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "tf_keras_legacy": tf_keras.optimizers.legacy,
}


def make(target, meta):
    name, kwargs = meta["optimizer"]
    name = {"AdamOptimizer": "Adam", "MomentumOptimizer": "SGD"}.get(name, name)
    config = meta.get("config")
    if "wrapper" in meta:
        old = meta["wrapper_kwargs"]
        config = {"initial_scale": 256.0, "dynamic_growth_steps": old.get("increment_period", 2000)}
        factor = old.get("multiplier", 2.0)
        config |= {"growth_factor": factor, "backoff_factor": 1 / factor}
    return LossScaleOptimizer(getattr(TARGETS[target], name)(**kwargs), **(config or {"initial_scale": 256.0}))


@pytest.mark.parametrize(
    ("name", "target"),
    combinations([*checkpoints.OF_OPTIMIZERS, *checkpoints.OF_TF1], TARGETS, usual=8, others=slow_one_in(3)),
)
def test_an_optimizer_of_another_library_goes_on_where_the_original_stopped(name, target):
    folder, meta = recordings.checkpoint(name)
    optimizer, weights = make(target, meta), checkpoints.variables(meta)
    restored = migrate.restore(folder / "ckpt", optimizer, weights)
    iterations, loss_scale, counter = checkpoints.counts(meta["at_save"])
    dynamic = counter is not None
    assert restored.iterations == iterations
    assert (restored.loss_scale, restored.dynamic_counter) == ((loss_scale, counter) if dynamic else (None, None))
    checkpoints.check(optimizer, None, meta["at_save"], "after the restore", dynamic)
    assert dynamic or float(optimizer.loss_scale) == optimizer.initial_scale
    other_formula = "_nadam" in name and target != "tf_keras_legacy"  # the one whose steps differ visibly
    assert any("so the steps differ" in note for note in restored.notes) == other_formula
    for i, (event, expected) in enumerate(zip(meta["steps_after"], meta["trace_after"])):
        if ("_plain_" in name or "_fixed_" in name) and event["event"] != "finite":
            break  # applied there, in another way here
        checkpoints.step_of(name, optimizer, weights, event)
        scaled = dynamic and "contrib" not in name  # contrib's managers move the scale by a rule of their own
        checkpoints.check(optimizer, None if other_formula else weights, expected, f"step {i}", scaled)


@pytest.mark.parametrize("target", TARGETS)
def test_the_momentum_of_tensorflow_1_is_multiplied_by_the_learning_rate_of_the_restored_step(target):
    _, meta = recordings.checkpoint("tf1.15.5_mpls_momentum_saver")
    library = tf.keras if target == "keras3" else tf_keras
    schedule, slots = library.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.25), []
    for rate in (1.0, schedule):
        optimizer, weights = TARGETS[target].SGD(rate, momentum=0.9), checkpoints.variables(meta)
        restored = migrate.restore(checkpoints.path("tf1.15.5_mpls_momentum_saver"), optimizer, weights)
        legacy = target == "tf_keras_legacy"
        slots.append([optimizer.get_slot(w, "momentum") for w in weights] if legacy else optimizer.momentums)
    assert restored.iterations > 0
    for of_one, of_schedule in zip(*slots):
        np.testing.assert_allclose(of_schedule, of_one * schedule(restored.iterations), 1e-6)


@functools.cache
def model_of(library):
    dense = library.layers.Dense
    model = library.Sequential([dense(3, activation="tanh", name="d1"), dense(1, name="d2")])
    model.build((None, 4))
    return model


def targets(name):
    """Keras 3 and the library that wrote the file."""
    own = "tf_keras" if "_new_" in name else "tf_keras_legacy"
    return ["keras3"] if name.startswith("keras3") else ["keras3", own]


@pytest.mark.parametrize(
    ("name", "target"),
    combinations(
        [(name, target) for name in checkpoints.OF_MODELS for target in targets(name)], usual=8, others=pytest.mark.slow
    ),
)
def test_a_model_file_of_any_format_goes_on_in_its_own_library_and_in_keras_3(name, target):
    _, meta = recordings.checkpoint(name)
    optimizer = LossScaleOptimizer(TARGETS[target].Adam(0.05), **meta["config"])
    model = model_of(tf.keras if target == "keras3" else tf_keras)
    source = checkpoints.path(name)
    if source.suffix == ".keras":
        loaded = (tf.keras if "keras3" in name else tf_keras).models.load_model(source)
        model.set_weights(loaded.get_weights())
        source = loaded.optimizer
    restored = migrate.restore(source, optimizer, model.trainable_variables)
    saved = meta["at_save"]
    for weight, expected in zip(model.get_weights(), saved["weights"]):
        np.testing.assert_array_equal(weight, recordings.array(expected, "float32"))
    if name == "tfkeras2.21_legacy_model_adam_keras":
        assert restored.iterations is None, "this original keeps nothing of its optimizer in .keras files"
        return
    assert restored.iterations == saved["iterations"]
    lost = "keras3" not in name and name.endswith(("_h5", "_keras"))  # by the originals: never in the file
    # A model that was loaded from a .keras file without a scale starts again with the initial one.
    started = (meta["config"]["initial_scale"], 0) if name.endswith("_keras") else (None, None)
    at_save = (saved["loss_scale"], saved["dynamic_counter"])
    assert (restored.loss_scale, restored.dynamic_counter) == (started if lost else at_save)
    optimizer.set_state({name: saved[name] for name in ("loss_scale", "dynamic_counter")})
    for i, (x, y) in enumerate(checkpoints.batches(meta)):
        loss = functools.partial(lambda x, y: tf.reduce_mean((model(x) - y) ** 2), x, y)
        checkpoints.step(name, optimizer, model.trainable_variables, loss)
        checkpoints.check(optimizer, model.get_weights(), meta["trace_after"][i], f"step {i}", tolerance=2e-5)
