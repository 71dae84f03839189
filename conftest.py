"""Creates four virtual CPUs for all tests, or the cluster of TF_CONFIG, before TensorFlow initializes its devices."""

import collections
import gc
import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import pytest
import tensorflow as tf

from tests import numerics, strategies

if strategies.ROLE:
    strategies.get(strategies.here()[0])
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )

# The same examples in each run: a failure comes from a change. `make test-exhaustive` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


def pytest_collection_modifyitems(items):
    """Mark what is exhaustive, and put the slow tests first: one that starts last would keep one process busy alone."""
    counts, seen = collections.Counter(), set()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled:
            test = item.nodeid.partition("[")[0]
            values = {(test, i, value) for i, value in enumerate(re.split("[-|/]", item.callspec.id))}
            if counts[test] % sampled.args[0] and values <= seen:
                item.add_marker("exhaustive")
            else:
                seen |= values
            counts[test] += 1
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist asks, which nox's sessions do not install
def pytest_xdist_auto_num_workers():
    """Return the number of processes for `-n auto`: the cores, at most eight; 1.5 GB of memory for each process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(8, cores, int(memory / 1.5e9)))


def pytest_collection_finish():
    """Collect garbage less often, and not among what is imported: it took a twelfth of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips a test if XLA cannot compile its float16 operations."""
    try:
        return (yield)
    except tf.errors.InternalError as error:
        if not numerics.XLA_HAS_FLOAT16 and "Failed to materialize symbols" in str(error):
            pytest.skip("for this instruction set XLA compiles no float16")
        raise
