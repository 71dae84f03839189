"""Model and monitors."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer, amp

LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}


def network(keras):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])


def dataset(batches=8):
    x = np.random.default_rng(0).normal(size=(batches * 4, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(4)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_training_lowers_the_loss_at_every_level(library, level):
    keras = LIBRARIES[library]
    model = amp.Model(network(keras), "mse", keras.optimizers.SGD(0.05), metrics=["mae"], amp_level=level)
    history = model.train(4, dataset(), verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    scores = model.eval(dataset())
    assert set(scores) == {"loss", "mae"}
    assert scores["loss"] < history.history["loss"][0]
    assert model.predict(tf.ones((2, 3))).shape == (2, 1)
    assert isinstance(model.optimizer, LossScaleOptimizer) == (level in ("O2", "auto"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_manager_sets_scale_and_window(library):
    keras = LIBRARIES[library]
    manager = amp.DynamicLossScaleManager(init_loss_scale=64, scale_factor=4, scale_window=4)
    model = amp.Model(network(keras), "mse", keras.optimizers.SGD(0.01), loss_scale_manager=manager)
    model.train(1, dataset(batches=8), verbose=0)
    assert float(model.optimizer.loss_scale) == 64 * 4 * 4


def gradient_step(optimizer, weight, gradient):
    optimizer.get_scaled_loss(0.0)
    (gradient,) = optimizer.get_unscaled_gradients([gradient * optimizer.loss_scale])
    optimizer.apply_gradients([(gradient, weight)])


@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
@pytest.mark.parametrize("compiled", [False, True])
def test_drop_overflow_update_decides_whether_an_overflow_is_applied(make, compiled):
    for drop, after in ((True, 1.0), (False, -np.inf)):
        optimizer = LossScaleOptimizer(make(1.0), loss_scale_manager=amp.FixedLossScaleManager(8.0, drop))
        weight = tf.Variable([1.0])
        step = tf.function(gradient_step) if compiled else gradient_step
        step(optimizer, weight, tf.constant([np.inf]))
        assert weight.numpy().item() == after
        assert float(optimizer.loss_scale) == 8.0
        again = type(optimizer).from_config(optimizer.get_config())
        weight.assign([1.0])
        gradient_step(again, weight, tf.constant([np.inf]))
        assert weight.numpy().item() == after, "lost in the config"


def test_bad_managers_and_combinations_are_refused():
    with pytest.raises(TypeError, match="as_loss_scale"):
        LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale_manager="dynamic")
    with pytest.raises(ValueError, match="leave out"):
        LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8, loss_scale_manager=amp.DynamicLossScaleManager())
    with pytest.raises(ValueError, match="growth_factor"):
        LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale_manager=amp.DynamicLossScaleManager(scale_factor=0.5))
    wrapped = LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(ValueError, match="already"):
        amp.Model(network(tf.keras), "mse", wrapped, loss_scale_manager=amp.DynamicLossScaleManager())
    with pytest.raises(ValueError, match="epoch"):
        amp.Model(network(tf.keras), "mse", tf.keras.optimizers.SGD()).train(0, dataset())
    with pytest.raises(ValueError, match="optimizer"):
        amp.Model(network(tf.keras)).train(1, dataset())


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_that_cannot_be_made_changes_neither_network_nor_optimizer(library):
    keras = LIBRARIES[library]
    model, optimizer = network(keras), keras.optimizers.SGD(0.1)
    for arguments in ({"loss_scale_manager": "x"}, {"amp_level": "O5"}):
        with pytest.raises((TypeError, ValueError)):
            amp.Model(model, "mse", optimizer, **{"amp_level": "O3", **arguments})
    with pytest.raises(TypeError, match="Keras model"):
        amp.Model(3, "mse", optimizer, amp_level="O2")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert amp.Model(model, "mse", optimizer, amp_level="O2").optimizer.inner_optimizer is optimizer


@pytest.mark.parametrize("library", LIBRARIES)
def test_monitors_print_the_loss_and_the_scale(library, capsys):
    keras = LIBRARIES[library]
    manager = amp.DynamicLossScaleManager(init_loss_scale=64, scale_window=4)
    model = amp.Model(network(keras), "mse", keras.optimizers.SGD(0.01), loss_scale_manager=manager)
    model.train(2, dataset(batches=8), callbacks=[amp.LossMonitor(8), amp.OverflowMonitor(4)], verbose=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if "scale" not in line] == ["epoch: 1 step: 8", "epoch: 2 step: 8"]
    scales = [line.split(", ", maxsplit=2)[2] for line in lines if "scale" in line]
    assert scales == [f"loss scale is {scale}, overflow: False" for scale in (128, 256, 512, 1024)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_overflow_monitor_says_that_there_is_no_scale(library, capsys):
    model = amp.Model(network(LIBRARIES[library]), "mse", LIBRARIES[library].optimizers.SGD(0.01))
    model.train(1, dataset(batches=1), callbacks=amp.OverflowMonitor(), verbose=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(", no loss scale")


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_monitor_prints_every_whole_number_of_steps(bad):
    with pytest.raises(ValueError, match="per_print_times"):
        amp.LossMonitor(bad)
