"""One worker of MultiWorkerMirroredStrategy, a process: trains, writes checkpoints, may die; prints what it saw.

TF_CONFIG=... python -m tf_function_tests.worker '{"family": "keras3", "directory": "/tmp/x", "steps": 12}'
"""

import contextlib
import json
import os
import signal
import sys

import numpy as np
import tensorflow as tf

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation, as TensorFlow asks

job = json.loads(sys.argv[1])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
FAMILY = next(family for family in FAMILIES if family.name == job["family"])
# (step, worker) of the gradients that overflow
OVERFLOWS = {(2, 1), (5, 0), (8, 0), (8, 1)}
EXAMPLES = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")


def die_if_planned(step):
    if step == job.get("dies_at"):
        os.kill(os.getpid(), signal.SIGKILL)


def directory():
    # Every worker takes part in saving; only the chief's files are kept, as TensorFlow's guide says.
    name = job["directory"] if index == 0 else f"{job['directory']}-of-worker-{job['index']}"
    os.makedirs(name, exist_ok=True)
    return name


def loop():
    """A training loop of one's own, with a CheckpointManager."""
    with strategy.scope() if job.get("where") == "inside" else contextlib.nullcontext():
        optimizer = LossScaleOptimizer(FAMILY.adam(), initial_scale=64.0, dynamic_growth_steps=2)
    with strategy.scope():
        weight = tf.Variable([1.0, -2.0])
        done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, weight=weight, done=done)
    manager = tf.train.CheckpointManager(checkpoint, directory(), max_to_keep=2)

    @tf.function
    def step(gradient):
        def replica(gradient):
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(tf.reduce_sum(weight * gradient))
            (unscaled,) = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
            optimizer.apply_gradients([(unscaled, weight)])

        strategy.run(replica, args=(gradient,))

    checkpoint.restore(tf.train.latest_checkpoint(job["directory"]))
    resumed_at = int(done.numpy())
    seen = []
    for i in range(resumed_at, job["steps"]):
        die_if_planned(i)
        gradient = EXAMPLES[2 * i + index]
        step(tf.constant(np.full(2, np.inf, "float32") if (i, index) in OVERFLOWS else gradient))
        done.assign_add(1)
        seen.append([float(optimizer.loss_scale), int(optimizer.dynamic_counter.numpy())])
        if i % 3 == 2:
            manager.save()
    return {
        "resumed_at": resumed_at,
        "seen": seen,
        "weight": weight.numpy().tolist(),
        "slots": [np.asarray(v).tolist() for v in optimizer.get_weights()],
    }


def fit():
    """`fit`, with the library's BackupAndRestore."""
    keras = FAMILY.keras
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = LossScaleOptimizer(FAMILY.adam(), initial_scale=64.0, dynamic_growth_steps=5)
        model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((EXAMPLES, EXAMPLES @ np.float32([[2.0], [-1.0]]))).batch(16)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    epochs = []

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)
            die_if_planned(epoch)

    callbacks = [keras.callbacks.BackupAndRestore(job["directory"]), Note()]
    model.fit(data.with_options(options), epochs=job["steps"], verbose=0, callbacks=callbacks)
    return {
        "resumed_at": epochs[0],
        "seen": [[float(optimizer.loss_scale), int(optimizer.dynamic_counter.numpy())]],
        "weight": [w.tolist() for w in map(np.asarray, model.get_weights())],
        "iterations": int(np.asarray(optimizer.iterations)),
    }


print("RESULT " + json.dumps({"loop": loop, "fit": fit}[job.get("mode", "loop")]()), flush=True)
