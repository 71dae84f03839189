"""The site builds without a warning; the words that users type into its search box lead to the entry that answers."""

import json
import pathlib
import re
import sys

import lunr
import pytest

from tests.processes import call

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]

# The entry, as its page and anchor -> what is typed.
FOUND_BY = {
    "recipes/learning_rate.html#reducelronplateau": [
        "ReduceLROnPlateau",
        "LearningRateScheduler",
        "TensorBoard learning rate",
    ],
    "recipes/learning_rate.html#warmup": ["WarmUp schedule"],
    "recipes/ema_sam_multi.html": ["EMA", "SAM"],
    "recipes/ema_sam_multi.html#ema": ["use_ema", "SwapEMAWeights"],
    "libraries.html#hugging-face": ["Hugging Face", "transformers create_optimizer"],
    "recipes/ema_sam_multi.html#sam": ["sharpness aware minimization"],
    "recipes/ema_sam_multi.html#multioptimizer": ["tfa MultiOptimizer"],
    "faq.html#how-do-i-skip-nan": ["skip NaN gradients in float32", "skip NaN gradients bfloat16"],
    "faq.html#how-do-i-let-the-loss-scale-fall-below-1": ["loss scale below 1", "min_scale"],
    "faq.html#what-is-hysteresis": ["hysteresis"],
    "faq.html#can-i-change-how-the-scale-moves": ["freeze the scale"],
    "it_does_not_train.html#why-are-gradients-nan": ["gradients NaN loss finite", "divide_no_nan"],
    "it_does_not_train.html#why-does-fit-show-loss-nan": ["loss: nan in fit while the weights are fine"],
    "from_pytorch.html": [
        "PyTorch",
        "GradScaler",
        "torch.amp.GradScaler unscale_",
        "found_inf",
        "get_scale",
        "GradScaler step update",
        "GradScaler state_dict",
        "enabled=False",
        "from PyTorch",
    ],
    "monitoring.html#lossscalemonitor-for-a-gan": ["LossScaleMonitor for a GAN"],
    "checkpoints.html#you-are-trying-to-restore": [
        "You are trying to restore a checkpoint from a legacy Keras optimizer",
        "tf.keras.optimizers.legacy.LossScaleOptimizer",
    ],
    "faq.html#inner_optimizer-is-already-wrapped": [
        "already wrapped",
        "already wrapped by a LossScaleOptimizer notebook",
    ],
    "fit.html#i-compile-the-model-again": ["compile again", "wrap_in_compile scale restarts"],
    "faq.html#float32-inference": ["float32 inference", "TFLite"],
    "distributed.html#float16-all-reduce": ["float16 all-reduce"],
    "recipes/gradients.html#a-gradient-penalty": ["second derivatives", "PINN"],
    "recipes/gradients.html#several-losses": ["PCGrad"],
    "recipes/own_tape.html#a-library-that-runs": ["Adversarial Robustness Toolbox", "DeepXDE"],
    "checkpoints.html#keyerror-name": ["KeyError: 'name'"],
    "recipes/gradients.html#replay-the-batch": ["replay batch after skipped step"],
    "recipes/gradients.html#per-example-gradients": ["differential privacy", "DP-SGD"],
    "recipes/gradients.html#the-gradient-of-an-input": ["adversarial examples", "DeepDream"],
    "recipes/two_optimizers.html#a-gan": ["GAN"],
    "faq.html#how-do-i-start-an-optimizer-again": ["start an optimizer again", "reset an optimizer"],
    "faq.html#how-do-i-use-a-fixed-scale": ["fixed scale"],
    "faq.html#tffunction-only-supports-singleton": ["singleton tf.Variables", "create variables on non-first call"],
    "it_does_not_train.html#why-is-my-loss-nan": ["loss is NaN", "attention mask -1e9"],
    "it_does_not_train.html#which-layer-overflows": ["which layer overflows", "activation_report", "forward pass NaN"],
    "it_does_not_train.html#why-are-steps-skipped": ["steps are skipped"],
    "loop.html#clip-gradients": ["clip gradients"],
    "fit.html": ["fit mixed_float16"],
    "checkpoints.html": ["save the scale"],
    "distributed.html": ["MirroredStrategy"],
    "recipes/two_optimizers.html": ["two optimizers"],
    "migration.html#from-tensorflow-20-to-23": ["from TensorFlow 2.3", "experimental_run_v2"],
    "faq.html#which-optimizer": ["which optimizer"],
    "it_does_not_train.html#float16-variables": ["unscale fp16 gradients", "float16 variables"],
    "it_does_not_train.html#why-is-the-gradient-of-one-loss-too-small": ["custom_gradient"],
    "it_does_not_train.html#why-does-tfdebuggingenable_check_numerics": ["check_numerics"],
    "adafactor.html": ["scale_parameter", "relative_step", "clip_threshold", "beta_2_decay"],
    "recipes/scale_per_loss.html": ["scale per loss"],
    "faq.html#why-is-float16-slower": ["slower than float32"],
    "checkpoints.html#could-not-locate-class": ["Could not locate class LossScaleOptimizer"],
    "versions.html#tensorflow-215": ["TensorFlow 2.15"],
}
SHOWN = 3  # results that a reader sees without scrolling


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = call(command, ROOT, NO_MKDOCS_2_WARNING="1")
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_shows_examples_as_code(site):
    page = (site / "reference" / "optimizer.html").read_text()
    assert 'id="tf_lossscale.wrapper.optimizer.LossScaleOptimizer.get_scaled_loss"' in page
    assert "<blockquote>" not in page
    assert "::: tf_lossscale" not in page


@pytest.fixture(scope="module")
def search(site):
    """Return a function that searches as the site does: lunr over its index, titles first."""
    built = json.loads((site / "search" / "search_index.json").read_text())

    def words_of(html):
        return re.sub(built["config"]["separator"], " ", re.sub(r"<[^>]*>", " ", html))

    entries = [
        {"location": entry["location"], "title": words_of(entry["title"]), "text": words_of(entry["text"])}
        for entry in built["docs"]
    ]
    index = lunr.lunr("location", [{"field_name": "title", "boost": 1000}, "text"], entries)

    def results(typed):
        plain = re.sub(r"[-+:~^*]", " ", typed)  # operators of lunr's query language
        return [each["ref"] for each in index.search(words_of(plain))]

    return results


@pytest.mark.parametrize("entry", FOUND_BY)
def test_what_users_type_finds_its_entry(search, entry):
    for typed in FOUND_BY[entry]:
        shown = search(typed)[:SHOWN]
        assert any(where.startswith(entry) for where in shown), (typed, shown)
