"""Strategies over virtual CPUs, one of each per process."""

import contextlib
import functools
import itertools
import json
import os

import pytest
import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

# TensorFlow numbers the collectives of each strategy from the same key, and rejects those of a second strategy in the
# process if their shapes differ. TensorFlow's own tests set this base for the same reason. It is set once in a process,
# although test_project_files.py runs conftest.py again and the mutation tests import the tests again.
if not isinstance(vars(tf.distribute.MirroredStrategy)["_collective_key_base"], property):
    _bases = itertools.count(0, 1000)
    tf.distribute.MirroredStrategy._collective_key_base = property(lambda strategy: next(_bases))

# What this process is where several train together, as those of tf_function_tests/test_processes.py: "worker" of
# MultiWorkerMirroredStrategy, "chief" of ParameterServerStrategy; None where it is alone.
ROLE = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("type")
OVER_PROCESSES = {"worker": ["workers_2"], "chief": ["parameter_server"]}


def here(*names):
    """The names of strategies to test in this process: in one of several, those over the processes alone."""
    return OVER_PROCESSES.get(ROLE, list(names))


# All GPUs of this machine, for tests with the marker `gpu`; skipped where there is none.
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@functools.cache
def get(name):
    """Returns a strategy by name; None for no strategy."""
    if name == "none":
        return None
    if name in ("mirrored_2", "mirrored_4", "central_storage") and len(tf.config.list_logical_devices("CPU")) < 4:
        raise RuntimeError(
            "The strategies need the four virtual CPUs that conftest.py creates: run a test with pytest."
        )
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("cpu:0")
    if name == "mirrored_1":
        return tf.distribute.MirroredStrategy(["cpu:0"])
    if name == "mirrored_2":
        return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    if name == "mirrored_4":
        return tf.distribute.MirroredStrategy(
            [f"cpu:{i}" for i in range(4)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    if name == "gpu":
        return tf.distribute.MirroredStrategy([f"gpu:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))])
    if name == "tpu":
        return FakeTPUStrategy()
    if name == "workers_2":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "parameter_server":
        return tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    raise ValueError(name)


@functools.cache
def coordinator():
    """What sends steps to the workers of the parameter server."""
    return tf.distribute.coordinator.ClusterCoordinator(get("parameter_server"))


def mine(values):
    """Returns the calling replica's own one of some values."""
    return tf.gather(values, tf.distribute.get_replica_context().replica_id_in_sync_group)


def copies(variable, strategy):
    """Returns the values of a variable on all replicas, as Python numbers or lists."""
    of_tensorflow = isinstance(variable, (tf.Variable, tf.distribute.DistributedValues))
    held = variable if of_tensorflow else variable.value
    return [copy.numpy().tolist() for copy in strategy.experimental_local_results(held)]


@contextlib.contextmanager
def apart(strategy):
    """Has the replicas of a strategy unable to meet, as in a function that XLA compiles for several GPUs."""
    strategy.extended._use_merge_call = lambda: False
    try:
        yield
    finally:
        del strategy.extended._use_merge_call


class FakeTPUStrategy(tf.distribute.TPUStrategy):
    """A TPUStrategy by its type: one replica, on the CPU, which may not be entered twice, as a TPU's program."""

    def __init__(self):
        tf.distribute.Strategy.__init__(self, _EnteredOnce(self, "cpu:0"))

    def run(self, fn, args=(), kwargs=None, options=None):
        return tf.distribute.Strategy.run(self, fn, args, kwargs)


class _EnteredOnce(OneDeviceExtended):
    _entered = False

    def _call_for_each_replica(self, fn, args, kwargs):
        if self._entered:
            raise RuntimeError("A TPU's replicas cannot start replicas.")
        self._entered = True
        try:
            return super()._call_for_each_replica(fn, args, kwargs)
        finally:
            self._entered = False
