"""Scales that are loaded or assigned. An unusable one costs one skipped step, and is then the initial one."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import loops
from tests.cases import combinations
from tests.families import ALL_FAMILIES, FAMILIES, all_families, families
from tf_lossscale import LossScaleOptimizer, migrate

# Each test writes and reads files of models; `test_saved_models.py` and `test_restore.py` run in `make test`.
pytestmark = pytest.mark.slow

BAD = ("inf", "nan", "0")
bad_scales = pytest.mark.parametrize("bad", BAD)


def made(inner, **kwargs):
    return LossScaleOptimizer(inner, initial_scale=64.0, min_scale=2.0, max_scale=1024.0, **kwargs)


def broken(family, weight, bad):
    """An optimizer whose scale is a bad one, and the counter 5."""
    optimizer = made(family.sgd())
    optimizer.build([weight])
    optimizer._loss_scale.current_loss_scale.assign(float(bad))
    optimizer._loss_scale.good_steps.assign(5)
    return optimizer


def require_training(optimizer, weight, bad):
    """Take three steps, of which the first is skipped, because the loaded scale makes every gradient non-finite."""
    optimizer.build([weight])
    before = optimizer.state()
    assert np.isnan(before["loss_scale"]) if bad == "nan" else before["loss_scale"] == float(bad)
    assert before["dynamic_counter"] == 5
    for _ in range(3):
        loops.step(optimizer, lambda: weight * 0.5, [weight])
    assert float(optimizer.loss_scale) == 64.0
    assert optimizer.state()["skipped_steps"] == 1
    assert float(tf.convert_to_tensor(weight)) == 0.5


@pytest.mark.parametrize("part", ["wrapper", "inner optimizer", "inner optimizer, wrapped later"])
@bad_scales
@all_families
def test_from_a_checkpoint(family, bad, part, tmp_path):
    optimizer, inner = broken(family, tf.Variable(1.0), bad), family.sgd()
    written = optimizer if part == "wrapper" else optimizer.inner_optimizer
    path = tf.train.Checkpoint(optimizer=written).write(str(tmp_path / "ckpt"))
    if part.endswith("later"):
        tf.train.Checkpoint(optimizer=inner).read(path).expect_partial()
    optimizer = made(inner)
    if not part.endswith("later"):
        tf.train.Checkpoint(optimizer=optimizer if part == "wrapper" else inner).read(path).expect_partial()
    require_training(optimizer, family.variable(1.0), bad)


@bad_scales
@families
def test_from_migrate_restore(family, bad, tmp_path):
    weight = tf.Variable(1.0, name="weight")
    optimizer = broken(family, weight, bad)
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).write(str(tmp_path / "ckpt"))
    optimizer = made(family.sgd())
    notes = migrate.restore(path, optimizer, [weight]).notes
    assert f"The saved loss scale is {float(bad):g}" in notes[0]
    assert optimizer.state() == made(family.sgd()).state() | {"dynamic_counter": 5}


@functools.cache
def fitted(family, suffix):
    """A model after one step, for one kind of file: Keras 3 saves no .keras file that is whole after an .h5 file."""
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(made(family.sgd()), keras.losses.MeanSquaredError())
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return model


@pytest.mark.parametrize(
    ("family", "bad", "suffix"),
    combinations(FAMILIES, BAD, [".h5", ".keras", ""], usual=["keras3-0-.h5", "keras3-0-.keras"]),
)
def test_from_a_saved_model(family, bad, suffix, tmp_path):
    keras = family.keras
    if not suffix and family.name == "keras3":
        pytest.skip("Keras 3 loads no SavedModel")
    model = fitted(family, suffix)
    model.optimizer._loss_scale.current_loss_scale.assign(float(bad))
    model.optimizer._loss_scale.good_steps.assign(5)
    model.save(tmp_path / f"model{suffix}")
    loaded = keras.models.load_model(tmp_path / f"model{suffix}")
    loaded.fit(np.ones((2, 2)), np.ones((2, 1)), epochs=3, verbose=0)
    assert float(loaded.optimizer.loss_scale) == 64.0
    assert all(np.isfinite(weights).all() for weights in loaded.get_weights())


@pytest.mark.skipif(
    not hasattr(tf.Module, "_checkpoint_adapter"), reason="TensorFlow does not say which class wrote it"
)
def test_a_fixed_scale_keeps_its_value_and_takes_the_slots_from_a_checkpoint_of_keras_3s_own_wrapper(tmp_path):
    keras = FAMILIES[0].keras
    old, weight = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, 0.5)), keras.Variable(1.0)
    old.build([weight])
    old.apply([old.scale_loss(tf.constant(1.0))], [weight])
    path = tf.train.Checkpoint(optimizer=old).write(str(tmp_path / "ckpt"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, 0.5), dynamic=False, initial_scale=8)
    optimizer.build([weight])
    tf.train.Checkpoint(optimizer=optimizer).read(path).assert_existing_objects_matched()
    assert (float(optimizer.loss_scale), int(optimizer.iterations)) == (8.0, 1)
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert float(weight) == 1.0 - 1.0 - 1.5


@all_families
def test_a_scale_that_started_below_min_scale_is_no_bad_one(family, warnings, tmp_path):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=0.1)
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(optimizer=optimizer).read(path)
    assert float(optimizer.loss_scale) == np.float32(0.1)
    assert not warnings


@pytest.mark.parametrize(
    ("family", "how"),
    combinations(
        ALL_FAMILIES,
        ["eager", "function", "XLA"],
        usual=["keras3-function", "tf_keras-eager", "sonnet-XLA", "tf1-eager", "tf_keras_legacy-function"],
    ),
)
def test_one_that_nobody_could_look_at_costs_one_step(family, how):
    optimizer, weight = made(family.sgd()), tf.Variable(1.0)

    def step():
        loops.step(optimizer, lambda: weight * 0.5, [weight])

    step = step if how == "eager" else tf.function(step, jit_compile=how == "XLA")
    step()
    for times, bad in enumerate(BAD, 1):
        optimizer._loss_scale.current_loss_scale.assign(float(bad))
        for _ in range(3):
            step()
        assert float(optimizer.loss_scale) == 64.0
        assert optimizer.state()["skipped_steps"] == times
        assert float(weight) == 1 - (1 + 2 * times) * 0.25


@pytest.mark.parametrize("bad", [0.0, -8.0, float("inf"), float("nan")])
def test_in_eager_mode_every_unusable_scale_is_warned_of_and_set_to_the_initial_one(bad, warnings):
    optimizer, weight = made(tf.keras.optimizers.SGD(0.5)), tf.Variable(1.0)
    optimizer.scaler.current_loss_scale.assign(bad)
    for _ in range(2):
        loops.step(optimizer, lambda: weight * 0.5, [weight])
    assert float(optimizer.loss_scale) == 64.0
    (said,) = warnings
    assert f"The loss scale is {bad}, but must be a finite number above 0. It is set to the initial scale, 64.0" in said


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
@all_families
def test_resetting_all_variables_to_zero_starts_the_scale_again_and_a_warning_says_so(family, wrap, warnings, capfd):
    optimizer, weight = made(family.sgd()), tf.Variable(1.0)
    step = wrap(lambda: loops.step(optimizer, lambda: weight * 0.5, [weight]))
    step()
    for (
        variable
    ) in optimizer.scaler.variables:  # among all others; `optimizer.variables` of Keras 3 has the rate as well
        variable.assign(tf.zeros_like(variable))
    step(), step()
    assert (float(optimizer.loss_scale), float(weight)) == (64.0, 0.5)
    assert "The loss scale is 0" in " ".join(warnings) + capfd.readouterr().err


def test_variables_whose_shapes_do_not_fit_leave_the_scale_as_it_was():
    optimizer = made(tf.keras.optimizers.SGD(momentum=0.5))
    optimizer.build([tf.Variable([1.0, 1.0])])
    store = {str(i): np.asarray(value) for i, value in enumerate([0, 0.0, 5, 8.0, 1, 0.5, [1.0, 2.0, 3.0]])}
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_own_variables(store)
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (64.0, 0)


def test_the_values_of_an_unwrapped_optimizer_with_a_schedule_are_loaded():
    schedule, weight = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5), tf.Variable([1.0, 1.0])
    bare, optimizer = tf.keras.optimizers.SGD(schedule, 0.5), made(tf.keras.optimizers.SGD(schedule, 0.5))
    bare.apply([tf.constant([1.0, 2.0])], [weight])
    optimizer.build([weight])
    store = {}
    bare.save_own_variables(store)
    optimizer.load_own_variables({name: np.asarray(value) for name, value in store.items()})
    assert (int(optimizer.iterations), float(optimizer.loss_scale)) == (1, 64.0)
    np.testing.assert_array_equal(optimizer.weights[1], [-0.5, -1.0])


@pytest.mark.parametrize("momentum", [0.0, 0.5], ids=["no_slots", "slots"])
@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_weights_that_are_set_before_the_variables_are_known_bring_slots_and_scale(momentum, rate):
    """A learning rate that is set afterwards stays."""
    first, second = (LossScaleOptimizer(tf.keras.optimizers.SGD(1.0, momentum)) for _ in "12")
    weight = tf.Variable(1.0)
    first.set_state({"loss_scale": 64.0, "dynamic_counter": 0})
    first.apply_gradients([(tf.constant(1.0), weight)])
    second.set_weights([np.asarray(tf.convert_to_tensor(v)) for v in first.variables])
    assert (float(second.loss_scale), int(second.iterations), float(second.learning_rate)) == (64.0, 1, 1.0)
    second.learning_rate = rate
    second.apply_gradients([(tf.constant(1.0), weight)])
    assert weight.numpy() == 0.0 - momentum - rate
    assert (float(second.learning_rate), int(second.iterations)) == (rate, 2)


@pytest.mark.parametrize("value", [3.0, [1.0, 2.0]], ids=["scalar", "vector"])
def test_the_slots_of_a_built_optimizer_are_not_taken_for_the_scale_of_one_that_is_not_built(value):
    first, weight = made(tf.keras.optimizers.Adam(0.1)), tf.Variable(value)
    first.apply_gradients([(tf.ones_like(weight), weight)])
    second = made(tf.keras.optimizers.Adam(0.1))
    with pytest.raises(ValueError, match=r"needs 2 arrays.* but got 4\. Build the optimizer"):
        second.set_weights(first.get_weights())
    assert (float(second.loss_scale), int(second.dynamic_counter), int(second.iterations)) == (64.0, 0, 0)
    second.build([weight])
    assert not np.any(second.weights[2])
    second.set_weights(first.get_weights())
    np.testing.assert_array_equal(second.weights[2], first.weights[2])


def test_weights_that_are_loaded_before_the_optimizer_is_built_bring_the_scale_and_no_step_count(warnings, tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(made(tf.keras.optimizers.Adam(0.125)), "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2)
    model.optimizer.set_state({"loss_scale": 128.0, "dynamic_counter": 0})
    model.save_weights(tmp_path / "model.weights.h5")
    optimizer = made(tf.keras.optimizers.Adam(0.125))
    model.compile(optimizer, "mse")
    model.load_weights(tmp_path / "model.weights.h5")
    assert warnings == [
        "Adam is not built, so the saved step count, learning rate and slots are not loaded, but the loss scale is. "
        "Build the optimizer before loading."
    ]
    assert (int(optimizer.iterations), float(optimizer.loss_scale)) == (0, 128.0)
    model.compile(LossScaleOptimizer(tf.keras.optimizers.Adam(0.125), dynamic=False, initial_scale=8.0), "mse")
    model.load_weights(tmp_path / "model.weights.h5")
    assert "learning rate and slots are not loaded. Build the optimizer" in warnings[1]


@all_families
@pytest.mark.parametrize(("scale", "taken"), [(0.5, 2.0), (2.0**20, 1024.0), (512.0, 512.0)])
def test_from_a_state(family, scale, taken, warnings):
    optimizer = made(family.sgd())
    optimizer.set_state({**optimizer.state(), "loss_scale": scale})
    assert optimizer.state()["loss_scale"] == taken
    assert len(warnings) == (scale != taken)


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


@pytest.mark.parametrize(
    ("frozen", "name", "family"),
    combinations(
        ["before", "after"],
        ["model.keras", "model.h5", "saved"],
        FAMILIES,
        usual=["after-model.h5-keras3", "before-saved-tf_keras_legacy", "after-model.h5-tf_keras"],
    ),
)
def test_a_model_with_a_layer_frozen_or_thawed_after_training_loads_and_goes_on(family, name, frozen, saved):
    if name == "saved" and family.name == "keras3":
        pytest.skip("Keras 3 saves no SavedModel that it loads again")
    loaded = family.keras.models.load_model(saved(family, frozen) / name)
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert goes_on(loaded) == (1, 64.0, 2), "slots and step count are new, the loss scale is the saved one"


@pytest.mark.parametrize("count", [1, 3, 4], ids="{}_variables".format)
def test_a_file_of_a_bare_optimizer_with_other_variables_changes_nothing(count, warnings):
    keras = tf.keras
    values = {str(i): value for i, value in enumerate(v.numpy() for v in variables_of(keras.optimizers.Adam(), count))}
    wrapper = LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=8.0)
    before = [v.numpy() for v in variables_of(wrapper, 2)]
    wrapper.load_own_variables(values)
    assert [v.tolist() for v in before] == [v.numpy().tolist() for v in wrapper.variables]
    assert warnings[0].endswith("The saved variables are not loaded.")


def variables_of(optimizer, count):
    optimizer.build([tf.Variable([1.0, 2.0]) for _ in range(count)])
    return optimizer.variables
