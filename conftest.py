"""Four virtual CPUs for all tests, or the cluster that TF_CONFIG names; before TensorFlow makes its devices."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tests import strategies

if strategies.ROLE:
    strategies.get(strategies.here()[0])
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
