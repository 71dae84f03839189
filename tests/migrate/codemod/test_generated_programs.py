"""What holds for programs nobody thought of: idioms put together at random."""

import ast
import contextlib
import io
import tokenize

import hypothesis
from hypothesis import strategies as st

from tf_lossscale.migrate.codemod.migrate_file import migrate

IMPORTS = (
    "import tensorflow as tf",
    "import tensorflow.compat.v1 as tf",
    "from tensorflow.keras import mixed_precision as mp",
    "from tensorflow.keras.mixed_precision import experimental as mp",
    "import tensorflow.keras.mixed_precision.experimental as mp",
    "from tensorflow.keras.mixed_precision import LossScaleOptimizer",
    "from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer, Policy  # both",
    "from tensorflow.keras.mixed_precision.experimental import *",
    "from tensorflow.python.training.experimental import loss_scale as ls",
    "from tensorflow.train.experimental import DynamicLossScale, FixedLossScale",
    "from tensorflow.contrib.mixed_precision import LossScaleOptimizer, FixedLossScaleManager",
    "from .compat import LossScaleOptimizer, mp",
    "try:\n    from tensorflow.keras.mixed_precision import LossScaleOptimizer\n"
    "except ImportError:\n    from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer",
    "try:\n    from tensorflow.keras.mixed_precision.experimental import LossScaleOptimizer\n"
    "except ImportError:\n    LossScaleOptimizer = None",
    "mp = tf.keras.mixed_precision.experimental",
    "mp = tf.keras.mixed_precision",
    "LossScaleOptimizer = mp.LossScaleOptimizer",
    "import os; import tf_lossscale",
)
CLASSES = (
    "tf.keras.mixed_precision.LossScaleOptimizer",
    "tf.keras.mixed_precision.experimental.LossScaleOptimizer",
    "mp.LossScaleOptimizer",
    "mp.experimental.LossScaleOptimizer",
    "LossScaleOptimizer",
    "tf.contrib.mixed_precision.LossScaleOptimizer",
    "tf.train.experimental.MixedPrecisionLossScaleOptimizer",
    "sok.tf.keras.mixed_precision.LossScaleOptimizer",
    "tf_lossscale.LossScaleOptimizer",
    "getattr(mp, 'LossScaleOptimizer')",
)
SCALES = (
    "'dynamic'",
    "1024",
    "2. ** 15",
    "0",
    "scale",
    "None",
    "other.loss_scale",
    "policy.loss_scale",
    "tf.train.experimental.DynamicLossScale(8, increment_period=4)",
    "tf.mixed_precision.experimental.DynamicLossScale(multiplier=4.)",
    "FixedLossScale(n)",
    "(  # why\n        8)",
)
ARGUMENTS = (
    "",
    ", dynamic=False, initial_scale=8",
    ", False, 8",
    ", *more",
    ", **more",
    ",  # inner\n    {scale},  # scale\n",
    ", {scale}",
    ", loss_scale={scale}",
    ", loss_scale = {scale} ,",
)
OPTIMIZERS = ("optimizer", "tf.keras.optimizers.Adam()", "optimizer=optimizer", "tf.train.AdamOptimizer()")
STATEMENTS = (
    "print(optimizer.loss_scale(), optimizer._optimizer)",
    "value = self.optimizer._loss_scale()",
    "other._loss_scale = {call}",
    "if isinstance(optimizer, {cls}):\n    optimizer.loss_scale()",
    "if hasattr(tf.keras.mixed_precision, 'experimental'): optimizer = {call}",
    "if hasattr(mp, 'set_policy'):\n    mp.set_policy('mixed_float16')\nelse:\n    mp.set_global_policy('float32')",
    "mp.set_policy(mp.Policy('mixed_float16', loss_scale={scale}))",
    "policy = tf.keras.mixed_precision.experimental.Policy('mixed_float16')",
    "model.compile(optimizer=optimizer, loss='mse')",
    "model.compile({call}, 'mse')",
    "optimizer = tf.train.experimental.enable_mixed_precision_graph_rewrite(optimizer, {scale})",
    "optimizer = tf.train.experimental.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD())",
    "class Mine({cls}):\n    def _get_gradients(self): return super()",
    'text = """{call}"""',
    "# {cls}",
    "def f(optimizer, cls={cls}):\n    '''Doc.'''\n    optimizer = {call}\n    return optimizer.loss_scale()",
    "f = lambda optimizer: {call}",
    "x: {cls} = None",
    "mp = None",
    "del mp",
)


@st.composite
def calls(draw):
    arguments = draw(st.sampled_from(ARGUMENTS)).format(scale=draw(st.sampled_from(SCALES)))
    return f"{draw(st.sampled_from(CLASSES))}({draw(st.sampled_from(OPTIMIZERS))}{arguments})"


@st.composite
def programs(draw):
    lines = draw(st.lists(st.sampled_from(IMPORTS), min_size=1, max_size=4))
    for _ in range(draw(st.integers(1, 5))):
        call = draw(calls())
        statement = draw(st.sampled_from([*STATEMENTS, "optimizer = {call}", "self.optimizer = {call}"]))
        statement = statement.replace("{cls}", draw(st.sampled_from(CLASSES))).replace("{call}", call)
        lines.append(statement.replace("{scale}", draw(st.sampled_from(SCALES))))
    if any("tf_lossscale." in line for line in lines):
        lines.insert(0, "import tf_lossscale")
    if draw(st.booleans()):
        body = [line for statement in lines for line in statement.splitlines()]
        if not any(" import *" in line or line.startswith("text = ") for line in body):
            lines = ["def main(self, optimizer):", *("    " + line for line in body)]
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n"]))


def parses(source):
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(source))


def texts(source, kind):
    return [t.string for t in tokenize.generate_tokens(io.StringIO(source, newline="").readline) if t.type == kind]


PATIENT = hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))


@PATIENT
@hypothesis.given(programs())
def test_the_result_parses_a_second_run_changes_nothing_and_comments_and_unrelated_strings_stay(source):
    hypothesis.assume(parses(source))
    once = migrate(source.encode())
    after = once.source.decode()
    assert parses(after), after
    assert migrate(once.source).source.decode() == after
    if not any(f.kind in ("rewritten", "todo") for f in once.findings):
        assert after == source
    assert {*texts(source, tokenize.COMMENT)} <= {*texts(after, tokenize.COMMENT)}
    unrelated = [s for s in texts(source, tokenize.STRING) if "LossScaleOptimizer(" in s or s == "'''Doc.'''"]
    assert {*unrelated} <= {*texts(after, tokenize.STRING)}


@PATIENT
@hypothesis.given(st.text(st.sampled_from("ab=():\n\r\t #'\\\x0c"), max_size=60))
def test_any_text_without_uses_is_left_as_it_is_or_refused(source):
    try:
        outcome = migrate(source.encode())
    except ValueError:
        return
    assert outcome.source == source.encode()
