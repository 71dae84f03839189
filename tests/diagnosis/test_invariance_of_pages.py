"""The training loops of the README, the documentation and the examples do not depend on the loss scale."""

import pathlib
import re

import pytest
import tensorflow as tf

import tf_lossscale
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.diagnosis import invariance_report
from tf_lossscale.libraries.models import walk

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {path.name: path for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))}
FIT = "model.fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)"
LOOPS = r"apply_gradients\(|minimize\(|\.fit\(|scale\.step\(|optimizer\.(apply|step)\("

# The blocks with a training loop: one step, or one cycle, with what the block has defined.
STEPS = {
    "README.md-0": "train_step(tf.ones([8, 20]), tf.ones([8, 1]))",
    "adafactor.md-0": "model.fit(x, tf.reduce_sum(x, axis=1), shuffle=False, verbose=0)",
    "adafactor.md-2": "optimizer.step(lambda: tf.reduce_sum((tf.ones([1, 2]) @ kernel + bias) ** 2))",
    "checkpoints.md-3": "model.fit(tf.ones([8, 2]), tf.ones([8, 1]), batch_size=2, verbose=0)",
    "distributed.md-0": "train_step(x, y)",
    "distributed.md-1": "train_step(tf.constant([1.0, 0.5]))",
    "fit.md-0": FIT,
    "fit.md-2": "model.fit(x, tf.reduce_sum(x, axis=1, keepdims=True), shuffle=False, verbose=0)",
    "loop.md-0": "train_step(x, tf.reduce_sum(x, axis=1, keepdims=True))",
    "loop.md-1": "train_step(tf.constant(1.0))",
    "monitoring.md-0": FIT,
    "monitoring.md-1": "optimizer.minimize(lambda: weight**2, [weight])",
    "monitoring.md-2": "optimizer.minimize(lambda: weight**2, [weight])",
    "ema_sam_multi.md-0": "train_step(tf.constant(1.0))",
    "ema_sam_multi.md-1": "model.fit(tf.ones([8, 4]), tf.zeros([8, 1]), verbose=0)",
    "gradients.md-0": "micro_step(tf.constant(1.0)), micro_step(tf.constant(3.0)), apply()",
    "gradients.md-2": "ascend()",
    "gradients.md-4": "train_step(tf.constant(0.5))",
    "horovod.md-0": "step()",
    "learning_rate.md-0": FIT,
    "moving_statistics.md-0": "train_step(tf.constant([[2.0], [1.0]]))",
    "own_optimizer.md-0": "train_step(tf.constant(1.0))",
    "own_tape.md-0": "model.fit(features, batch_size=32, epochs=1, verbose=0)",
    "probability.md-1": "tfp.math.minimize(optimizer.scale_inside(loss_fn), num_steps=3, optimizer=optimizer, seed=1)",
    "scale_per_loss.md-0": "train_step(tf.constant(1.0))",
    "sonnet.md-0": "step(x, y)",
    "two_optimizers.md-0": FIT,
    "two_optimizers.md-1": "train_step(tf.constant(1.0))",
    "two_optimizers.md-2": "gan.fit(tf.random.stateless_normal([32, 4], [0, 1]), verbose=0, shuffle=False)",
    "unfreezing.md-0": FIT,
}
# The others.
NO_STEPS = {}


def blocks():
    return {
        f"{name}-{i}": block
        for name, path in PAGES.items()
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
    }


def dynamic_optimizers_in(names):
    found = [part for _, part in walk(names.values()) if isinstance(part, tf_lossscale.LossScaleOptimizer)]
    found += [part for part in names.values() if isinstance(part, DynamicLossScale)]
    return [each for each in found if isinstance(getattr(each, "scaler", each), DynamicLossScale)]


@pytest.mark.slow
@pytest.mark.parametrize("block", STEPS)
def test_a_loop_of_a_page_respects_the_loss_scale(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    script = tmp_path / "block.py"
    script.write_text(blocks()[block])
    exec(compile(script.read_text(), str(script), "exec"), names)
    report = invariance_report(lambda: eval(STEPS[block], names), dynamic_optimizers_in(names), list(names.values()))
    assert report.ok, report


def test_every_block_with_a_training_loop_is_known():
    with_loop = {name for name, block in blocks().items() if re.search(LOOPS, block)}
    assert with_loop == {*STEPS, *NO_STEPS}
