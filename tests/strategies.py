"""Strategies over virtual CPUs, one of each per process: TensorFlow's collectives do not survive a second one."""

import functools

import tensorflow as tf


@functools.cache
def get(name):
    """Returns a strategy by name; None for no strategy."""
    if name == "none":
        return None
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("cpu:0")
    if name == "mirrored_2":
        return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    if name == "mirrored_4":
        return tf.distribute.MirroredStrategy(
            [f"cpu:{i}" for i in range(4)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    raise ValueError(name)
