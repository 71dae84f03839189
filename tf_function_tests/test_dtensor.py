"""A DTensor mesh: tf_keras's optimizers for one, with variables and gradients laid out over its devices."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import loops, numerics, strategies
from tests.cases import MODES, combinations
from tf_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.skipif(strategies.ROLE is not None, reason="needs the virtual CPUs of a process that is alone")

dtensor = tf.experimental.dtensor
optimizers = tf_keras.dtensor.experimental.optimizers
START = [1.0, -2.0]
NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD"]
ROWS = np.random.default_rng(0).normal(size=(5, 4, 2)).astype("float32")


class OnMesh:
    """A weight on every device of a mesh; the rows of a batch are divided among the devices."""

    def __init__(self, name, sharded=False, compiled=True, **options):
        self.mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
        layout = dtensor.Layout(["batch"] if sharded else [dtensor.UNSHARDED], self.mesh)
        start = tf.constant(START)
        start = dtensor.pack([start[:1], start[1:]] if sharded else [start, start], layout)
        self.weight = dtensor.DVariable(start)
        inner = getattr(optimizers, name)(0.1, mesh=self.mesh)
        self.optimizer = LossScaleOptimizer(inner, initial_scale=16.0, dynamic_growth_steps=3, **options)
        self._step = tf.function(self._one) if compiled else self._one

    def step(self, rows):
        layout = dtensor.Layout(["batch", dtensor.UNSHARDED], self.mesh)
        self._step(dtensor.pack([tf.constant(rows[:2]), tf.constant(rows[2:])], layout))

    def _one(self, rows):
        loops.step(self.optimizer, lambda: tf.reduce_mean(tf.reduce_sum(rows * self.weight, axis=-1)), [self.weight])

    def values(self):
        variables = [self.weight, *self.optimizer.variables]
        return [[part.numpy() for part in dtensor.unpack(variable.read_value())] for variable in variables]

    def scale(self):
        optimizer = self.optimizer
        return tuple(float(v.numpy()) for v in (optimizer.loss_scale, optimizer.dynamic_counter, optimizer.iterations))


def test_every_optimizer_for_a_mesh_is_tested():
    assert [name for name in dir(optimizers) if name[0].isupper()] == NAMES


@pytest.mark.parametrize(
    ("compiled", "name"),
    combinations(
        MODES, NAMES, usual=["function-Adagrad", "eager-SGD", "eager-AdamW", "eager-RMSprop", "function-Adadelta"]
    ),
)
def test_a_step_on_a_mesh_is_a_step_without_and_nan_on_one_device_skips_it_on_all(name, compiled):
    on_mesh = OnMesh(name, compiled=compiled)
    weight = tf.Variable(START)
    inner = getattr(tf_keras.optimizers, name)(0.1)
    alone = LossScaleOptimizer(inner, initial_scale=16.0, dynamic_growth_steps=3)
    for i, rows in enumerate(ROWS):
        on_mesh.step(rows)
        alone.get_scaled_loss(0.0)
        alone.apply_gradients(zip(alone.get_unscaled_gradients([tf.constant(16.0 * rows.mean(0))]), [weight]))
        for bad in (0, 3) if i == 1 else ():
            before, scale = on_mesh.values(), on_mesh.scale()
            overflow = rows.copy()
            overflow[bad] = np.inf
            on_mesh.step(overflow)
            alone.apply_gradients([(tf.constant([np.inf, 1.0]), weight)])
            assert on_mesh.scale() == (scale[0] / 2, 0.0, scale[2] + 1)
            for variable, old, new in zip([weight, *on_mesh.optimizer.variables], before, on_mesh.values()):
                if variable.dtype == tf.float32 and "loss_scale" not in variable.name:
                    np.testing.assert_array_equal(old, new)
        alone._loss_scale.current_loss_scale.assign(16.0)
        for part in on_mesh.values()[0]:
            numerics.assert_close(part, weight, 1e-5, START)
    assert on_mesh.scale() == (8.0, 0.0, 7.0)


def test_a_weight_that_is_divided_over_the_mesh_is_skipped_as_a_whole():
    divided, copied = OnMesh("Adam", sharded=True), OnMesh("Adam")
    for rows in (ROWS[0], ROWS[1] * np.float32([1.0, np.nan]), ROWS[2]):
        divided.step(rows)
        copied.step(rows)
        assert divided.scale() == copied.scale()
        numerics.assert_close(np.concatenate(divided.values()[0]), copied.values()[0][0], 1e-6, START)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_a_mesh(tmp_path):
    whole = OnMesh("Adam")
    for rows in (ROWS[0], ROWS[1] * np.nan, ROWS[2]):
        whole.step(rows)
    path = tf.train.Checkpoint(optimizer=whole.optimizer, weight=whole.weight).write(str(tmp_path / "ckpt"))
    again = OnMesh("Adam")
    again.optimizer.build([again.weight])
    tf.train.Checkpoint(optimizer=again.optimizer, weight=again.weight).read(path).assert_consumed()
    assert again.scale() == whole.scale() == (8.0, 1.0, 3.0)
    for each in (whole, again):
        each.step(ROWS[3])
    np.testing.assert_equal(again.values(), whole.values())
