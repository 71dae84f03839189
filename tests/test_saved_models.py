"""A model that was saved goes on as if it had not been: scale, counter, iterations and slots, in every format."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.cases import combinations
from tests.families import FAMILIES, keras_2_families
from tf_lossscale import LossScaleOptimizer, migrate

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BAD = np.where(np.arange(4) == 2, np.nan, X).astype("float32")
FORMATS = {"keras3": ["keras", "h5"], "tf_keras": ["keras", "h5", "tf"], "tf_keras_legacy": ["keras", "h5", "tf"]}
# These loaders never ask an optimizer for its iterations and slots.
WITHOUT_SLOTS = ["tf_keras-tf", "tf_keras_legacy-tf", "tf_keras_legacy-keras"]
CASES = [pytest.param(f, kind, id=f"{f.name}-{kind}") for f in FAMILIES for kind in FORMATS[f.name]]
KEPT = [case for case in CASES if case.id not in WITHOUT_SLOTS]
LEFT_OUT = [case for case in CASES if case.id in WITHOUT_SLOTS]


def model_of(family, **kwargs):
    dense = family.keras.layers.Dense
    half = dense(3, activation="tanh", dtype="mixed_float16")
    model = family.keras.Sequential([family.keras.Input((4,)), half, dense(1, dtype="float32")])
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=256.0, dynamic_growth_steps=4, **kwargs)
    model.compile(optimizer, family.keras.losses.MeanSquaredError())
    return model


def train(model, steps, bad=1):
    for i in range(steps):
        model.train_on_batch(BAD if i == bad else X, Y)


def saved(model, kind, tmp_path):
    path = str(tmp_path / {"keras": "model.keras", "h5": "model.h5", "tf": "saved"}[kind])
    model.save(path, **({"save_format": "tf"} if kind == "tf" else {}))
    return path


def assert_goes_on_the_same(model, loaded):
    for i in range(7):
        for each in (model, loaded):
            each.train_on_batch(BAD if i == 2 else X, Y)
        for a, b in zip(model.get_weights(), loaded.get_weights()):
            np.testing.assert_array_equal(a, b, err_msg=f"step {i}")
        assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale), i
        assert int(loaded.optimizer.dynamic_counter) == int(model.optimizer.dynamic_counter), i
        assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations), i


def trained_and_loaded(family, kind, tmp_path):
    """A model that took five steps, its file, and the model that was loaded from the file."""
    model = model_of(family)
    train(model, 5)
    path = saved(model, kind, tmp_path)
    loaded = family.keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert (float(loaded.optimizer.loss_scale), int(loaded.optimizer.dynamic_counter)) == (128.0, 3)
    assert loaded.optimizer.initial_scale == 256.0
    return model, path, loaded


@pytest.mark.parametrize(("family", "kind"), combinations(KEPT, usual=["keras3-keras", "tf_keras_legacy-h5"]))
def test_scale_and_counter_survive_and_training_goes_on_bit_by_bit(family, kind, tmp_path):
    model, _, loaded = trained_and_loaded(family, kind, tmp_path)
    assert_goes_on_the_same(model, loaded)


@pytest.mark.parametrize(("family", "kind"), combinations(LEFT_OUT, usual=["tf_keras-tf", "tf_keras_legacy-keras"]))
def test_restore_loads_the_slots_that_a_loader_leaves_out(family, kind, tmp_path):
    model, path, loaded = trained_and_loaded(family, kind, tmp_path)
    assert int(loaded.optimizer.iterations) == 0, "if this is kept now, so may be the slots"
    if kind == "tf":  # they are not in a .keras file of a legacy optimizer
        restored = migrate.restore(path, loaded.optimizer, loaded.trainable_variables)
        assert (restored.loss_scale, restored.dynamic_counter) == (128.0, 3)
        assert not any("not restored" in note for note in restored.notes)
        assert loaded.optimizer.state() == model.optimizer.state()
        assert_goes_on_the_same(model, loaded)


def test_an_h5_file_keeps_a_variable_that_the_optimizer_made_without_a_name(tmp_path):
    keras = tf.keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.Nadam(0.1)), keras.losses.MeanSquaredError())
    train(model, 3)
    model.save(tmp_path / "model.h5")
    assert_goes_on_the_same(model, keras.models.load_model(tmp_path / "model.h5"))


@pytest.mark.parametrize("trains_the_same", [True, False])
def test_slots_of_an_h5_file_never_go_to_other_layers(trains_the_same, tmp_path, caplog):
    keras = tf.keras
    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(2))])
    model.layers[1].trainable = False
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.1)), keras.losses.MeanSquaredError())
    model.train_on_batch(X[:, :3], X[:, 1:])
    model.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5")
    if not trains_the_same:
        loaded.layers[0].trainable, loaded.layers[1].trainable = False, True
    loaded.optimizer.build(loaded.trainable_variables)
    old, new = (each.optimizer.inner_optimizer._momentums[0].numpy() for each in (model, loaded))
    assert ("of other names or shapes" in caplog.text) != trains_the_same
    np.testing.assert_array_equal(new, old if trains_the_same else np.zeros_like(old))
    assert int(loaded.optimizer.iterations) == trains_the_same


@pytest.mark.parametrize(("family", "kind"), combinations(CASES, usual=["keras3-h5", "tf_keras-keras"]))
def test_a_model_that_was_loaded_is_saved_and_loaded_again(family, kind, tmp_path):
    model = model_of(family, hysteresis=3)
    model.train_on_batch(X, Y)
    model.optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0, "bad_steps": 2})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        model = family.keras.models.load_model(saved(model, kind, tmp_path / name))
    state = model.optimizer.state()
    assert (state["loss_scale"], state["dynamic_counter"], state["bad_steps"]) == (64.0, 0, 2)


@pytest.mark.parametrize("family", combinations(FAMILIES, usual=["keras3"]))
def test_a_checkpoint_after_fit_holds_no_slot_twice_and_goes_on_bit_by_bit(family, tmp_path):
    model, again = model_of(family), model_of(family)
    model.fit(X, Y, batch_size=2, epochs=1, verbose=0)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    names = [name for name, _ in tf.train.list_variables(path)]
    # Kernels and biases of two layers, two slots each, once.
    slots = [shape for name, shape in tf.train.list_variables(path) if "SLOT" in name or "/_variables/" in name]
    assert sorted(slots) == sorted([[3], [3], [1], [1], [4, 3], [4, 3], [3, 1], [3, 1]])
    assert sum("current_loss_scale" in name for name in names) == 1
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(path)
    again.train_on_batch(X, Y)
    model.train_on_batch(X, Y)
    for a, b in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert float(model.optimizer.loss_scale) == float(again.optimizer.loss_scale)


@keras_2_families
def test_a_model_file_of_ours_is_read_by_the_original_under_its_own_name(family, tmp_path):
    model = model_of(family)
    train(model, 5)
    original = tf_keras.mixed_precision.LossScaleOptimizer
    names = {f"{package}>LossScaleOptimizer": original for package in ("tf_lossscale", "tf_lossscale.legacy")}
    loaded = tf_keras.models.load_model(saved(model, "h5", tmp_path), custom_objects=names)
    assert isinstance(loaded.optimizer, original)
    for a, b in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(loaded.train_on_batch(X, Y))


@pytest.mark.parametrize(
    ("built", "family"),
    combinations([True, False], FAMILIES, usual=["False-keras3", "True-tf_keras_legacy"]),
)
def test_weights_alone_are_loaded_whether_the_optimizer_was_built_or_not(family, built, tmp_path):
    model, loaded = model_of(family), model_of(family)
    train(model, 5)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    if built:
        loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if built and family.name != "tf_keras_legacy":  # of which such a file holds nothing
        assert loaded.optimizer.state()["loss_scale"] == model.optimizer.state()["loss_scale"] == 128.0
    train(loaded, 1)
    assert all(np.isfinite(weights).all() for weights in loaded.get_weights())


@pytest.mark.parametrize("kind", combinations(["h5", "tf"], usual=["h5"]))
def test_in_graph_mode_scale_and_counts_survive_and_go_on_in_a_graph_and_in_eager_mode(kind, tmp_path):
    def state(model):
        return model.optimizer._state()

    load = tf_keras.models.load_model
    with tf.Graph().as_default():
        model = model_of(FAMILIES[2])
        train(model, 5)
        path, before = saved(model, kind, tmp_path), state(model)
        train(model, 5)
        after = state(model)
    assert (before["loss_scale"], before["dynamic_counter"], before["skipped_steps"]) == (128.0, 3, 1)
    with tf.Graph().as_default():
        loaded = load(path)
        assert state(loaded) == before
        train(loaded, 5)
        assert state(loaded) == after
    loaded = load(path)
    assert loaded.optimizer.state() == before
    path = saved(loaded, "h5", tmp_path)
    with tf.Graph().as_default():
        assert state(load(path)) == before


@pytest.mark.slow
def test_in_graph_mode_a_saved_model_has_no_iterations_and_keras_files_cannot_be_saved_as_without_the_wrapper(tmp_path):
    def model_without():
        model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])
        model.compile(FAMILIES[2].adam(), "mse")
        return model

    for make in (model_without, lambda: model_of(FAMILIES[2])):
        with tf.Graph().as_default():
            model = make()
            train(model, 2)
            loaded = tf_keras.models.load_model(saved(model, "tf", tmp_path))
            assert tf_keras.backend.get_value(loaded.optimizer.iterations) == 0
            with pytest.raises(NotImplementedError, match="only available when eager execution is enabled"):
                saved(model, "keras", tmp_path)
