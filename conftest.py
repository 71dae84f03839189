"""Creates four virtual CPUs, or connects to the cluster in TF_CONFIG, before TensorFlow initializes its devices."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import pytest
import tensorflow as tf

from tests import cases, numerics, strategies
from tf_lossscale.core import factors

if strategies.ROLE:
    strategies.get(strategies.here()[0])
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )

# Hypothesis generates the same examples in every run, so that only a change of the code can make a test fail.
# `make test-exhaustive` generates new examples.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items):
    """Mark tests that repeat others as slow. Put slow tests first, so that no process waits for the others."""
    cases.mark_repetitions(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def without_earlier_calls():
    """Forget the losses in eager mode of optimizers of earlier tests, which may be in reference cycles."""
    factors._EVENTS.clear()


# Only pytest-xdist defines this hook, and the sessions of nox do not install pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return the number of processes for `-n auto`: one per core and per 1.5 GB of memory, but at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(8, cores, int(memory / 1.5e9)))


def pytest_collection_finish():
    """Exclude imported modules from garbage collection and run it less often. It took 8 % of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test if XLA cannot compile its float16 operations."""
    try:
        return (yield)
    except tf.errors.InternalError as error:
        if not numerics.XLA_HAS_FLOAT16 and "Failed to materialize symbols" in str(error):
            pytest.skip("XLA cannot compile float16 operations for this instruction set")
        raise
