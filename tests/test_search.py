"""The words that users type into the site's search box lead to the entry that answers them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import lunr
import pytest

ROOT = pathlib.Path(__file__).parents[1]

# What is typed -> the entry, as its page and anchor.
ENTRIES = {
    "ReduceLROnPlateau": "recipes/learning_rate.html#reducelronplateau",
    "LearningRateScheduler": "recipes/learning_rate.html#reducelronplateau",
    "TensorBoard learning rate": "recipes/learning_rate.html#reducelronplateau",
    "WarmUp schedule": "recipes/learning_rate.html#warmup",
    "EMA": "recipes/ema_sam_multi.html",
    "use_ema": "recipes/ema_sam_multi.html#ema",
    "SwapEMAWeights": "recipes/ema_sam_multi.html#ema",
    "Hugging Face": "libraries.html#hugging-face",
    "transformers create_optimizer": "libraries.html#hugging-face",
    "SAM": "recipes/ema_sam_multi.html",
    "sharpness aware minimization": "recipes/ema_sam_multi.html#sam",
    "tfa MultiOptimizer": "recipes/ema_sam_multi.html#multioptimizer",
    "skip NaN gradients in float32": "faq.html#how-do-i-skip-nan",
    "skip NaN gradients bfloat16": "faq.html#how-do-i-skip-nan",
    "loss scale below 1": "faq.html#how-do-i-let-the-loss-scale-fall-below-1",
    "min_scale": "faq.html#how-do-i-let-the-loss-scale-fall-below-1",
    "hysteresis": "faq.html#what-is-hysteresis",
    "loss: nan in fit while the weights are fine": "faq.html#why-does-fit-show-loss-nan",
    "PyTorch": "from_pytorch.html",
    "GradScaler": "from_pytorch.html",
    "torch.amp.GradScaler unscale_": "from_pytorch.html",
    "found_inf": "from_pytorch.html",
    "get_scale": "from_pytorch.html",
    "GradScaler step update": "from_pytorch.html",
    "GradScaler state_dict": "from_pytorch.html",
    "enabled=False": "from_pytorch.html",
    "LossScaleMonitor for a GAN": "monitoring.html#lossscalemonitor-for-a-gan",
    "You are trying to restore a checkpoint from a legacy Keras optimizer": "faq.html#you-are-trying-to-restore",
    "tf.keras.optimizers.legacy.LossScaleOptimizer": "faq.html#you-are-trying-to-restore",
    "already wrapped": "faq.html#inner_optimizer-is-already-wrapped",
    "already wrapped by a LossScaleOptimizer notebook": "faq.html#inner_optimizer-is-already-wrapped",
    "compile again": "faq.html#i-compile-the-model-again",
    "wrap_in_compile scale restarts": "faq.html#i-compile-the-model-again",
    "float32 inference": "faq.html#float32-inference",
    "TFLite": "faq.html#float32-inference",
    "float16 all-reduce": "distributed.html#float16-all-reduce",
    "replay batch after skipped step": "recipes/gradients.html#replay-the-batch",
    # The ten questions that users ask most.
    "loss is NaN": "faq.html#why-is-my-loss-nan",
    "steps are skipped": "faq.html#why-are-steps-skipped",
    "clip gradients": "faq.html#clip-before-or-after",
    "fit mixed_float16": "index.html#in-fit",
    "save the scale": "faq.html#how-do-i-save-the-scale",
    "MirroredStrategy": "distributed.html",
    "two optimizers": "recipes/two_optimizers.html",
    "from TensorFlow 2.3": "migration.html#from-tensorflow-20-to-23",
    "from PyTorch": "from_pytorch.html",
    "which optimizer": "faq.html#which-optimizer",
    # Words of public threads.
    "unscale fp16 gradients": "faq.html#float16-variables",
    "float16 variables": "faq.html#float16-variables",
    "custom_gradient": "faq.html#why-is-the-gradient-of-one-loss-too-small",
    "check_numerics": "faq.html#why-does-tfdebuggingenable_check_numerics",
    "scale_parameter": "adafactor.html",
    "relative_step": "adafactor.html",
    "clip_threshold": "adafactor.html",
    "beta_2_decay": "adafactor.html",
    "scale per loss": "recipes/scale_per_loss.html",
    "slower than float32": "faq.html#why-is-float16-slower",
    # Errors and tasks.
    "Could not locate class LossScaleOptimizer": "faq.html#load_model-says",
    "experimental_run_v2": "migration.html#from-tensorflow-20-to-23",
    "TensorFlow 2.15": "versions.html#tensorflow-215",
}
SHOWN = 3  # results that a reader sees without scrolling


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Return a function that searches as the site does: lunr over its index, titles first."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    built = json.loads((site / "search" / "search_index.json").read_text())
    documents = [
        {**entry, "text": re.sub(r"<[^>]*>", " ", entry["text"]), "title": re.sub(r"<[^>]*>", " ", entry["title"])}
        for entry in built["docs"]
    ]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
    builder = lunr.get_default_builder()
    builder.ref("location")
    for field in fields:
        builder.field(**field)
    separators = built["config"]["separator"]
    for document in documents:
        builder.add({**document, **{each: re.sub(separators, " ", document[each]) for each in ("title", "text")}})
    index = builder.build()

    def results(words):
        plain = re.sub(r"[-+:~^*]", " ", words)  # operators of lunr's query language
        return [each["ref"] for each in index.search(re.sub(separators, " ", plain))]

    return results


@pytest.mark.slow
@pytest.mark.parametrize("words", ENTRIES)
def test_what_users_type_finds_its_entry(search, words):
    shown = search(words)[:SHOWN]
    assert any(where.startswith(ENTRIES[words]) for where in shown), shown
