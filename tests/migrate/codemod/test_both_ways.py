"""Old programs do the same under `install()`, which `tf-lossscale run` calls, and after the rewrite."""

import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale.migrate.codemod.migrate_file import migrate

PROGRAMS = {
    "private attributes in a subclass of contrib's wrapper": """
class Scaled(tf.contrib.mixed_precision.LossScaleOptimizer):
    def report(self):
        return type(self._opt).__name__, float(self._loss_scale_manager.get_loss_scale())
manager = tf.contrib.mixed_precision.FixedLossScaleManager(16.0)
result = Scaled(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager).report()
""",
    "a manager of one's own": """
class Manager(tf.contrib.mixed_precision.LossScaleManager):
    def get_loss_scale(self):
        return tf.constant(4.0)
    def update_loss_scale(self, finite_grads):
        return tf.no_op()
manager = Manager()
optimizer = tf.contrib.mixed_precision.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
result = optimizer._loss_scale_manager is manager, optimizer._opt.get_name()
""",
    "the state of a wrapper, assigned and read": """
optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
optimizer._loss_scale.growth_steps = 1
optimizer._loss_scale.multiplier = 4.0
optimizer._loss_scale.counter = 0
state = optimizer._loss_scale
before = int(state.counter), int(state.growth_steps), float(state.multiplier), int(optimizer._loss_scale.counter)
weight = tf.Variable(1.0)
optimizer.apply_gradients([(g, weight) for g in optimizer.get_unscaled_gradients([tf.constant(1.0)])])
result = before, float(optimizer._loss_scale()), int(optimizer.dynamic_growth_steps)
""",
    "wrapped and read under the same condition": """
class Trainer:
    def __init__(self, optimizer, mixed):
        self.mixed, self.optimizer = mixed, optimizer
        if mixed:
            self.optimizer = tf.keras.mixed_precision.experimental.LossScaleOptimizer(optimizer, "dynamic")
    def inner(self):
        return self.optimizer._optimizer if self.mixed else self.optimizer
result = [type(Trainer(tf.keras.optimizers.SGD(), mixed).inner()).__name__ for mixed in (True, False)]
""",
    "private attributes of an optimizer that may be wrapped": """
def unwrapped(optimizer):
    while hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    return optimizer
def made(mixed):
    optimizer = tf.keras.optimizers.SGD()
    return tf.keras.mixed_precision.experimental.LossScaleOptimizer(optimizer, 8) if mixed else optimizer
result = [type(unwrapped(made(mixed))).__name__ for mixed in (True, False)], float(made(True)._loss_scale())
""",
    "the old state of a wrapper": """
optimizer = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), 8)
scale = optimizer.loss_scale
is_fixed = isinstance(optimizer.loss_scale, tf.mixed_precision.experimental.FixedLossScale)
result = float(scale()), float(scale) / 2, is_fixed, optimizer.get_config()["loss_scale"]
""",
    "one loss scale for two wrappers": """
from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer
first = LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
second = LossScaleOptimizer(tf.keras.optimizers.SGD(), first.loss_scale)
result = second.loss_scale is first.loss_scale, float(second.loss_scale())
""",
    "a module as a value": """
class Settings:
    mp = tf.keras.mixed_precision.experimental
    def build(self, optimizer):
        self.mp.set_policy("mixed_float16")
        return self.mp.LossScaleOptimizer(optimizer, loss_scale=4)
optimizer = Settings().build(tf.keras.optimizers.SGD())
result = float(optimizer.loss_scale), tf.keras.mixed_precision.global_policy().name
""",
    "policies with float32 variables, and whether they cast them": """
mp = tf.keras.mixed_precision.experimental
mp.set_policy("mixed_float16")
result = mp.global_policy().name, mp.global_policy().should_cast_variables, mp.Policy("mixed_bfloat16").compute_dtype
""",
    "no policy": """
tf.keras.mixed_precision.experimental.set_policy("mixed_float16")
tf.keras.mixed_precision.experimental.set_policy(None)
result = tf.keras.mixed_precision.experimental.global_policy().name
""",
    "steps with each loss scale": """
def steps(scale):
    weight, trace = tf.Variable(1.0), []
    optimizer = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), scale)
    for factor in (1, 1, float("nan"), 1, 1, 1, float("nan"), 1, float("nan"), float("nan"), 1, 1, 1):
        gradients = optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.constant(1.0)) * factor])
        optimizer.apply_gradients(zip(gradients, [weight]))
        trace += [float(weight), float(optimizer.loss_scale)]
    return str(trace)
result = [steps(scale) for scale in ("dynamic", 128, 2.0**6)]
""",
}

# Programs for Keras 3's own class. Each begins with these lines.
KERAS_3_START = """
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
KERAS_3 = {
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
def test_a_program_does_the_same_run_and_rewritten(body):
    old = f"import tensorflow as tf\n{body}"
    with tf_lossscale.install():
        run = result_of(old)
    outcome = migrate(old.encode())
    assert not [finding for finding in outcome.findings if finding.kind == "todo"]
    assert result_of(outcome.source.decode()) == run


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in KERAS_3.items()])
def test_a_program_for_keras_3_does_the_same_after_the_rewrite(body):
    program = KERAS_3_START + body
    assert result_of(migrate(program.encode()).source.decode()) == result_of(program)
