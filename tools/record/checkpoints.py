"""Repeats the training that wrote a LossScaleOptimizer's checkpoint, and reads the stored checkpoint.

    python -m record.checkpoints RECORDING FOLDER RESULT.json

FOLDER contains the extracted files of checkpoints.tar.gz.
"""

import json
import os
import sys

from .values import array, outcome, plain

#: For each recording, the prefix of the names of the checkpoints that the same original wrote.
WRITTEN_BY = {
    "lso_experimental_tf23": "tf2.3.4_lso_",
    "lso_tf24": "tf2.4.4_lso_",
    "lso_tf28": "tf2.8.4_lso_",
    "lso_tfkeras221_legacy": "tfkeras2.21_legacy_lso_",
    "lso_tfkeras221_new": "tfkeras2.21_new_lso_",
    "keras3_lso": "keras3.15.1_lso_",
}


def repeated(original, meta, folder):
    """Return the states of uninterrupted training, and the states of training that continues from a checkpoint."""
    import tensorflow as tf

    from . import training
    from .loss_scale_optimizer import replay

    name, kwargs = meta["optimizer"]
    case = {"optimizer_class": name, "optimizer_kwargs": kwargs, "config": meta["config"], "how": "tape"}
    unbroken = list(training.steps(replay(original, case, meta["initial"]), meta["steps_before"] + meta["steps_after"]))
    before = len(meta["steps_before"])

    restored = replay(original, case, {key: 0 * array(value) for key, value in meta["initial"].items()})
    if hasattr(restored.optimizer, "build"):
        restored.optimizer.build(restored.variables)
    parts = dict(zip(restored.names, restored.variables), optimizer=restored.optimizer)
    status = tf.train.Checkpoint(**parts).read(os.path.join(folder, "ckpt"))
    # `read` restores variables that do not exist yet when the first step creates them.
    continued = list(training.steps(restored, meta["steps_after"]))
    status.assert_consumed()
    return {
        "trace_before": plain(unbroken[:before]),
        "trace_after": plain(unbroken[before:]),
        "continued_from_the_stored_checkpoint": plain(continued),
    }


def expected(meta):
    return {
        "trace_before": meta["trace_before"],
        "trace_after": meta["trace_after"],
        "continued_from_the_stored_checkpoint": meta["trace_after"],
    }


def names(recording, folder):
    """Return the names of the checkpoints that the recorded original wrote."""
    return sorted(name for name in os.listdir(folder) if name.startswith(WRITTEN_BY[recording]))


def read(folder, name):
    with open(os.path.join(folder, name, "meta.json")) as file:
        return json.load(file)


def main(recording, folder, result):
    """Repeat the training for all checkpoints of an original."""
    from .loss_scale_optimizer import ORIGINALS

    original, found = ORIGINALS[recording](), {}
    for name in names(recording, folder):
        found[name] = outcome(repeated, original, read(folder, name), os.path.join(folder, name))
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
