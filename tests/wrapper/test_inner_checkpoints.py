"""A checkpoint of the inner optimizer alone holds scale and counter, as those of tf_keras's wrappers do."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations
from tests.families import ALL_FAMILIES, FAMILIES, all_families, families, keras_2_families, tf_keras
from tf_lossscale import LossScaleOptimizer, SharedLossScale, migrate
from tf_lossscale.wrapper.registry import is_wrapped

# Each test writes and reads files of models; `test_saved_models.py` and `test_restore.py` run in `make test`.
pytestmark = pytest.mark.slow


def original(inner, **kwargs):
    return tf_keras.mixed_precision.LossScaleOptimizer(inner, **kwargs)


def trained(wrap, inner, weight):
    """A wrapper with a scale of 512 and a counter of 2."""
    optimizer = wrap(inner, initial_scale=1024.0)
    for gradient in (np.inf, 1.0, 1.0):
        optimizer.get_scaled_loss(tf.constant(0.0)), optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
    return optimizer


def saved(inner, weight, tmp_path):
    return tf.train.Checkpoint(optimizer=inner, weight=weight).write(str(tmp_path / "ckpt"))


def came_to(optimizer):
    return float(optimizer.loss_scale), int(optimizer.dynamic_counter)


def restored(wrap, family, path, wrapped):
    """A new optimizer, wrapped before or after its checkpoint is restored."""
    inner, weight = family.adam(), tf.Variable(1.0)
    if wrapped == "before the restore":
        optimizer = wrap(inner, initial_scale=1024.0)
    status = tf.train.Checkpoint(optimizer=inner, weight=weight).read(path)
    if wrapped == "after the restore":
        optimizer = wrap(inner, initial_scale=1024.0)
    status.assert_existing_objects_matched()
    return optimizer


@pytest.mark.parametrize("wrapped", ["before the restore", "after the restore"])
@pytest.mark.parametrize("made", ["before the wrapper", "after the wrapper"])
@all_families
def test_the_inner_optimizers_checkpoint_brings_back_scale_and_counter(family, made, wrapped, tmp_path):
    inner, weight = family.adam(), tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(optimizer=inner, weight=weight)
    trained(LossScaleOptimizer, inner, weight)
    path = checkpoint.write(str(tmp_path / "ckpt")) if made[:6] == "before" else saved(inner, weight, tmp_path)
    assert came_to(restored(LossScaleOptimizer, family, path, wrapped)) == (512.0, 2)


@pytest.mark.parametrize("wrapped", ["before the restore", "after the restore"])
@pytest.mark.parametrize(("write", "read"), [(original, LossScaleOptimizer), (LossScaleOptimizer, original)])
@keras_2_families
def test_the_original_and_the_wrapper_read_each_others(family, write, read, wrapped, tmp_path):
    inner, weight = family.adam(), tf.Variable(1.0)
    trained(write, inner, weight)
    path = saved(inner, weight, tmp_path)
    assert came_to(restored(read, family, path, wrapped)) == (512.0, 2)


@pytest.mark.parametrize("parts", [("whole", "inner"), ("inner", "whole")], ids="-".join)
@all_families
def test_a_file_of_the_wrapper_and_one_of_its_inner_optimizer_hold_the_same(family, parts, tmp_path):
    if family.name == "tf1":
        pytest.skip("a wrapper of TensorFlow 1 has its inner optimizer as a part, and is not of its form")
    inner, weight = family.adam(), tf.Variable(1.0)
    optimizer = trained(LossScaleOptimizer, inner, weight)
    path = saved(optimizer if parts[0] == "whole" else inner, weight, tmp_path)
    inner, weight = family.adam(), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(inner)
    optimizer.build([weight])
    part = optimizer if parts[1] == "whole" else inner
    tf.train.Checkpoint(optimizer=part, weight=weight).read(path).assert_consumed()
    assert came_to(optimizer) == (512.0, 2)


@all_families
def test_the_checkpoint_of_an_unwrapped_optimizer_goes_on_in_a_wrapper_that_has_taken_no_step(family, tmp_path):
    bare, weight, gradient = family.adam(), tf.Variable([1.0, 2.0]), tf.constant([1.0, -2.0])
    for _ in range(3):
        family.apply(bare, [gradient], [weight])
    path = tf.train.Checkpoint(optimizer=bare, weight=weight).write(str(tmp_path / "ckpt"))
    optimizer, again = LossScaleOptimizer(family.adam()), tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(optimizer=optimizer, weight=again).read(path)
    family.apply(bare, [gradient], [weight])
    optimizer.apply_gradients([(gradient, again)])
    np.testing.assert_array_equal(again, weight)


@all_families
def test_optimizers_that_share_a_scale_bring_it_back_from_any_of_them(family, tmp_path):
    shared, inner = SharedLossScale(8.0), [family.sgd(), family.sgd()]
    for each in inner:
        LossScaleOptimizer(each, loss_scale=shared)
    shared.current_loss_scale.assign(2.0)
    path = tf.train.Checkpoint(second=inner[1]).write(str(tmp_path / "ckpt"))
    shared, inner = SharedLossScale(8.0), [family.sgd(), family.sgd()]
    tf.train.Checkpoint(second=inner[1]).read(path)
    for each in inner:
        LossScaleOptimizer(each, loss_scale=shared)
    assert float(shared()) == 2.0


def scales_in(inner, tmp_path):
    path = tf.train.Checkpoint(optimizer=inner).write(str(tmp_path / "again"))
    return [tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path) if "current_loss" in name]


@pytest.mark.parametrize(
    ("family", "second"),
    combinations(ALL_FAMILIES, [{"initial_scale": 4.0}, {"dynamic": False, "initial_scale": 2.0}], usual=7),
)
def test_of_two_wrappers_made_in_turn_the_second_is_saved(family, second, tmp_path):
    inner = family.sgd()
    LossScaleOptimizer(inner, initial_scale=8.0)
    assert scales_in(inner, tmp_path) == [8.0], "the last that it came to"
    LossScaleOptimizer(inner, **second)
    assert scales_in(inner, tmp_path) == ([4.0] if "dynamic" not in second else [])


@all_families
def test_a_loss_scale_that_replaces_another_is_saved_in_its_place(family, tmp_path):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    optimizer._loss_scale = SharedLossScale(16.0)
    assert scales_in(optimizer.inner_optimizer, tmp_path) == [16.0]


@all_families
def test_what_is_wrapped_after_its_first_checkpoint_is_saved_with_the_scale_by_the_next(family, tmp_path):
    inner, weight = family.adam(), tf.Variable(1.0)
    saved(inner, weight, tmp_path)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    assert scales_in(inner, tmp_path) == [8.0]
    assert scales_in(optimizer, tmp_path) == [8.0]


@families
def test_a_copys_inner_optimizer_holds_the_copys_scale(family, tmp_path):
    first = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    second = copy.deepcopy(first)
    second.set_state({"loss_scale": 4.0, "dynamic_counter": 0})
    assert scales_in(first.inner_optimizer, tmp_path) == [8.0]
    assert scales_in(second.inner_optimizer, tmp_path) == [4.0]


@all_families
def test_a_fixed_scale_puts_nothing_into_the_file(family, tmp_path):
    inner = family.sgd()
    before = tf.train.list_variables(tf.train.Checkpoint(optimizer=inner).write(str(tmp_path / "bare")))
    LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0)
    after = tf.train.list_variables(tf.train.Checkpoint(optimizer=inner).write(str(tmp_path / "fixed")))
    assert [name for name, _ in before] == [name for name, _ in after]


@all_families
def test_an_inner_optimizer_with_a_part_of_that_name_is_refused_and_stays_as_it_was(family):
    inner, own = family.sgd(), tf.Variable(3.0)
    inner._track_trackable(own, "loss_scale") if hasattr(inner, "_track_trackable") else None
    with pytest.raises(ValueError, match=r"must not track an object named 'loss_scale', but .* under another name\."):
        LossScaleOptimizer(inner)
    assert inner._lookup_dependency("loss_scale") is own
    assert not is_wrapped(inner)


def fitted(family):
    inner = family.adam()
    model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(inner, initial_scale=64.0), "mse")
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    return model, inner


def assert_come_back(made, way, tmp_path):
    """Assert that a checkpoint of a fitted model and its optimizer, as `way` names it, restores everything."""
    model, inner = made()
    path = tf.train.Checkpoint(model=model, optimizer=way(model, inner)).write(str(tmp_path / "ckpt"))
    other, of_other = made()
    other.optimizer.set_state({"loss_scale": 2.0, "dynamic_counter": 0})
    tf.train.Checkpoint(model=other, optimizer=way(other, of_other)).read(path).assert_consumed()
    assert came_to(other.optimizer) == came_to(model.optimizer) == (64.0, 1)
    for saved_variable, variable in zip(model.optimizer.weights, other.optimizer.weights):
        np.testing.assert_array_equal(saved_variable, variable)


@pytest.mark.parametrize("family", combinations(FAMILIES[:2], usual=["keras3"]))
def test_a_checkpoint_of_a_model_and_its_inner_optimizer_is_whole(family, tmp_path):
    assert_come_back(lambda: fitted(family), lambda model, inner: inner, tmp_path)


def test_a_checkpoint_of_a_model_and_its_legacy_inner_optimizer_says_what_to_pass(tmp_path):
    legacy = FAMILIES[2]
    model, inner = fitted(legacy)
    with pytest.raises(ValueError, match=r"optimizer=model\.optimizer"):
        tf.train.Checkpoint(model=model, optimizer=inner).write(str(tmp_path / "ckpt"))
    assert_come_back(lambda: fitted(legacy), lambda model, inner: model.optimizer, tmp_path)


def keras_3s_own(inner, weight):
    optimizer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
    optimizer.build([weight])
    optimizer.apply([tf.constant([64.0, 128.0])], [weight])
    return optimizer


class Module(tf.Module):
    """A module that happens to use a name of Keras 3's wrapper."""

    def __init__(self):
        super().__init__()
        self.dynamic_scale = tf.Variable(3.0)


@pytest.mark.parametrize("other", ["a module with a dynamic_scale", "keras 3's own wrapper"])
def test_a_checkpoint_that_also_holds_something_of_keras_3s_own_wrapper_is_restored(other, tmp_path):
    found = []
    for _ in range(2):
        weight = tf.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(0.1), initial_scale=8.0)
        optimizer.build([weight])
        beside = Module() if other[0] == "a" else keras_3s_own(tf.keras.optimizers.Adam(0.1), weight)
        found.append((optimizer, weight, tf.train.Checkpoint(weight=weight, optimizer=optimizer, other=beside)))
    (optimizer, weight, checkpoint), (loaded, _, of_loaded) = found
    for _ in range(3):
        optimizer.apply([tf.constant([8.0, 16.0])], [weight])
    of_loaded.restore(checkpoint.save(str(tmp_path / "checkpoint"))).assert_consumed()
    assert int(loaded.iterations) == int(loaded.dynamic_counter) == 3
    for restored, expected in zip(loaded.weights, optimizer.weights, strict=True):
        np.testing.assert_array_equal(restored, expected)


@pytest.mark.skipif(tf.__version__ < "2.17", reason="TensorFlow does not say which checkpoint it restores")
def test_keras_3s_own_wrapper_beside_another_optimizer_is_refused_and_migrate_restores_it(tmp_path):
    weight = tf.Variable([1.0, 2.0])
    bare = tf.keras.optimizers.SGD(0.1)
    bare.build([weight])
    own = keras_3s_own(tf.keras.optimizers.Adam(0.1), weight)
    path = tf.train.Checkpoint(weight=weight, optimizer=own, other=bare).save(str(tmp_path / "checkpoint"))
    after = weight.numpy()
    weight.assign([5.0, 6.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(0.1), initial_scale=8.0)
    optimizer.build([weight])
    before = [np.array(variable) for variable in (weight, *optimizer.variables)]
    with pytest.raises(ValueError, match=r"also contains other optimizers\. Nothing was restored\. .*migrate\.restore"):
        tf.train.Checkpoint(weight=weight, optimizer=optimizer, other=bare).restore(path)
    for variable, value in zip((weight, *optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable, value)
    migrate.restore(path, optimizer, {"weight": weight}, name="optimizer")
    np.testing.assert_array_equal(weight, after)
    assert (int(optimizer.iterations), float(optimizer.loss_scale)) == (1, 64.0)
    for restored, expected in zip(optimizer.weights, own.inner_optimizer.variables, strict=True):
        np.testing.assert_array_equal(restored, expected)
