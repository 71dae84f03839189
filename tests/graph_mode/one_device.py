"""Programs in graph mode that need a process with a single device: `python -m tests.graph_mode.one_device` prints JSON.

The other tests' processes have several devices, with which the wrapper builds other graphs.
"""

import json

import numpy as np
import tensorflow as tf

import tf_lossscale
from tf_lossscale import legacy
from tf_lossscale.libraries import keras_versions

v1 = tf.compat.v1
tf_keras = keras_versions.keras_2()

OPTIMIZERS = {
    "keras3": lambda: keras_versions.keras_3().optimizers.SGD(0.5),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.5),
    "tf_keras_legacy": lambda: tf_keras.optimizers.legacy.SGD(0.5),
    "tf1": lambda: v1.train.GradientDescentOptimizer(0.5),
}


def steps_in_a_conditional(inner):
    """A function takes a step only if its argument says so. Returns the weight after each call."""
    with tf.Graph().as_default(), v1.Session() as session:
        optimizer, weight = tf_lossscale.LossScaleOptimizer(inner(), initial_scale=8.0), tf.Variable(1.0)

        @tf.function
        def step(take, gradient):
            if take:
                optimizer.apply_gradients([(gradient, weight)])
            return tf.constant(True)

        take, gradient = (v1.placeholder(dtype, []) for dtype in (tf.bool, tf.float32))
        done = step(take, gradient)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        weights = []
        for values in ((False, 1.0), (True, 1.0), (False, np.nan), (True, np.nan), (True, 1.0)):
            session.run(done, {take: values[0], gradient: values[1]})
            weights.append(float(session.run(weight)))
        return weights


def accumulated_steps(inner):
    """Every second run takes a step inside a `tf.cond`. Returns the weight after each run."""
    with tf.Graph().as_default(), v1.Session() as session:
        optimizer, weight = tf_lossscale.LossScaleOptimizer(inner(), initial_scale=8.0), tf.Variable(1.0)
        count = tf.Variable(0)
        counted = count.assign_add(1)

        def step():
            return tf.group(optimizer.apply_gradients([(tf.constant(1.0), weight)]))

        done = tf.cond(tf.equal(counted % 2, 0), step, tf.no_op)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        weights = []
        for _ in range(4):
            session.run(done)
            weights.append(float(session.run(weight)))
        return weights


def two_steps_in_one_run():
    """The slower of a GAN's two steps must not write back the scale that it saw before the faster one's overflow."""
    with tf.Graph().as_default(), v1.Session() as session:
        optimizer = legacy.MixedPrecisionLossScaleOptimizer(v1.train.GradientDescentOptimizer(0.5), "dynamic")
        fast, slow = tf.Variable(1.0), tf.Variable(1.0)
        first = optimizer.minimize(fast * np.float32(np.inf), var_list=[fast])
        with tf.control_dependencies([first]):
            gradient = tf.identity(optimizer.loss_scale)  # of the scaled loss, when the fast step has ended
        second = optimizer.apply_gradients([(gradient, slow)])
        session.run(v1.global_variables_initializer())
        scales = []
        for _ in range(3):
            session.run([first, second])
            scales.append(float(session.run(optimizer.loss_scale)))
        return scales


if __name__ == "__main__":
    found = {}
    for name, make in OPTIMIZERS.items():
        found[f"conditional {name}"] = steps_in_a_conditional(make)
    for name in ("tf_keras_legacy", "tf1"):
        found[f"accumulated {name}"] = accumulated_steps(OPTIMIZERS[name])
    found["two steps"] = two_steps_in_one_run()
    tf.compat.v1.disable_control_flow_v2()
    found["two steps, control flow v1"] = two_steps_in_one_run()
    print(json.dumps(found))
