"""Trains LeNet-5 in float16 on several replicas, which share one loss scale and skip the same steps.

    python examples/distributed.py                  # two virtual devices on this machine, MirroredStrategy
    python examples/distributed.py --workers 2      # two processes, MultiWorkerMirroredStrategy; one of them dies

The model and the data are those of float16_demo.py. With `--workers`, the worker with the highest number exits during
training to simulate a crash. All workers are then restarted. They resume from the last checkpoint, which contains the
loss scale, its counter and the optimizer's slots. Each process prints its progress.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import tensorflow as tf
from float16_demo import batches, digits, lenet5

import tf_lossscale

# The global batch size, that is, the number of examples per step on all replicas together.
BATCH = 64
SAVES_EVERY = 10


def train(strategy, steps, directory, dies_at=None):
    """Train, resuming from the newest checkpoint if there is one. Print and return the accuracy."""
    me = int(strategy.cluster_resolver.task_id or 0) if strategy.cluster_resolver else 0
    name = f"worker {me}" if strategy.cluster_resolver else "this process"
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        model = lenet5("mixed_float16")
        # An initial scale of 2**24 is deliberately too high: the first steps overflow and lower it on all replicas.
        optimizer = tf_lossscale.LossScaleOptimizer(
            tf.keras.optimizers.Adam(1e-3), initial_scale=2**24, dynamic_growth_steps=25
        )
        done = tf.Variable(0, dtype=tf.int64)
        optimizer.build(model.trainable_variables)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    # Every worker must save checkpoints, but only worker 0's checkpoints are restored.
    own = directory if me == 0 else directory.with_name(f"{directory.name}-of-worker-{me}")
    manager = tf.train.CheckpointManager(checkpoint, str(own), max_to_keep=2)
    newest = tf.train.latest_checkpoint(str(directory))
    if newest:
        checkpoint.restore(newest).assert_consumed()
        counter = int(optimizer.dynamic_counter.numpy())
        say(f"{name}: goes on after step {int(done.numpy())}, {power(optimizer.loss_scale)}, counter {counter}")

    def replica_step(images, labels):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = BATCH // strategy.num_replicas_in_sync
        images, labels = images[index * share : (index + 1) * share], labels[index * share : (index + 1) * share]
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def step(images, labels):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    training, (images, labels) = digits()
    first = int(done.numpy())
    for i, batch in zip(range(first, steps), batches(training, first, steps)):
        if i == dies_at:
            say(f"{name}: dies before step {i}")
            os._exit(1)
        loss = float(step(*batch))
        done.assign_add(1)
        if i < 12 or i % 20 == 19:
            skipped = strategy.experimental_local_results(optimizer.last_step_skipped)[0]
            outcome = "skipped" if skipped else "applied"
            say(f"{name}: step {i:3}  loss {loss:.3f}  {outcome}, {power(optimizer.loss_scale)}")
        if i % SAVES_EVERY == SAVES_EVERY - 1:
            manager.save()

    accuracy = float(tf.reduce_mean(tf.cast(tf.argmax(model(images), axis=1) == labels, tf.float32)))
    counter, count = int(optimizer.dynamic_counter.numpy()), int(tf.convert_to_tensor(optimizer.iterations))
    say(f"{name}: accuracy {accuracy:.1%}, {power(optimizer.loss_scale)}, counter {counter}, {count} iterations")
    return accuracy


def say(line):
    """Print a line in a single write, so that lines from several processes do not interleave."""
    print(line + "\n", end="", flush=True)


def power(scale):
    """Format a loss scale as a power of two."""
    return f"loss scale 2**{len(bin(int(scale))) - 3}"


def start_workers(count, arguments):
    """Run this program in several processes connected through TF_CONFIG. Return whether all of them succeeded."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    workers = []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        workers.append(subprocess.Popen([sys.executable, __file__, *arguments], env=environment))
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers):
                # If a worker has failed, stop the other workers, because they would wait for the failed worker forever.
                return False
            time.sleep(0.1)
        return not any(worker.returncode for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main():
    """Train in this process, or start worker processes that train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=0, help="number of workers; 0 for two virtual devices")
    parser.add_argument("--out", type=pathlib.Path, help="directory for checkpoints; default: a temporary directory")
    # --dies-at is internal: this program passes it to the workers that it starts.
    parser.add_argument("--dies-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.out or pathlib.Path(temporary)) / "checkpoint"
        if "TF_CONFIG" in os.environ:
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            last = strategy.cluster_resolver.task_id == strategy.num_replicas_in_sync - 1
            try:
                train(strategy, options.steps, directory, options.dies_at if last else None)
            except tf.errors.OpError as error:
                sys.exit(f"lost contact with another worker: {error.message.splitlines()[0]}")
        elif options.workers:
            arguments = ["--steps", str(options.steps), "--out", str(directory.parent)]
            if not start_workers(options.workers, [*arguments, "--dies-at", str(options.steps * 2 // 3 + 5)]):
                say("a worker died: restarting all workers")
                if not start_workers(options.workers, arguments):
                    sys.exit("a worker died again")
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
            train(tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]), options.steps, directory)


if __name__ == "__main__":
    main()
