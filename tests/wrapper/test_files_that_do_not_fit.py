"""Files whose optimizer has other variables than the one that takes them load, as those of a bare optimizer do."""

import functools

import pytest
import tensorflow as tf
from absl import logging

from tests.families import families
from tf_lossscale import LossScaleOptimizer


def trained(family, trainable, optimizer):
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.layers[0].trainable = trainable
    model.compile(optimizer, keras.losses.MeanSquaredError())
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains a model, and saves it in each format after a layer was frozen or thawed."""

    @functools.cache
    def save(family, frozen):
        folder = tmp_path_factory.mktemp("saved")
        model = trained(family, frozen == "after", LossScaleOptimizer(family.adam(), initial_scale=64.0))
        model.save_weights(folder / "model.weights.h5")
        model.layers[0].trainable = frozen == "before"
        for name in ("model.keras", "model.h5", "saved"):
            if name != "saved" or family.name != "keras3":
                model.save(folder / name)
        return folder

    return save


def goes_on(model):
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    return int(model.optimizer.iterations), float(model.optimizer.loss_scale), int(model.optimizer.dynamic_counter)


@pytest.mark.table("after-model.h5-keras3", "before-saved-tf_keras_legacy", "after-model.h5-tf_keras", every=1)
@families
@pytest.mark.parametrize("name", ["model.keras", "model.h5", "saved"])
@pytest.mark.parametrize("frozen", ["before", "after"])
def test_a_model_with_a_layer_frozen_or_thawed_after_training_loads_and_goes_on(family, name, frozen, saved):
    if name == "saved" and family.name == "keras3":
        pytest.skip("Keras 3 saves no SavedModel that it loads again")
    loaded = family.keras.models.load_model(saved(family, frozen) / name)
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert goes_on(loaded) == (1, 64.0, 2), "slots and step count are new, the loss scale is the saved one"


@pytest.mark.wide("repeats the files of whole models with weights alone")
@families
@pytest.mark.parametrize("frozen", ["before", "after"])
def test_weights_of_a_model_with_other_trained_layers_load_and_a_warning_says_what_is_missing(
    family, frozen, saved, monkeypatch
):
    weights, said = saved(family, frozen) / "model.weights.h5", []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    other = trained(family, frozen == "before", LossScaleOptimizer(family.adam(), initial_scale=64.0))
    other.load_weights(weights)
    assert goes_on(other) == (2, 64.0, 2)
    if family.name == "keras3":
        saved, has = (10, 6) if frozen == "after" else (6, 10)
        assert f"The saved optimizer has {saved} variables, but this Adam has {has}" in said[0]
        assert "but the loss scale is" in said[0]


@pytest.mark.parametrize("count", [1, 3, 4], ids="{}_variables".format)
def test_a_file_of_a_bare_optimizer_with_other_variables_changes_nothing(count, monkeypatch):
    keras = tf.keras
    values = {str(i): value for i, value in enumerate(v.numpy() for v in variables_of(keras.optimizers.Adam(), count))}
    wrapper = LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=8.0)
    before = [v.numpy() for v in variables_of(wrapper, 2)]
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    wrapper.load_own_variables(values)
    assert [v.tolist() for v in before] == [v.numpy().tolist() for v in wrapper.variables]
    assert said[0].endswith("The saved variables are not loaded.")


def variables_of(optimizer, count):
    optimizer.build([tf.Variable([1.0, 2.0]) for _ in range(count)])
    return optimizer.variables
