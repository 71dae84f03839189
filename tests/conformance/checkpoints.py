"""The checkpoints and models that the originals wrote, and the training that went on from them."""

import numpy as np
import tensorflow as tf

from tests.conformance import recordings

FOLDER, ALL = recordings.checkpoints()
#: Checkpoints of optimizers of TensorFlow 2 and Keras 3, and of the wrappers of TensorFlow 1.15.
OF_OPTIMIZERS = [n for n in ALL if ("_lso_" in n or "_plain_" in n) and not n.startswith("tf1")]
OF_TF1 = [f"tf1.15.5_{each}" for each in ("mpls_adam_saver", "mpls_momentum_saver", "contrib_adam_saver")]
OF_TF1 += ["tf1.15.5_mpls_adam_checkpoint"]
#: The file in the folder of a model, by the end of the folder's name.
FILES = {"savedmodel": "model_savedmodel", "h5": "model.h5", "keras": "model.keras", "weights_tf": "weights"}


def path(name):
    """The file, folder or prefix that a user passes for one of these names."""
    return FOLDER / name / FILES.get(name.rpartition("_model_adam_")[2], "ckpt")


OF_MODELS = [n for n in ALL if "_model_adam_" in n and (path(n).exists() or path(n).with_suffix(".index").exists())]


def counts_skipped(name):
    """Whether a skipped step advanced `iterations` in the original: from TensorFlow 2.3 on, but not in Keras 3."""
    return not name.startswith(("keras3", "tf1", "tf2.0", "tf2.1", "tf2.2"))


def variables(meta):
    return [tf.Variable(np.zeros_like(recordings.array(meta["initial"][w], "float32")), name=w) for w in ("w0", "w1")]


def step(name, optimizer, variables, loss):
    """Take a step that counts as in the original."""
    with tf.GradientTape() as tape:
        scaled = (optimizer.get_scaled_loss if counts_skipped(name) else optimizer.scale_loss)(loss())
    gradients = tape.gradient(scaled, variables)
    if counts_skipped(name):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables))
    else:
        optimizer.apply(gradients, variables)


def step_of(name, optimizer, weights, event):
    """Take a recorded step of a checkpoint's training."""
    values = [tf.constant(recordings.array(g, "float32")) for g in event["grads"]]
    step(name, optimizer, weights, lambda: tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, values)]))


def batches(meta):
    """The batches of a model's training after it was saved, some of which have a NaN."""
    x, y = (recordings.array(meta[key], "float32") for key in ("x", "y"))
    bad = x.copy()
    bad[1, 2] = np.nan
    return [(bad if i in meta["nan_steps_after"] else x, y) for i in range(meta["steps_after"])]


def counts(recorded):
    """The step count, the loss scale and its counter in a recorded state, which have several names."""
    iterations = recorded.get("iterations", recorded.get("global_step"))
    return iterations, recorded.get("loss_scale"), recorded.get("dynamic_counter", recorded.get("good_steps"))


def check(optimizer, weights, recorded, where, scaled=True, tolerance=1e-5):
    """Compare weights and counts with a recorded state; None for the weights leaves them out."""
    expected = recorded["weights"] if "weights" in recorded else [recorded["w0"], recorded["w1"]]
    for weight, wanted in zip(weights or (), expected):
        np.testing.assert_allclose(weight, recordings.array(wanted), tolerance, tolerance / 10, err_msg=where)
    iterations, loss_scale, counter = counts(recorded)
    assert int(optimizer.iterations) == iterations, where
    if scaled:
        # TensorFlow 1's files have scales that were divided by a factor of 3.
        rounding = 0.0 if "iterations" in recorded else 1e-6
        np.testing.assert_allclose(float(optimizer.loss_scale), loss_scale, rounding, err_msg=where)
        if optimizer.dynamic:
            assert int(optimizer.dynamic_counter) == counter, where
