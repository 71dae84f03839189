"""A training job in the processes of MultiWorkerMirroredStrategy, which may be killed and started again.

    TF_CONFIG=... python -m tf_function_tests.job DIRECTORY [dies]

Every family trains in a loop of its own, with a CheckpointManager; those of tf_keras also by `fit`, with
BackupAndRestore (Keras 3's `fit` fails in several processes: test_fit.py). With `dies` the last worker kills itself
when all of them are in mid-training. Prints what this worker has at the end, as JSON.
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation, as TensorFlow asks

from tests import loops  # noqa: E402
from tests.families import FAMILIES  # noqa: E402
from tf_lossscale import LossScaleOptimizer  # noqa: E402

INDEX = strategy.cluster_resolver.task_id
STEPS, DIES_AT_STEP, SAVES_EVERY = 12, 7, 3
EPOCHS, DIES_AT_EPOCH = 4, 2
OVERFLOWS = {(2, 1), (5, 0), (8, 0), (8, 1)}  # (step, worker)
EXAMPLES = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")


class Loop:
    """A training loop of one's own."""

    def __init__(self, family, directory):
        self.optimizer = LossScaleOptimizer(family.adam(), initial_scale=64.0, dynamic_growth_steps=2)
        with strategy.scope():
            self.weight = tf.Variable([1.0, -2.0])
            self.done = tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, weight=self.weight, done=self.done)
        # Every worker takes part in saving; only the first one's files are kept, as TensorFlow's guide says.
        own = directory if INDEX == 0 else directory.with_name(f"{directory.name}-of-worker-{INDEX}")
        self.manager = tf.train.CheckpointManager(checkpoint, str(own), max_to_keep=2)
        checkpoint.restore(tf.train.latest_checkpoint(str(directory)))
        self.resumed_at = int(self.done.numpy())
        self.seen = []
        self._step = tf.function(lambda gradient: strategy.run(self._replica, args=(gradient,)))

    def _replica(self, gradient):
        loops.step(self.optimizer, lambda: tf.reduce_sum(self.weight * gradient), [self.weight])

    def step(self, i):
        if i < self.resumed_at:
            return
        gradient = np.full(2, np.inf, "float32") if (i, INDEX) in OVERFLOWS else EXAMPLES[2 * i + INDEX]
        self._step(tf.constant(gradient))
        self.done.assign_add(1)
        self.seen.append([float(self.optimizer.loss_scale), int(self.optimizer.dynamic_counter.numpy())])
        if i % SAVES_EVERY == SAVES_EVERY - 1:
            self.manager.save()

    def result(self):
        return {
            "resumed_at": self.resumed_at,
            "seen": self.seen,
            "weight": self.weight.numpy().tolist(),
            "optimizer": [np.asarray(v).tolist() for v in self.optimizer.get_weights()],
        }


def fit(family, directory, amid):
    """Trains by `fit`; calls `amid` at the start of an epoch in the middle."""
    keras = family.keras
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = LossScaleOptimizer(family.adam(), initial_scale=64.0, dynamic_growth_steps=5)
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = EXAMPLES.copy(), EXAMPLES @ np.float32([[2.0], [-1.0]])
    x[17] = 1e38  # the second of four batches overflows
    epochs = []

    def on_epoch_begin(epoch, logs=None):
        epochs.append(epoch)
        if epoch == DIES_AT_EPOCH:
            amid()

    callbacks = [
        keras.callbacks.BackupAndRestore(str(directory)),
        keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin),
    ]
    model.fit(x, y, batch_size=16, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return {
        "resumed_at": epochs[0],
        "scale": [float(optimizer.loss_scale), int(optimizer.dynamic_counter.numpy())],
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        "optimizer": [np.asarray(v).tolist() for v in optimizer.get_weights()],
    }


def main(directory, dies):
    loops = {family.name: Loop(family, directory / family.name) for family in FAMILIES}
    for i in range(DIES_AT_STEP if dies else STEPS):
        for loop in loops.values():
            loop.step(i)
    fits = {}

    def fit_one_amid_another(families):
        if families:
            family, *others = families
            fits[family.name] = fit(family, directory / f"fit-{family.name}", lambda: fit_one_amid_another(others))
        elif dies and INDEX == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fit_one_amid_another(FAMILIES[1:])
    return {"loop": {name: loop.result() for name, loop in loops.items()}, "fit": fits}


if __name__ == "__main__":
    print("RESULT", json.dumps(main(pathlib.Path(sys.argv[1]), "dies" in sys.argv[2:])), flush=True)
