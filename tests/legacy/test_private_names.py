"""Old subclasses that read, assign or skip what the originals kept in private attributes."""

import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale import LossScaleOptimizer, legacy
from tf_lossscale.legacy import contrib, experimental

train = tf.compat.v1.train


class Warmup(legacy.ExponentialUpdateLossScaleManager):
    """Assigns all private attributes in place of a call of our constructor; the methods are inherited."""

    def __init__(self, init_loss_scale, incr_every_n_steps):
        self._incr_every_n_steps = incr_every_n_steps
        self._decr_every_n_nan_or_inf = 1
        self._incr_ratio = 4
        self._decr_ratio = 0.5
        self._loss_scale = tf.Variable(init_loss_scale, dtype=tf.float32, trainable=False)
        self._num_good_steps = tf.Variable(0, trainable=False)
        self._num_bad_steps = tf.Variable(0, trainable=False)


class OwnRule(legacy.ExponentialUpdateLossScaleManager):
    """Keeps a scale only, under the private name, and moves it by a rule of its own."""

    def __init__(self, init_loss_scale):
        self._loss_scale = tf.Variable(init_loss_scale, dtype=tf.float32, trainable=False)

    def update_loss_scale(self, finite_grads):
        return self._loss_scale.assign(tf.where(finite_grads, self._loss_scale + 1.0, self._loss_scale / 4.0))


class Later(legacy.ExponentialUpdateLossScaleManager):
    """Calls our constructor, then puts in a variable of its own."""

    def __init__(self):
        super().__init__(64.0, 2, 1, 2, 0.5)
        self._loss_scale = tf.Variable(16.0, trainable=False)
        assert (self._incr_every_n_steps, self._decr_every_n_nan_or_inf, self._incr_ratio) == (2, 1, 2.0)


@pytest.mark.parametrize(
    ("make", "scales"),
    [
        (lambda: Warmup(8.0, 2), [8.0, 32.0, 16.0, 16.0]),
        (lambda: OwnRule(8.0), [9.0, 10.0, 2.5, 3.5]),
        (Later, [16.0, 32.0, 16.0, 16.0]),
    ],
    ids=["no super", "own rule", "replaced"],
)
def test_a_manager_that_assigns_private_attributes(make, scales):
    weight = tf.Variable(1.0)
    manager = make()
    optimizer = contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), manager)
    seen = []
    for gradient in (1.0, 1.0, np.nan, 1.0):
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
        seen.append(float(manager.get_loss_scale()))
    assert seen == scales
    assert float(manager._loss_scale) == scales[-1]
    assert weight.numpy() == -0.5


def test_a_manager_in_a_graph_moves_the_variable_that_a_subclass_assigned():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        manager = Warmup(8.0, 1)
        update = manager.update_loss_scale(tf.constant(False))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        assert session.run(manager._loss_scale) == 4.0


def test_the_counters_of_a_manager_can_be_read_and_reset():
    manager = legacy.ExponentialUpdateLossScaleManager(64.0, 5, 3)
    manager.update_loss_scale(tf.constant(False))
    assert (int(manager._num_good_steps), int(manager._num_bad_steps)) == (0, 1)
    manager._reset_stats()
    assert int(manager._num_bad_steps) == 0


def test_a_fixed_manager_whose_scale_is_a_variable():
    class Changing(legacy.FixedLossScaleManager):
        def __init__(self):
            self._loss_scale = tf.Variable(4.0, trainable=False)

    manager = Changing()
    manager._loss_scale.assign(8.0)
    assert float(manager.get_loss_scale()) == 8.0


class Slow(legacy.DynamicLossScale):
    """Skips our constructor and assigns the private attributes, as an old subclass could."""

    def __init__(self, initial_loss_scale, increment_period, multiplier):
        legacy.LossScale.__init__(self)
        self._initial_loss_scale = float(initial_loss_scale)
        self._increment_period = int(increment_period)
        self._multiplier = float(multiplier)
        self._current_loss_scale = self._add_weight("current_loss_scale", self._initial_loss_scale, tf.float32)
        self._num_good_steps = self._add_weight("good_steps", 0, tf.int64)


class Doubling(legacy.DynamicLossScale):
    """Moves the private variables in an `update` of its own."""

    def update(self, grads):
        self._current_loss_scale.assign(self._current_loss_scale * self._multiplier)
        self._num_good_steps.assign_add(self._increment_period)
        return None, True


@pytest.mark.parametrize(
    ("scale", "after"), [(Slow(8, 2, 4), (32.0, 0)), (Doubling(8, 2, 4), (128.0, 4))], ids=["assigns", "moves"]
)
def test_a_loss_scale_that_uses_private_attributes(scale, after):
    for _ in range(2):
        scale.update([tf.constant([1.0])])
    assert (float(scale()), int(scale._num_good_steps)) == after
    assert scale._initial_loss_scale == 8.0
    for make in (LossScaleOptimizer, experimental.LossScaleOptimizer):
        optimizer = make(tf.keras.optimizers.SGD(0.1), loss_scale=scale)
        assert float(tf.convert_to_tensor(optimizer.loss_scale)) == after[0]


def test_a_fixed_loss_scale_whose_value_a_subclass_assigns():
    class Half(legacy.FixedLossScale):
        def __init__(self):
            legacy.LossScale.__init__(self)
            self._loss_scale_value = 0.5

    assert float(Half()()) == 0.5
    assert Half().get_config() == {"loss_scale_value": 0.5}
