"""The training loops of the README, the documentation and the examples do not depend on the loss scale."""

import inspect
import pathlib
import re
import runpy

import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.diagnosis import invariance_report
from tf_lossscale.libraries.models import walk

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {path.name: path for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))}
INLINE = "the statements of the block from the first tape on"
FIT = "model.fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)"
LOOPS = r"apply_gradients\(|minimize\(|\.fit\(|scale\.step\(|optimizer\.(apply|step)\("

# The blocks with a training loop: one step, or one cycle, with what the block has defined.
STEPS = {
    "README.md-0": "train_step(tf.ones([8, 20]), tf.ones([8, 1]))",
    "adafactor.md-0": "model.fit(x, tf.reduce_sum(x, axis=1), shuffle=False, verbose=0)",
    "checkpoints.md-3": "model.fit(tf.ones([8, 2]), tf.ones([8, 1]), batch_size=2, verbose=0)",
    "distributed.md-0": "train_step(x, y)",
    "distributed.md-1": "train_step(tf.constant([1.0, 0.5]))",
    "fit.md-0": FIT,
    "fit.md-2": "model.fit(x, tf.reduce_sum(x, axis=1, keepdims=True), shuffle=False, verbose=0)",
    "loop.md-0": "train_step(x, tf.reduce_sum(x, axis=1, keepdims=True))",
    "loop.md-2": "strategy.run(train_step, args=(tf.constant([3.0, 4.0]),))",
    "loop.md-3": "train_step(tf.constant(1.0))",
    "monitoring.md-0": FIT,
    "monitoring.md-1": "optimizer.minimize(lambda: weight**2, [weight])",
    "monitoring.md-2": "optimizer.minimize(lambda: weight**2, [weight])",
    "ema_sam_multi.md-0": "train_step(tf.constant(1.0))",
    "ema_sam_multi.md-1": "model.fit(tf.ones([8, 4]), tf.zeros([8, 1]), verbose=0)",
    "from_pytorch.md-0": INLINE,
    "gradients.md-0": "micro_step(tf.constant(1.0)), micro_step(tf.constant(3.0)), apply()",
    "gradients.md-1": INLINE,
    "gradients.md-2": "ascend()",
    "gradients.md-3": INLINE,
    "gradients.md-4": "train_step(tf.constant(0.5))",
    "horovod.md-0": "from_the_other_worker.assign([0.0, 0.0]), step()",
    "learning_rate.md-0": FIT,
    "moving_statistics.md-0": "train_step(tf.constant([[2.0], [1.0]]))",
    "own_optimizer.md-0": "train_step(tf.constant(1.0))",
    "own_tape.md-2": "train(model, keras.losses.MeanSquaredError(), optimizer, x, y)",
    "own_tape.md-0": "model.fit(features, batch_size=32, epochs=1, verbose=0)",
    "probability.md-1": "tfp.math.minimize(optimizer.scale_inside(loss_fn), num_steps=3, optimizer=optimizer, seed=1)",
    "scale_per_loss.md-0": "train_step(tf.constant(1.0))",
    "sonnet.md-0": "step(x, y)",
    "two_optimizers.md-0": FIT,
    "two_optimizers.md-1": "train_step(tf.constant(1.0))",
    "two_optimizers.md-2": "gan.fit(tf.random.stateless_normal([32, 4], [0, 1]), verbose=0, shuffle=False)",
    "unfreezing.md-0": FIT,
    "vanishing.md-1": FIT,
}
# The other blocks, and why their steps are not compared.
NO_STEPS = {
    "adafactor.md-1": "no loss scale",
    "adafactor.md-2": "no loss scale",
    "checkpoints.md-0": "each step overflows",
    "checkpoints.md-1": "no loss scale",
    "checkpoints.md-2": "no loss scale",
    "faq.md-0": "each step overflows",
    "it_does_not_train.md-0": "each step overflows",
    "loop.md-1": "has a mistake, which the page finds",
    "own_rule.md-0": "a rule that is not dynamic",
    "probability.md-0": "the loss is not scaled, as the page says",
    "tf1_loop.md-0": "a TF1 graph",
    "vanishing.md-0": "a function that trains, without a step",
}


def blocks():
    return {
        f"{name}-{i}": block
        for name, path in PAGES.items()
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
    }


def dynamic_scales_in(names):
    return [part for _, part in walk(names.values()) if isinstance(part, DynamicLossScale)]


@pytest.mark.parametrize("block", combinations(STEPS, usual=[], others=slow_one_in(6)))
def test_a_loop_of_a_page_respects_the_loss_scale(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    script = tmp_path / "block.py"
    script.write_text(blocks()[block])
    exec(compile(script.read_text(), str(script), "exec"), names)
    statements = STEPS[block]
    if statements is INLINE:
        statements = re.search(r"^with tf.GradientTape.*?(?=^assert|^print)", script.read_text(), re.M | re.S)[0]
    code = compile(statements, str(script), "exec")
    report = invariance_report(lambda: exec(code, names), dynamic_scales_in(names), list(names.values()))
    assert report.ok, report


def test_every_block_with_a_training_loop_is_known():
    with_loop = {name for name, block in blocks().items() if re.search(LOOPS, block)}
    assert with_loop == {*STEPS, *NO_STEPS}


EXAMPLES = {
    "custom_loop": ["--steps", "12"],
    "gan": ["--steps", "12"],
    "gan, separate": ["--steps", "12", "--scales", "separate"],
}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_loop_of_an_example_respects_the_loss_scale(example, tmp_path, monkeypatch, capsys):
    """The example's main function runs shortened, and its last call of a `tf.function` is the step."""
    monkeypatch.chdir(tmp_path)
    last_call = {}

    def function(python_function=None, **options):
        made = original(python_function, **options)
        if python_function is None or "examples" not in inspect.unwrap(python_function).__code__.co_filename:
            return made

        def call(*args):
            last_call.update(step=lambda: made(*args), names=inspect.getclosurevars(inspect.unwrap(python_function)))
            return made(*args)

        return call

    original = tf.function
    monkeypatch.setattr(tf, "function", function)
    names = runpy.run_path(str(ROOT / "examples" / f"{example.partition(',')[0]}.py"))
    names["main"](EXAMPLES[example])
    monkeypatch.undo()
    closure = last_call["names"].nonlocals
    report = invariance_report(last_call["step"], dynamic_scales_in(closure), list(closure.values()))
    assert report.ok, report
