"""Creates four virtual CPUs for all tests, or the cluster of TF_CONFIG, before TensorFlow initializes its devices."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

from tests import numerics, strategies

if strategies.ROLE:
    strategies.get(strategies.here()[0])
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


def pytest_collection_modifyitems(items):
    """Runs the slow tests first: if one started last, the other test process would be idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips a test if XLA cannot compile its float16 operations."""
    try:
        return (yield)
    except tf.errors.InternalError as error:
        if not numerics.XLA_HAS_FLOAT16 and "Failed to materialize symbols" in str(error):
            pytest.skip("for this instruction set XLA compiles no float16")
        raise
