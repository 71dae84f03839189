"""What the originals wrote goes into today's optimizers by `migrate.restore`, and training goes on as it did there."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.conformance import recordings
from tests.conformance.test_checkpoints import ARCHIVE, checkpoints, counts_skipped, names, variables  # noqa: F401
from tf_lossscale import LossScaleOptimizer, migrate

TARGETS = {
    "keras3": tf.keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "tf_keras_legacy": tf_keras.optimizers.legacy,
}
OLD = [
    f"tf1.15.5_{each}"
    for each in ("mpls_adam_saver", "mpls_momentum_saver", "contrib_adam_saver", "mpls_adam_checkpoint")
]


def step(optimizer, weights, event, name):
    values = [tf.constant(recordings.array(g, "float32")) for g in event["grads"]]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, values)])
        loss = optimizer.get_scaled_loss(loss) if counts_skipped(name) else optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, weights)
    if counts_skipped(name):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), weights))
    else:
        optimizer.apply(gradients, weights)


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


def same(got, expected, where):
    np.testing.assert_allclose(got, recordings.array(expected), 1e-5, 1e-6, err_msg=where)


@pytest.mark.table(
    "tfkeras2.21_new_lso_fixed_adam-keras3",
    "tfkeras2.21_new_plain_adam_no_wrapper-tf_keras",
    "tfkeras2.21_legacy_lso_sgd_momentum-tf_keras_legacy",
    "tfkeras2.21_legacy_lso_fixed_adam-keras3",
    "tfkeras2.21_legacy_plain_adam_no_wrapper-keras3",
    "tf2.8.4_plain_adam_no_wrapper-keras3",
    "tf1.15.5_mpls_momentum_saver-tf_keras_legacy",
    "tf2.0.4_lso_fixed_adam-tf_keras_legacy",
    every=7,
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*names(), *OLD])
def test_an_optimizer_of_another_library_goes_on_where_the_original_stopped(checkpoints, name, target):  # noqa: F811
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer, weights = make(target, meta), variables(meta)
    restored = migrate.restore(checkpoints / name / "ckpt", optimizer, weights)
    saved, contrib = meta["at_save"], "contrib" in name
    counter = "good_steps" if name in OLD else "dynamic_counter"
    count = "global_step" if name in OLD else "iterations"
    assert restored.iterations == int(optimizer.iterations) == saved[count]
    dynamic = saved.get(counter) is not None
    assert (restored.loss_scale is not None) == dynamic
    if dynamic:
        assert float(optimizer.loss_scale) == saved["loss_scale"] == restored.loss_scale
        assert int(optimizer.dynamic_counter) == saved[counter] == restored.dynamic_counter
    else:
        assert float(optimizer.loss_scale) == optimizer.initial_scale
    other_formula = "_nadam" in name and target != "tf_keras_legacy"  # the one whose steps differ visibly
    assert any("so the steps differ" in note for note in restored.notes) == other_formula
    for i, (event, expected) in enumerate(zip(meta["steps_after"], meta["trace_after"])):
        if ("_plain_" in name or "_fixed_" in name) and event["event"] != "finite":
            break  # applied there, in another way here
        step(optimizer, weights, event, name)
        for weight, w in zip(weights, ("w0", "w1")):
            if not other_formula:
                same(weight, expected[w], f"step {i}: {w}")
        assert int(optimizer.iterations) == expected[count], i
        if dynamic and not contrib:  # contrib's managers move the scale by a rule of their own
            np.testing.assert_allclose(float(optimizer.loss_scale), expected["loss_scale"], 1e-6)
            assert int(optimizer.dynamic_counter) == expected[counter], i


MODELS = ["savedmodel", "h5", "keras", "weights_tf"]
FILES = {"savedmodel": "model_savedmodel", "h5": "model.h5", "keras": "model.keras", "weights_tf": "weights"}


def model_files():
    import tarfile

    with tarfile.open(ARCHIVE) as archive:
        there = {member.name.removeprefix("./") for member in archive.getmembers()}
    for folder in sorted({name.split("/")[0] for name in there}):
        kind = folder.rpartition("model_adam_")[2]
        if "model_adam" in folder and {f"{folder}/{FILES[kind]}", f"{folder}/{FILES[kind]}.index"} & there:
            yield folder


@pytest.fixture(scope="session")
def models():
    made = {}
    for library in (tf.keras, tf_keras):
        dense = library.layers.Dense
        made[library] = library.Sequential([dense(3, activation="tanh", name="d1"), dense(1, name="d2")])
        made[library].build((None, 4))
    return made


def fitting(name):
    """The target that is of the library that wrote the file; Keras 3, which is a target anyway, for its own."""
    return "tf_keras" if "_new_" in name else "tf_keras_legacy"


@pytest.mark.table(
    "tfkeras2.21_legacy_model_adam_keras-keras3",
    "tf2.2.3_model_adam_weights_tf-tf_keras_legacy",
    "tfkeras2.21_new_model_adam_h5-tf_keras",
    "tf2.0.4_model_adam_savedmodel-tf_keras_legacy",
    "tf1.15.5_model_adam_weights_tf-tf_keras_legacy",
    "tf2.8.4_model_adam_h5-tf_keras_legacy",
    "tf2.0.4_model_adam_weights_tf-keras3",
    "tf2.1.4_model_adam_weights_tf-keras3",
    every=7,
)
@pytest.mark.parametrize(
    ("name", "target"),
    [(n, t) for n in model_files() for t in ("keras3", fitting(n)) if t == "keras3" or not n.startswith("keras3")],
)
def test_a_model_file_of_any_format_goes_on_in_its_own_library_and_in_keras_3(checkpoints, models, name, target):  # noqa: F811
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    optimizer = LossScaleOptimizer(TARGETS[target].Adam(0.05), **meta["config"])
    model = models[tf.keras if target == "keras3" else tf_keras]
    source = checkpoints / name / FILES[name.rpartition("model_adam_")[2]]
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

    x, y = (recordings.array(meta[key], "float32") for key in ("x", "y"))
    bad = x.copy()
    bad[1, 2] = np.nan
    for i in range(meta["steps_after"]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(bad if i in meta["nan_steps_after"] else x) - y) ** 2)
            scaled = optimizer.get_scaled_loss(loss) if counts_skipped(name) else optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if counts_skipped(name):
            gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        else:
            optimizer.apply(gradients, model.trainable_variables)
        expected = meta["trace_after"][i]
        for weight, wanted in zip(model.get_weights(), expected["weights"]):
            np.testing.assert_allclose(weight, recordings.array(wanted), 2e-5, 2e-6, err_msg=f"step {i}")
        assert int(optimizer.iterations) == expected["iterations"], i
        assert float(optimizer.loss_scale) == expected["loss_scale"], i
        assert int(optimizer.dynamic_counter) == expected["dynamic_counter"], i
