"""Which package is which Keras: as it is here, and as it is with TensorFlow 2.15, where keras is Keras 2."""

import sys
import types

import pytest
import tensorflow as tf

import tf_lossscale
from tests import loops, strategies
from tests.families import FAMILIES, with_keras_2_alone, with_keras_3
from tf_lossscale import serialization
from tf_lossscale.legacy import old_names, wrap_in_compile
from tf_lossscale.legacy.changes import Changes
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import registry as families


@pytest.fixture
def only_keras_2(monkeypatch):
    """Keras as it is with TensorFlow 2.15."""
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(__version__="2.15.0"))


def test_the_package_keras_is_keras_2_where_its_version_says_so_and_keras_3_is_refused(only_keras_2):
    assert keras_versions.package_of_keras_2() == "keras"
    assert keras_versions.keras_2() is sys.modules["keras"]
    assert keras_versions.library_in("keras.src.optimizers.adam") == "tf_keras"
    with pytest.raises(ImportError, match=r"Install TensorFlow 2\.16"):
        keras_versions.keras_3("optimizers")


def test_a_second_keras_2_beside_that_of_tensorflow_is_not_taken_for_it(only_keras_2):
    stranger = type("_BaseOptimizer", (), {"__module__": "tf_keras.src.optimizers.optimizer"})
    ours = type("_BaseOptimizer", (), {"__module__": "keras.src.optimizers.optimizer"})
    assert families.wrapper_class_of(stranger()) is None
    with pytest.raises(TypeError, match=r"not come from the package tf_keras .* Use tf\.keras instead of tf_keras"):
        tf_lossscale.LossScaleOptimizer(stranger())
    assert families.wrapper_class_of(ours()) is families.wrapper_class_in("tf_keras")


def test_a_second_keras_2_is_left_as_it_is(only_keras_2):
    wrapper = type("LossScaleOptimizer", (), {"__module__": "tf_keras.src.mixed_precision.loss_scale_optimizer"})
    for places, name in (
        (old_names.places(), "tf_keras.mixed_precision"),
        (wrap_in_compile.places(), "tf_keras.src.engine.training"),
    ):
        module = types.ModuleType(name)
        module.LossScaleOptimizer = wrapper
        before = dict(vars(module))
        places[name](Changes(), module)
        assert vars(module) == before
    serialization._register(types.ModuleType("tf_keras"))  # an error would come out of the user's import statement


@with_keras_3
def test_with_tf_keras_in_the_place_of_keras_every_family_can_be_wrapped(monkeypatch):
    tf_keras = keras_versions.keras_2()
    monkeypatch.setitem(sys.modules, "keras", tf_keras)
    assert keras_versions.package_of_keras_2() == "tf_keras"
    assert keras_versions.keras_2("optimizers") is tf_keras.optimizers
    assert keras_versions.keras_3("optimizers").Adam is FAMILIES[0].optimizers.Adam
    assert keras_versions.keras_3().optimizers is keras_versions.keras_3("optimizers")
    assert sys.modules["keras"] is tf_keras
    for family in FAMILIES:
        weight = tf.Variable(1.0)
        wrapper = tf_lossscale.LossScaleOptimizer(family.sgd())
        wrapper.apply_gradients([(tf.constant(1.0), weight)])
        assert float(weight) == 0.5
        assert wrapper.from_config(wrapper.get_config()).initial_scale == wrapper.initial_scale
        assert keras_versions.library_in(type(family.sgd()).__module__) == family.keras.__name__.partition(".")[0]


@with_keras_3
def test_a_keras_3_that_cannot_be_imported_beside_its_replacement_is_missed_by_name(monkeypatch):
    tf_keras = keras_versions.keras_2()
    monkeypatch.setitem(sys.modules, "keras", tf_keras)
    monkeypatch.setitem(sys.modules, "keras.optimizers", None)  # as where nothing of Keras 3 is installed
    keras_versions._replaced.cache_clear()
    with pytest.raises(ImportError, match=r"sys\.modules\['keras'\].* is tf_keras.*Import tf_lossscale before"):
        keras_versions.keras_3("optimizers")
    assert sys.modules["keras"] is tf_keras


@with_keras_3
def test_with_keras_3_keras_2_is_tf_keras():
    assert keras_versions.package_of_keras_2() == "tf_keras"
    assert keras_versions.keras_3("optimizers").Adam is tf.keras.optimizers.Adam
    assert keras_versions.library_in("keras.src.optimizers.adam") == "keras"


@with_keras_2_alone
def test_everything_that_is_for_the_keras_of_tensorflow_takes_keras_2():
    assert keras_versions.keras_of_tensorflow() == "tf_keras"
    adafactor = tf_lossscale.optimizers.Adafactor()
    assert isinstance(adafactor, tf.keras.optimizers.Optimizer)
    for inner in (tf.keras.optimizers.Adam(), tf.keras.optimizers.legacy.Adam(), adafactor):
        wrapper = tf_lossscale.LossScaleOptimizer(inner)
        assert isinstance(wrapper, tf.keras.mixed_precision.LossScaleOptimizer)
        again = tf.keras.optimizers.deserialize(
            tf.keras.optimizers.serialize(wrapper), use_legacy_optimizer="legacy" in type(inner).__module__
        )
        assert type(again) is type(wrapper)
        assert type(again.inner_optimizer) is type(inner)


@with_keras_2_alone
@pytest.mark.parametrize("legacy", [False, True])
def test_replicas_agree_on_a_skipped_step_of_tensorflows_own_keras(legacy):
    strategy = strategies.get("mirrored_2")
    optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
    with strategy.scope():
        optimizer = tf_lossscale.LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=8.0)
        weight = tf.Variable(1.0)

    @tf.function
    def step(factors):
        def replica(factor):
            loops.step(optimizer, lambda: factor * weight, [weight])

        strategy.run(replica, args=(factors,))

    def spread(*values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    step(spread(1.0, float("inf")))
    assert (weight.numpy(), optimizer.loss_scale.numpy()) == (1.0, 4.0)
    step(spread(1.0, 3.0))
    assert (weight.numpy(), optimizer.loss_scale.numpy()) == (-1.0, 4.0)
