"""Managers of the user's own: by numbers, by a cell, in eager mode and in functions."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

from tests.cases import MODES, combinations, named
from tf_lossscale import LossScaleOptimizer, amp


class Thirds(amp.LossScaleManager):
    """By numbers alone."""

    def __init__(self):
        self.scale = 81.0

    def get_loss_scale(self):
        return self.scale

    def update_loss_scale(self, overflow):
        self.scale = self.scale / 3 if overflow else self.scale + 1


class ThirdsInItsAttribute(amp.LossScaleManager):
    """By numbers, stored where a restored scale is set."""

    def __init__(self):
        self.loss_scale = 81.0

    def get_loss_scale(self):
        return self.loss_scale

    def update_loss_scale(self, overflow):
        self.loss_scale = self.loss_scale / 3 if overflow else self.loss_scale + 1


class ThirdsInAGraph(Thirds):
    """By a cell as well; the numbers are not asked."""

    def update_loss_scale(self, overflow):
        raise AssertionError("the cell is there")

    def get_update_cell(self):
        return lambda scale, overflow: scale.assign(tf.where(overflow, scale / 3, scale + 1))


class Cautious(amp.DynamicLossScaleManager):
    """Ours, with a rule of its own on top."""

    def update_loss_scale(self, overflow):
        super().update_loss_scale(overflow)
        self.loss_scale = min(self.loss_scale, 100)


class Applying(amp.FixedLossScaleManager):
    """Ours, with another answer."""

    def get_drop_overflow_update(self):
        return False


class Named(amp.DynamicLossScaleManager):
    """Ours, with nothing changed."""

    name = "named"


MANAGERS = {
    "numbers": (Thirds, [82.0, 82 / 3, 82 / 3 + 1], [False, True, False]),
    "cell": (ThirdsInAGraph, [82.0, 82 / 3, 82 / 3 + 1], [False, True, False]),
    "derived": (lambda: Cautious(64, 2, 1), [100, 50, 100], [False, True, False]),
    "answer": (lambda: Applying(8), [8, 8, 8], [False, False, False]),
    "unchanged": (lambda: Named(64, 2, 1), [128, 64, 128], [False, True, False]),
}


@pytest.mark.parametrize(
    ("make", "compiled", "name"),
    combinations(
        named({"keras3": tf.keras.optimizers.SGD, "legacy": tf_keras.optimizers.legacy.SGD}), MODES, MANAGERS, usual=7
    ),
)
def test_a_manager_of_ones_own_moves_the_scale_and_has_it(make, compiled, name):
    new, scales, skips = MANAGERS[name]
    manager = new()
    optimizer = LossScaleOptimizer(make(0.5), loss_scale=manager)
    weight = tf.Variable(1.0)

    def step(factor):
        optimizer.minimize(lambda: weight * factor, [weight])

    take = tf.function(step) if compiled else step
    for factor, scale, skipped in zip([0.0, np.inf, 0.0], scales, skips):
        take(tf.constant(factor))
        assert float(optimizer.loss_scale) == pytest.approx(scale)
        assert bool(optimizer.last_step_skipped) == skipped
        assert manager().numpy() == optimizer.loss_scale.numpy()
        if name != "cell":  # which does not keep `get_loss_scale` up to date
            assert np.float32(manager.get_loss_scale()) == manager().numpy()


def resumed(manager, tmp_path, compiled=False):
    """The scale after two overflows, as restored in a new optimizer, and after a finite step."""

    def made():
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.0), loss_scale=manager())
        optimizer.build([weight])

        def step(factor):
            optimizer.minimize(lambda: weight * factor, [weight])

        return optimizer, tf.function(step) if compiled else step

    optimizer, step = made()
    for _ in range(2):
        step(tf.constant(np.inf))
    scales = [float(optimizer.loss_scale)]
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
    optimizer, step = made()
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    scales.append(float(optimizer.loss_scale))
    step(tf.constant(1.0))
    return [*scales, float(optimizer.loss_scale)]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_manager_of_ones_own_goes_on_from_a_restored_scale(compiled, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *arguments: warnings.append(text % arguments))
    assert resumed(lambda: Cautious(1024, 2, 100), tmp_path, compiled) == [100 / 2, 100 / 2, 100 / 2]
    assert resumed(ThirdsInAGraph, tmp_path, compiled) == [9, 9, 10]
    assert resumed(ThirdsInItsAttribute, tmp_path, compiled) == [9, 9, 10]
    assert not warnings


def test_a_manager_that_cannot_go_on_from_a_restored_scale_is_reported(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *arguments: warnings.append(text % arguments))
    assert resumed(Thirds, tmp_path) == [9, 9, 82]
    (warning,) = warnings
    assert "set to 9.0, but the Thirds still returns 81.0" in warning
    assert "Restore the state of the manager too" in warning


def test_a_scale_that_the_user_gives_a_manager_is_kept():
    manager = Cautious(64, 2, 100)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.0), loss_scale=manager)
    weight = tf.Variable(1.0)
    manager.loss_scale = 32
    optimizer.minimize(lambda: weight * 1.0, [weight])
    assert float(optimizer.loss_scale) == 32


def test_a_manager_goes_on_from_the_scale_and_the_window_of_its_optimizer(tmp_path):
    def made():
        manager, weight = amp.DynamicLossScaleManager(64, 2, 3), tf.Variable(1.0)
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=manager)
        return manager, optimizer, lambda factor: optimizer.minimize(lambda: weight * factor, [weight])

    manager, optimizer, step = made()
    for factor in (np.inf, 0.0, 0.0):
        step(factor)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
    manager.update_loss_scale(False)
    assert manager.get_loss_scale() == optimizer.loss_scale.numpy() == manager.get_update_cell().get_loss_scale() == 64
    manager.loss_scale = 1000
    assert optimizer.loss_scale.numpy() == 1000
    manager, optimizer, step = made()
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    assert manager.get_loss_scale() == 32
    step(0.0)
    assert manager.get_loss_scale() == optimizer.loss_scale.numpy() == 64


@pytest.mark.parametrize("name", ["step", "check", "move"])
def test_an_attribute_with_the_name_of_a_method_is_an_error_that_names_it(name):
    manager, optimizer = Thirds(), tf.keras.optimizers.SGD()
    setattr(manager, name, 0)
    with pytest.raises(TypeError, match=f"Thirds must not have an attribute `{name}`"):
        LossScaleOptimizer(optimizer, loss_scale=manager)
    LossScaleOptimizer(optimizer, loss_scale=Thirds())


def test_a_manager_is_no_manager_without_its_two_methods():
    with pytest.raises(TypeError, match="abstract"):
        amp.LossScaleManager()


def test_an_update_cell_moves_the_scale_in_a_session():
    class OfACell(amp.DynamicLossScaleManager):
        def get_update_cell(self):
            return amp.DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)

    train = tf.compat.v1.train
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        manager = OfACell(1024.0, 4, 2)
        optimizer = LossScaleOptimizer(train.GradientDescentOptimizer(0.125), loss_scale=manager)
        weight, factor = tf.Variable(1.0), tf.compat.v1.placeholder(tf.float32, [])
        step = optimizer.minimize(weight * factor, var_list=[weight])
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        found = []
        for value in (np.inf, 1.0, 1.0, np.inf, 1.0, 1.0):
            session.run(step, {factor: value})
            found.append(session.run(optimizer.loss_scale))
        assert found == [256, 256, 1024, 256, 256, 1024]


def test_a_scaler_is_adjusted_in_a_session_by_what_it_returns():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        scaler = amp.DynamicLossScaler(1024.0, 4, 2)
        adjusted = scaler.adjust(tf.constant(False))
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(adjusted)
        assert session.run(scaler.scale_value) == 256.0
