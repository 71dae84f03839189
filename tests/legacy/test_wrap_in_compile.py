"""wrap_in_compile() changes the class that `compile` wraps optimizers in, nothing else, and can be undone."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests.cases import combinations
from tests.families import FAMILIES, families, tf_keras
from tests.legacy.test_install import fresh, state_of_the_modules
from tf_lossscale import LossScaleOptimizer

KERAS3 = FAMILIES[0]


@pytest.fixture(autouse=True)
def mixed_precision():
    for keras in (tf.keras, tf_keras):
        keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    for keras in (tf.keras, tf_keras):
        keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def ours():
    with tf_lossscale.wrap_in_compile() as installation:
        yield installation


def model_of(family, optimizer=None):
    family.keras.utils.set_random_seed(0)
    layers = family.keras.layers
    model = family.keras.Sequential(
        [layers.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(1, dtype="float32")]
    )
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def is_made_by_compile(family):
    """Whether `compile` wraps an optimizer of a family in our class."""
    return isinstance(model_of(family, family.sgd()).optimizer, LossScaleOptimizer)


def data(n=16, overflow_in=None):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if overflow_in is not None:
        x[overflow_in] = 1e30  # infinite in float16
    return x, y


def fit(model, x, y):
    model.fit(x, y, batch_size=len(x), epochs=1, verbose=0, shuffle=False)


# What compile makes. --------------------------------------------------------------------------------------------------


@families
def test_an_optimizer_that_is_wrapped_already_stays_as_it_is(ours, family):
    own = {"keras3": "optimizers"}.get(family.name, "mixed_precision")
    for wrapper in (LossScaleOptimizer(family.sgd()), getattr(family.keras, own).LossScaleOptimizer(family.sgd())):
        assert model_of(family, wrapper).optimizer is wrapper


@families
def test_compile_wraps_only_under_mixed_float16_whenever_the_policy_is_set(family):
    mixed_precision = family.keras.mixed_precision
    mixed_precision.set_global_policy("float32")
    with tf_lossscale.wrap_in_compile():
        in_float32 = model_of(family)
        mixed_precision.set_global_policy("mixed_float16")
        in_float16 = model_of(family)
        mixed_precision.set_global_policy("mixed_bfloat16")
        in_bfloat16 = model_of(family)
        for model in (in_float32, in_float16, in_bfloat16):
            model.compile(family.sgd(), "mse")
            assert isinstance(model.optimizer, LossScaleOptimizer) is (model is in_float16)


def test_auto_scale_loss_false_is_kept(ours):
    model = model_of(KERAS3)
    model.compile(KERAS3.sgd(), "mse", auto_scale_loss=False)
    assert not isinstance(model.optimizer, KERAS3.optimizers.LossScaleOptimizer)


# Files. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "writer"),
    combinations(["ours", "Keras's own"], ["ours", "Keras's own"], usual=["ours-Keras's own", "Keras's own-ours"]),
)
def test_a_keras_file_goes_on_with_the_class_of_the_process_that_loads_it(writer, reader, tmp_path):
    def under(name, action):
        if name == "ours":
            with tf_lossscale.wrap_in_compile():
                return action()
        return action()

    model = under(writer, lambda: model_of(KERAS3, KERAS3.adam()))
    fit(model, *data())
    fit(model, *data(overflow_in=3))
    fit(model, *data())
    model.save(tmp_path / "model.keras")
    loaded = under(reader, lambda: tf.keras.models.load_model(tmp_path / "model.keras"))
    assert isinstance(model.optimizer, LossScaleOptimizer) is (writer == "ours")
    assert isinstance(loaded.optimizer, LossScaleOptimizer) is (reader == "ours")
    for optimizer in (model.optimizer, loaded.optimizer):
        assert float(optimizer.dynamic_scale) == 2.0**14
        assert int(optimizer.step_counter) == 1
    for each in (model, loaded):
        fit(each, *data())
    for a, b in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_a_file_that_tf_keras_s_own_class_wrote_is_loaded_and_one_of_ours_keeps_the_scale(tmp_path):
    family = FAMILIES[1]
    own = model_of(family, family.adam())
    fit(own, *data())
    own.save(tmp_path / "own.keras")
    with tf_lossscale.wrap_in_compile():
        ours = model_of(family, family.adam())
        fit(ours, *data(overflow_in=3))
        ours.save(tmp_path / "ours.keras")
        loaded = [family.keras.models.load_model(tmp_path / f"{name}.keras").optimizer for name in ("own", "ours")]
    assert all(isinstance(optimizer, LossScaleOptimizer) for optimizer in loaded)
    assert [float(optimizer.loss_scale) for optimizer in loaded] == [2.0**15, 2.0**14]
    assert int(loaded[0].iterations) == 1


@pytest.mark.slow
def test_a_keras_file_of_what_compile_wrapped_loads_in_a_process_without_the_package(ours, tmp_path):
    model_of(KERAS3, KERAS3.adam()).save(tmp_path / "model.keras")
    code = f"""
        import json, sys
        import tensorflow as tf
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
        optimizer = tf.keras.models.load_model("{tmp_path}/model.keras").optimizer
        print(json.dumps([type(optimizer).__module__, "tf_lossscale" in sys.modules]))
    """
    assert fresh(code) == ["keras.src.optimizers.loss_scale_optimizer", False]


# Narrow, and undone. --------------------------------------------------------------------------------------------------


def test_the_name_in_the_modules_with_compile_is_all_that_changes():
    before, modules, finders = state_of_the_modules()
    with tf_lossscale.wrap_in_compile():
        content = state_of_the_modules()[0]
    changed = {f"{name}.{key}" for name in before for key in content[name] if content[name][key] != before[name][key]}
    expected = {
        "keras.src.trainers.trainer.LossScaleOptimizer",
        "keras.src.trainers.trainer.optimizers",
        "tf_keras.src.engine.training.lso",
        "tf_keras.src.engine.training.optimizers",
        "tf_keras.src.engine.training_v1.optimizers",
        "tf_keras.src.engine.training_v1.loss_scale_optimizer",
        "tf_keras.src.engine.training_eager_v1.loss_scale_optimizer",
    }
    if tf_keras.__name__ == "keras":
        expected = {name.replace("tf_keras", "keras") for name in expected if name.startswith("tf_keras")}
    assert changed == expected
    assert state_of_the_modules() == (before, modules, finders)


@pytest.mark.parametrize("family", combinations(FAMILIES, usual=["keras3"]))
def test_undone_means_the_library_s_own_class_and_method_again(family):
    compile_, base = family.keras.Model.compile, family.keras.Model
    installation = tf_lossscale.wrap_in_compile()
    assert base.compile is not compile_
    assert inspect.signature(base.compile) == inspect.signature(compile_)
    made_before = model_of(family, family.sgd())
    assert is_made_by_compile(family)
    installation.undo()
    installation.undo()
    assert base.compile is compile_
    assert not is_made_by_compile(family)
    assert "LossScaleOptimizer" in type(model_of(family, family.sgd()).optimizer).__name__
    fit(made_before, *data())
    assert int(made_before.optimizer.dynamic_counter) == 1


def test_with_install_each_stays_until_it_is_undone_itself_in_any_order():
    before = state_of_the_modules()[0]
    for first, second in (("install", "wrap_in_compile"), ("wrap_in_compile", "install")):
        for undone_first in (first, second):
            calls = {name: getattr(tf_lossscale, name)() for name in (first, second)}
            assert is_made_by_compile(KERAS3)
            calls.pop(undone_first).undo()
            assert is_made_by_compile(KERAS3)
            assert hasattr(tf.keras.mixed_precision, "experimental") is ("install" in calls)
            calls.popitem()[1].undo()
            assert not is_made_by_compile(KERAS3)
            assert state_of_the_modules()[0] == before


def test_an_optimizer_of_keras_1_is_refused_by_keras_itself(ours):
    from tf_keras.src.optimizers import optimizer_v1

    for optimizer in (optimizer_v1.SGD(1.0), "no_such_optimizer", 3):
        with pytest.raises(ValueError):
            model_of(FAMILIES[1], optimizer)
