"""Processes of this machine that train together: each finds the others by TF_CONFIG."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
PATIENCE = 1500  # seconds, for a machine that is busy with other things; a minute or two is usual

SERVER = """
import tensorflow as tf
me = tf.distribute.cluster_resolver.TFConfigClusterResolver()
tf.distribute.Server(me.cluster_spec(), job_name=me.task_type, task_index=me.task_id, protocol="grpc").join()
"""


def free_addresses(count):
    """Addresses of this machine that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [f"localhost:{each.getsockname()[1]}" for each in sockets]


class Cluster:
    """The processes of a cluster; at the end of a `with` they are ended.

    Args:
        directory: where each process's output goes.
        sizes: the number of processes of each type, as in TF_CONFIG.
    """

    def __init__(self, directory, **sizes):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._addresses = {kind: free_addresses(size) for kind, size in sizes.items()}
        self._processes = {}

    def start(self, kind, index, command, **environment):
        """Starts `python COMMAND` as one of them; returns its process."""
        config = {"cluster": self._addresses, "task": {"type": kind, "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1", **environment}
        environment.pop("PYTEST_XDIST_WORKER", None)
        with self._output(kind, index).open("w") as file:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file)
        self._processes[kind, index] = process
        return process

    def _output(self, kind, index):
        return self._directory / f"{kind}-{index}.txt"

    def wait(self, done):
        """Waits until `done()`.

        Raises:
            TimeoutError: it took more than PATIENCE; says which processes still run, and what they wrote last.
        """
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                running = [key for key, process in self._processes.items() if process.poll() is None]
                wrote = [f"{key}: ...{self._output(*key).read_text()[-2000:]}" for key in running]
                raise TimeoutError("\n".join([f"Still running after {PATIENCE} seconds:", *wrote]))
            time.sleep(0.2)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self._processes.values():
            process.kill()
            process.wait()

    def outcome(self, kind, index):
        """Returns the exit code and what the process wrote."""
        return self._processes[kind, index].returncode, self._output(kind, index).read_text()


def run_workers(command, directory, count=2):
    """Has `python COMMAND` run in every worker until all have ended, or one was killed: the others wait for it in vain.

    Returns:
        A list of (exit code, what it wrote) of the workers.
    """
    with Cluster(directory, worker=count) as cluster:
        workers = [cluster.start("worker", index, command) for index in range(count)]

        def done():
            codes = [worker.poll() for worker in workers]
            return None not in codes or any(code is not None and code < 0 for code in codes)

        cluster.wait(done)
    return [cluster.outcome("worker", index) for index in range(count)]


def run_coordinator(command, directory, workers=2):
    """Has `python COMMAND` run as the coordinator of a parameter server and some workers, which are servers as well.

    The environment variable WORKERS has the workers' process ids.

    Returns:
        (exit code, what it wrote) of the coordinator.
    """
    with Cluster(directory, chief=1, ps=1, worker=workers) as cluster:
        cluster.start("ps", 0, ["-c", SERVER])
        ids = [cluster.start("worker", index, ["-c", SERVER]).pid for index in range(workers)]
        chief = cluster.start("chief", 0, command, WORKERS=" ".join(map(str, ids)))
        cluster.wait(lambda: chief.poll() is not None)
    return cluster.outcome("chief", 0)
