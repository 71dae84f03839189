"""Each piece of advice in a TODO comment or a notice is followed, and the program then does what it did."""

import re
from typing import NamedTuple

import pytest
import tensorflow as tf

from tf_lossscale.migrate.codemod import class_tests, imports, policies, rules, strategies, unseen, uses, wrappers
from tf_lossscale.migrate.codemod.migrate_file import migrate

START = "import tensorflow as tf\nimport tf_lossscale\n"
SGD = "tf.keras.optimizers.SGD(0.1)"
CLASS = "tf_lossscale.LossScaleOptimizer"
HELPER = "tf_lossscale.legacy.from_loss_scale"
OLD_CLASS = "tf_lossscale.legacy.experimental.LossScaleOptimizer"
OLD = "tf.keras.mixed_precision.experimental"
WRAPPED = f"optimizer = tf.keras.mixed_precision.LossScaleOptimizer({SGD})\n"
EITHER = """
try:
    from tensorflow.keras.mixed_precision import LossScaleOptimizer
except ImportError:
    from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer
"""
TRAINED = """
class Model(tf.keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(data[0]), tf.float32) - data[1]) ** 2)
            TEST
        gradients = tape.gradient(loss, self.trainable_variables)
        if hasattr(self.optimizer, "get_unscaled_gradients"):
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
tf.keras.mixed_precision.set_global_policy("mixed_float16")
model = Model([tf.keras.Input((1,)), tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
model.compile(tf.keras.optimizers.SGD(0.1))
model.fit(tf.ones([4, 1]), 3 * tf.ones([4, 1]), epochs=20, verbose=0)
result = 2.9 < float(model.get_weights()[0][0, 0]) < 3.1
"""
TESTED = TRAINED.replace(
    "TEST",
    "if isinstance(self.optimizer, tf.keras.mixed_precision.LossScaleOptimizer):\n"
    "                loss = self.optimizer.get_scaled_loss(loss)",
)
NEEDED = TRAINED.replace("TEST", "loss = self.optimizer.get_scaled_loss(loss)").replace(
    '        if hasattr(self.optimizer, "get_unscaled_gradients"):\n    ', ""
)
COMPILE = {f"compile({SGD}": f"compile({CLASS}({SGD})"}
BEFORE = {"model = Model": "installation = tf_lossscale.wrap_in_compile()\nmodel = Model"}
FIT = f"""
tf.keras.mixed_precision.set_global_policy("float32")
policy = {OLD}.Policy("mixed_float16", loss_scale=1024)
{OLD}.set_policy(policy)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype="float32")])
model.compile({SGD}, "mse")
model.fit(tf.ones([4, 1]), tf.ones([4, 1]), verbose=0)
result = float(getattr(model.optimizer, "loss_scale", None) or getattr(model.optimizer, "dynamic_scale", 0))
"""
SUBCLASS = "class Mine(tf.keras.mixed_precision.LossScaleOptimizer):\n    "
LOOP = f"""
optimizer = tf.keras.mixed_precision.LossScaleOptimizer({SGD})
weight = tf.Variable(5.0)
with tf.GradientTape() as tape:
    loss = weight * weight
    loss = optimizer.METHOD(loss)
gradients = tape.gradient(loss, [weight])
optimizer.apply_gradients(zip(gradients, [weight]))
result = float(weight)
"""


class Advice(NamedTuple):
    """A program, what a reader of the advice replaces in the rewritten program, and the program's `result` then."""

    before: str
    changes: dict[str, str]
    result: object = True


ADVICE = {
    ("_EXACT", ""): Advice(
        f"{WRAPPED}result = type(optimizer) is tf.keras.mixed_precision.LossScaleOptimizer\n",
        {f"type(optimizer) is {CLASS}": f"isinstance(optimizer, {CLASS})"},
    ),
    ("_NARROW", ""): Advice(
        "from keras.mixed_precision import loss_scale_optimizer as lso\nimport tf_keras\n"
        "def is_new(optimizer):\n    return isinstance(optimizer, lso.LossScaleOptimizerV3)\n"
        "makers = tf_keras.optimizers.legacy.SGD, tf_keras.optimizers.SGD\n"
        "result = [is_new(tf_keras.mixed_precision.LossScaleOptimizer(make())) for make in makers]\n",
        {f"isinstance(optimizer, {CLASS})": "isinstance(optimizer.inner_optimizer, tf_keras.optimizers.Optimizer)"},
        [False, True],
    ),
    ("_STAR", ""): Advice(
        "from tensorflow.keras.mixed_precision.experimental.loss_scale_optimizer import *\n"
        f"result = float(LossScaleOptimizer({SGD}, 8).loss_scale)\n",
        {"import *": "import LossScaleOptimizer"},
        8.0,
    ),
    ("_NOT_IN_KERAS", ""): Advice(
        f"def scale_of(layer):\n    return layer.dtype_policy.loss_scale\n"
        f'result = scale_of(tf.keras.layers.Dense(1, dtype={OLD}.Policy("mixed_float16")))() == 2**15\n',
        {"return layer.dtype_policy": "return tf_lossscale.legacy.experimental.get_layer_policy(layer)"},
    ),
    ("_INFER", ""): Advice(
        f"{OLD}.set_policy('infer')\nresult = tf.keras.layers.Dense(1).compute_dtype\n", {"infer": "float32"}, "float32"
    ),
    ("_DOES_NOT_READ", "a wrapper"): Advice(
        FIT,
        {f"compile({SGD}": f"compile(tf_lossscale.LossScaleOptimizer({SGD}, dynamic=False, initial_scale=1024)"},
        1024.0,
    ),
    ("_DOES_NOT_READ", "no scale"): Advice(FIT.replace("1024", "None"), {'"mse"': '"mse", auto_scale_loss=False'}, 0.0),
    ("_DOES_NOT_READ", "wrap_in_compile"): Advice(
        FIT, {"policy =": "installation = tf_lossscale.wrap_in_compile()\npolicy ="}, 1024.0
    ),
    ("_LOOKED_UP", ""): Advice(
        "from unittest import mock\n"
        f'with mock.patch.object({OLD}, "set_policy") as result:\n    tf.keras.mixed_precision.set_global_policy("x")\n'
        "result = result.called\n",
        {f'{OLD}, "set_policy"': 'tf.keras.mixed_precision, "set_global_policy"'},
    ),
    ("_F_STRING", ""): Advice(
        f'result = f"{{{OLD}.global_policy().name}}"\n',
        {"result = f": f"policy = {OLD}.global_policy()\nresult = f", f"{{{OLD}.global_policy()": "{policy"},
        "float32",
    ),
    ("strategies._STRING", ""): Advice(
        'result = getattr(tf.distribute.get_strategy(), "experimental_run_v2")(lambda: 3)\n',
        {"experimental_run_v2": "run"},
        3,
    ),
    ("_OWN", ""): Advice(
        "class Fake:\n    def experimental_run_v2(self, step):\n        return step()\n"
        "result = Fake().experimental_run_v2(lambda: 3)\n",
        {"experimental_run_v2": "run"},
        3,
    ),
    ("_STRING", ""): Advice(
        'import tensorflow\nresult = hasattr(eval("tensorflow.keras.mixed_precision.experimental"), "Policy")\n',
        {"result =": "installation = tf_lossscale.install()\nresult ="},
    ),
    ("_CONFIG", ""): Advice(
        'inner = {"class_name": "SGD", "config": {}}\nconfig = {"class_name": "LossScaleOptimizer", "config": '
        '{"inner_optimizer": inner, "dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 9}}\n'
        "result = float(tf.keras.optimizers.deserialize(config).loss_scale)\n",
        {"tf.keras.optimizers.deserialize(config)": "tf_lossscale.LossScaleOptimizer.from_config(config['config'])"},
        8.0,
    ),
    ("_UNPACKED", ""): Advice(
        f"{EITHER}kwargs = dict(loss_scale='dynamic')\n"
        f"result = float(LossScaleOptimizer({SGD}, **kwargs).loss_scale)\n",
        {"LossScaleOptimizer(tf": f"{HELPER}(tf"},
        2.0**15,
    ),
    ("_OF_CALL", ""): Advice(
        "import tensorflow\ndef mixed_precision():\n    return tensorflow.contrib.mixed_precision\n"
        "result = mixed_precision().FixedLossScaleManager(8.0)._loss_scale == 8.0\n",
        {"result =": "installation = tf_lossscale.install()\nresult ="},
    ),
    ("_TAKES", ""): Advice(
        f"{WRAPPED}optimizer._loss_scale = 8.0\nresult = float(optimizer.loss_scale)\n",
        {"= 8.0": "= tf_lossscale.legacy.FixedLossScale(8.0)"},
        8.0,
    ),
    ("_NO_STATE", "another attribute"): Advice(
        f"{WRAPPED}result = optimizer._loss_scale.increment_period\n",
        {"_loss_scale.increment_period": "dynamic_growth_steps"},
        2000,
    ),
    ("_NO_STATE", "another class"): Advice(
        f"{WRAPPED}result = optimizer._loss_scale.increment_period\n",
        {f"{CLASS}({SGD}": f'{OLD_CLASS}({SGD}, "dynamic"'},
        2000,
    ),
    ("_DECAYED", "of a wrapper"): Advice(
        f"{WRAPPED}result = round(float(optimizer.inner_optimizer._decayed_lr(tf.float32)), 3)\n",
        {"optimizer.inner_optimizer._decayed_lr": "optimizer._decayed_lr"},
        0.1,
    ),
    ("_DECAYED", "in a subclass"): Advice(
        f"{SUBCLASS}def _decayed_lr(self, dtype):\n        return self._optimizer._decayed_lr(dtype) * 0.5\n"
        f"result = round(float(Mine({SGD})._decayed_lr(tf.float32)), 3)\n",
        {"self._optimizer._decayed_lr": "super()._decayed_lr"},
        0.05,
    ),
    ("_OF_KERAS_3", ""): Advice(
        f"{LOOP}method = optimizer.get_scaled_loss\n".replace("METHOD", "scale_loss"),
        {"optimizer.scale_loss": "optimizer.get_scaled_loss", "gradients = t": "gradients = scaled = t"}
        | {"optimizer.apply": "gradients = optimizer.get_unscaled_gradients(scaled)\noptimizer.apply"},
        4.0,
    ),
    ("COMPILED", "a wrapper"): Advice(NEEDED, COMPILE),
    ("COMPILED", "wrap_in_compile"): Advice(NEEDED, BEFORE),
    ("_NOT_WRAPPED", "a wrapper"): Advice(TESTED, COMPILE),
    ("_NOT_WRAPPED", "wrap_in_compile"): Advice(TESTED, BEFORE),
    ("_NO_ORIGIN", ""): Advice(
        "def wrapped(keras, inner):\n    return keras.mixed_precision.experimental.LossScaleOptimizer(inner, 8)\n"
        f"result = float(wrapped(tf.keras, {SGD}).loss_scale)\n",
        {"keras.mixed_precision.experimental": "tf_lossscale.legacy.experimental"},
        8.0,
    ),
    ("_OVERRIDES", "remove"): Advice(
        f"{SUBCLASS}def _raise_if_strategy_unsupported(self): pass\nresult = float(Mine({SGD}).loss_scale)\n",
        {"def _raise_if_strategy_unsupported(self): ": ""},
        2.0**15,
    ),
    ("_OVERRIDES", "override"): Advice(
        f"{SUBCLASS}def _unscale_grads(self, grads):\n        return [0 * g for g in super()._unscale_grads(grads)]\n"
        + LOOP.replace("METHOD", "get_scaled_loss")
        .replace("tf.keras.mixed_precision.LossScaleOptimizer", "Mine")
        .replace("zip(gradients", "zip(optimizer.get_unscaled_gradients(gradients)"),
        {"_unscale_grads": "get_unscaled_gradients"},
        5.0,
    ),
    ("_HOOK", "remove"): Advice(
        f"{WRAPPED}optimizer._raise_if_strategy_unsupported()\nresult = float(optimizer.loss_scale)\n",
        {"optimizer._raise_if_strategy_unsupported()": ""},
        2.0**15,
    ),
    ("_HOOK", "unscale"): Advice(
        f"{WRAPPED}result = float(optimizer._unscale_grads([tf.constant(2.0**15)])[0])\n",
        {"_unscale_grads": "get_unscaled_gradients"},
        1.0,
    ),
    ("_IN_COPY", ""): Advice(
        "from tensorflow.python.keras.mixed_precision.policy import set_global_policy\n"
        'set_global_policy("mixed_float16")\nresult = tf.keras.layers.Dense(1).compute_dtype\n',
        {"tensorflow.python.keras.mixed_precision.policy": "tensorflow.keras.mixed_precision.policy"},
        "float16",
    ),
    ("_EITHER", "the new class"): Advice(
        f"{EITHER}class Mine(LossScaleOptimizer):\n    pass\nresult = float(Mine({SGD}, dynamic=True).loss_scale)\n",
        {"Mine(LossScaleOptimizer)": f"Mine({CLASS})"},
        2.0**15,
    ),
    ("_EITHER", "the old class"): Advice(
        f"{EITHER}class Mine(LossScaleOptimizer):\n    pass\nresult = float(Mine({SGD}, loss_scale=8).loss_scale)\n",
        {"Mine(LossScaleOptimizer)": f"Mine({OLD_CLASS})"},
        8.0,
    ),
    ("_FITS_BOTH", ""): Advice(
        f"{EITHER}scale = 8\nresult = float(LossScaleOptimizer({SGD}, scale).loss_scale)\n",
        {"LossScaleOptimizer(tf": f"{HELPER}(tf"},
        8.0,
    ),
    ("SECOND", "a fixed scale"): Advice(
        f"optimizer = tf.keras.mixed_precision.LossScaleOptimizer({SGD}, 8)\n"
        "result = float(optimizer.loss_scale), optimizer.dynamic\n",
        {", 8)": ", dynamic=False, initial_scale=8)"},
        (8.0, False),
    ),
    ("SECOND", "an initial scale"): Advice(
        f"optimizer = tf.keras.mixed_precision.LossScaleOptimizer({SGD}, 8)\n"
        "result = float(optimizer.loss_scale), optimizer.dynamic\n",
        {", 8)": ", initial_scale=8)"},
        (8.0, True),
    ),
    ("_NO_MATCH", ""): Advice(
        f"{EITHER}result = float(LossScaleOptimizer({SGD}, 'dynamic', 8).loss_scale)\n",
        {"LossScaleOptimizer(tf": "tf_lossscale.LossScaleOptimizer(tf", "'dynamic'": "True"},
        8.0,
    ),
    ("_UNSURE", ""): Advice(
        f"try:\n    from tensorflow.keras.mixed_precision import LossScaleOptimizer\nexcept ImportError:\n"
        f"    from mine import LossScaleOptimizer\nresult = float(LossScaleOptimizer({SGD}, 'dynamic').loss_scale)\n",
        {"LossScaleOptimizer(tf": f"{HELPER}(tf"},
        2.0**15,
    ),
}
# These say only why something is left.
WITHOUT_ADVICE = {"_NOT_FOLLOWED", "PRIVATE_NAME", "_NO_COUNTERPART", "_NO_EFFECT", "_GONE", "_STAYS"}
WITHOUT_ADVICE |= {"_BACKEND", "_KERAS_3"}


def texts():
    """The texts of all TODO comments and notices, by the names of their constants."""
    found = {}
    for module in (class_tests, imports, policies, rules, strategies, unseen, uses, wrappers):
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, str) and " " in value:
                short = f"strategies.{name}" if module is strategies and name == "_STRING" else name
                found[short] = value
    return found


@pytest.fixture(autouse=True)
def float32():
    yield
    tf.keras.mixed_precision.set_global_policy("float32")


def test_every_text_that_gives_advice_is_in_the_table():
    assert texts().keys() - WITHOUT_ADVICE == {name for name, _ in ADVICE}


def without_todos(source):
    return re.sub(r"^[ \t]*# TODO\(tf-lossscale\):.*\n([ \t]*#   .*\n)*", "", source, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "how"), ADVICE)
def test_a_program_whose_author_follows_the_advice_does_what_it_did(name, how):
    advice = ADVICE[name, how]
    outcome = migrate((START + advice.before).encode())
    text = re.sub(r"\\\{\d?\\\}", ".*", re.escape(texts()[name]))
    assert any(re.search(f"{text}$", finding.reason or "") for finding in outcome.findings), outcome.findings
    source = without_todos(outcome.source.decode())
    for old, new in advice.changes.items():
        assert old in source, source
        source = source.replace(old, new)
    again = migrate(source.encode())
    assert not [finding for finding in again.findings if finding.kind == "todo"], again.source.decode()
    names = {"__name__": "program"}
    try:
        exec(compile(again.source, "program.py", "exec"), names)
        assert names["result"] == advice.result, again.source.decode()
    finally:
        if "installation" in names:
            names["installation"].undo()
