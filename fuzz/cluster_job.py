"""The script that every process in a cluster runs. TF_CONFIG tells each process its role in the cluster.

    TF_CONFIG=... python -m fuzz.cluster_job fit DIRECTORY [BATCH WORKER SECONDS]
    TF_CONFIG=... python -m fuzz.cluster_job parameter_server SEED

`fit` trains on all workers with BackupAndRestore. With the optional arguments, worker number WORKER kills itself
SECONDS seconds after the start of batch number BATCH. `parameter_server` schedules training steps on workers and kills
one worker. Both commands print their result as JSON.
"""

import json
import os
import random
import signal
import sys
import threading

import numpy as np
import tensorflow as tf

import conftest  # noqa: F401  creates the strategy before any operation runs
from tests import strategies
from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

EPOCHS, BATCHES = 4, 5
TF_KERAS = FAMILIES[1]


def fit(directory, dies=None):
    """Train a model on data in which one batch of every epoch overflows. Return the final state."""
    strategy, keras = strategies.get("workers_2"), TF_KERAS.keras
    x = np.random.default_rng(0).normal(size=(8 * BATCHES, 2)).astype("float32")
    y = x @ np.float32([[2.0], [-1.0]])
    x[17] = 1e38
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = LossScaleOptimizer(TF_KERAS.adam(), initial_scale=64.0, dynamic_growth_steps=3)
        model.compile(optimizer, "mse")
    begun = []

    def on_train_batch_begin(batch, logs=None):
        begun.append(batch)
        if dies and len(begun) == dies[0] and strategy.cluster_resolver.task_id == dies[1]:
            threading.Timer(dies[2], os.kill, (os.getpid(), signal.SIGKILL)).start()

    callbacks = [
        keras.callbacks.BackupAndRestore(directory),
        keras.callbacks.LambdaCallback(on_train_batch_begin=on_train_batch_begin),
    ]
    model.fit(x, y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    if dies:
        # Training may end before the timer kills this process. Wait for the timer.
        threading.Event().wait()
    return {
        "scale": [float(optimizer.loss_scale), int(optimizer.dynamic_counter.numpy())],
        "optimizer": [np.asarray(value).tolist() for value in optimizer.get_weights()],
        "weights": [np.asarray(value).tolist() for value in model.get_weights()],
    }


def parameter_server(seed):
    """Schedule steps on two workers, and kill one worker. The other worker repeats the interrupted step."""
    choose = random.Random(seed)
    bad = [choose.random() < 0.3 for _ in range(60)]
    dies_at, worker = choose.randrange(5, 55), choose.randrange(2)
    coordinator, strategy = strategies.coordinator(), strategies.get("parameter_server")
    with strategy.scope():
        weight = tf.Variable([0.0, 0.0])
        optimizer = LossScaleOptimizer(TF_KERAS.sgd(), initial_scale=2.0**10, dynamic_growth_steps=3)

    def replica(gradient):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(weight * gradient))
        unscaled = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(unscaled, [weight]))

    step = tf.function(lambda gradient: strategy.run(replica, args=(gradient,)))
    for i, overflows in enumerate(bad):
        coordinator.schedule(step, args=(tf.constant(np.inf if overflows else 1.0),))
        if i == dies_at:
            os.kill(int(os.environ["WORKERS"].split()[worker]), signal.SIGKILL)
    coordinator.join()
    return {
        "finite": len(bad) - sum(bad),
        "steps": len(bad),
        "weight": weight.numpy().tolist(),
        "iterations": int(optimizer.iterations.numpy()),
        "scale": float(optimizer.loss_scale),
    }


if __name__ == "__main__":
    what, first, *others = sys.argv[1:]
    if what == "fit":
        found = fit(first, (int(others[0]), int(others[1]), float(others[2])) if others else None)
    else:
        found = parameter_server(int(first))
    print("RESULT", json.dumps(found), flush=True)
