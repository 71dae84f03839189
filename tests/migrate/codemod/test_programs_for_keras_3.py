"""Programs for Keras 3's own class do the same after the rewrite."""

import pytest
import tensorflow as tf

from tf_lossscale.migrate.codemod.migrate_file import migrate

# Each program begins with these lines.
START = """
import tensorflow as tf
from tensorflow.keras import mixed_precision as mp
from tensorflow.keras.mixed_precision import LossScaleOptimizer
weight = tf.Variable(5.0)
SGD = tf.keras.optimizers.SGD
def gradient(factor):
    with tf.GradientTape() as tape:
        loss = factor(weight * weight)
    return tape.gradient(loss, weight)
"""
PROGRAMS = {
    "compile and fit": """
model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(tf.keras.mixed_precision.LossScaleOptimizer(SGD(0.1), initial_scale=8.0, name="scaled"), "mse")
model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
result = [each.tolist() for each in model.get_weights()]
""",
    "scale_loss and apply": """
optimizer = mp.LossScaleOptimizer(SGD(0.1))
optimizer.apply([gradient(optimizer.scale_loss)], [weight])
result = float(weight)
""",
    "two updates after one scale_loss": """
optimizer = tf.keras.mixed_precision.LossScaleOptimizer(SGD(0.1), initial_scale=8.0)
optimizer.apply_gradients([(gradient(optimizer.scale_loss), weight)])
optimizer.apply_gradients([(tf.constant(float("inf")), weight)])
result = float(weight)
""",
    "dynamic_scale": """
optimizer = LossScaleOptimizer(SGD(0.1))
optimizer.build([weight])
scaled = gradient(lambda loss: loss * tf.cast(optimizer.dynamic_scale, tf.float32))
optimizer.apply_gradients([(scaled, weight)])
result = float(weight), int(optimizer.step_counter)
""",
    "apply of gradients that are scaled by hand": """
scaler = getattr(tf.keras.mixed_precision, "LossScaleOptimizer")(SGD(0.1), initial_scale=8.0)
kept = mp.LossScaleOptimizer(SGD(0.1), 8.0)
kept.apply([gradient(lambda loss: loss * 8.0)], [weight])
result = float(weight)
""",
    "apply of the inner optimizer": """
optimizer = mp.LossScaleOptimizer(SGD(0.1), 8.0)
optimizer.build([weight])
optimizer.inner_optimizer.apply([gradient(lambda loss: loss * 8.0) / 8.0], [weight])
result = float(weight), int(optimizer.iterations)
""",
    "another name for the class, a parameter and an attribute": """
Scaler, table = mp.LossScaleOptimizer, {"scaler": mp.LossScaleOptimizer}
class Trainer:
    def __init__(self, scaler):
        self.scaler = scaler
    def step(self):
        self.scaler.apply_gradients([(gradient(self.scaler.scale_loss), weight)])
        self.scaler.apply_gradients([(tf.constant(8.0), weight)])
Trainer(table["scaler"](SGD(0.1), initial_scale=8.0)).step()
result = float(weight)
""",
    "a subclass": """
class Halved(LossScaleOptimizer):
    def scale_loss(self, loss):
        return super().scale_loss(loss) / 2
optimizer = Halved(SGD(0.1), 8.0)
optimizer.build([weight])
optimizer.apply_gradients([(gradient(optimizer.scale_loss), weight)])
result = float(weight)
""",
    "a test of the class in a train_step": """
class Model(tf.keras.Model):
    def train_step(self, data):
        is_scaled = isinstance(self.optimizer, mp.LossScaleOptimizer)
        scaled = gradient(self.optimizer.scale_loss if is_scaled else tf.identity)
        self.optimizer.apply_gradients([(scaled, weight)])
        return {"scaled": float(is_scaled)}
model = Model()
model.compile(mp.LossScaleOptimizer(SGD(0.1)), run_eagerly=True)
result = model.fit(tf.ones([1, 1]), verbose=0).history, float(weight)
""",
    "hasattr": """
optimizer = mp.LossScaleOptimizer(SGD(0.1))
optimizer.apply_gradients([(gradient(getattr(optimizer, "scale_loss")), weight)])
result = float(weight)
""",
    "Keras's other name": """
optimizer = tf.keras.optimizers.LossScaleOptimizer(SGD(0.1), 8.0)
optimizer.apply_gradients([(gradient(optimizer.scale_loss), weight)])
result = float(weight)
""",
}


@pytest.fixture(autouse=True)
def float32():
    yield
    tf.keras.mixed_precision.set_global_policy("float32")


def result_of(source):
    names = {"__name__": "program"}
    exec(compile(source, "program.py", "exec"), names)
    tf.keras.mixed_precision.set_global_policy("float32")
    return names["result"]


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in PROGRAMS.items()])
def test_a_program_does_the_same_after_the_rewrite(body):
    program = START + body
    assert result_of(migrate(program.encode()).source.decode()) == result_of(program)
