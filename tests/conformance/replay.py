"""Runs what was recorded on this package: training traces, ends of float32, and steps of replicas."""

import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import loops, strategies
from tests.conformance import recordings
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental
from tools.record import training

EXPERIMENTAL = "lso_experimental_tf23"
# Recording -> the optimizers that it was made with.
OPTIMIZERS = {
    "lso_tf24": tf_keras.optimizers.legacy,
    "lso_tf28": tf_keras.optimizers.legacy,
    "lso_tfkeras221_legacy": tf_keras.optimizers.legacy,
    "lso_tfkeras221_new": tf_keras.optimizers,
    "keras3_lso": tf.keras.optimizers,
    EXPERIMENTAL: tf_keras.optimizers.legacy,
}


def loss_scale_of(config):
    """The argument of the experimental wrapper for a config in the words of newer versions."""
    if not config:
        return "dynamic"
    if config.get("dynamic", True):
        return legacy.DynamicLossScale(config["initial_scale"], config["dynamic_growth_steps"], 2.0)
    return config["initial_scale"]


def wrap(recording, name="SGD", kwargs=None, **config):
    """Returns a wrapped optimizer of a recording's library."""
    inner = getattr(OPTIMIZERS[recording], name)(**(kwargs or {}))
    if recording == EXPERIMENTAL:
        return experimental.LossScaleOptimizer(inner, loss_scale_of(config))
    return tf_lossscale.LossScaleOptimizer(inner, **config)


def once(recorded_cases):
    """Leave out cases of the same classes with the same recording, given as (recording, ..., recorded)."""
    seen = []
    for recording, *names, recorded in recorded_cases:
        replayed = OPTIMIZERS[recording], recording == EXPERIMENTAL, names[-1], recorded
        if replayed not in seen:
            seen.append(replayed)
            yield (recording, *names)


def stands_still(recording, scale):
    """Whether the original's weights stand still at a scale: its reciprocal is zero. Keras 3 divides.

    From then on weights are not compared with the recording; tests/core/test_quotients.py compares such steps with
    those of a bare optimizer.
    """
    return recording != "keras3_lso" and 2.0**126 < scale < float("inf")


class OfThisPackage:
    """Makes the optimizer of a replay; a subclass of `training.Replay` has it as a base."""

    def __init__(self, recording, case, initial):
        self.recording, self.keras3 = recording, recording == "keras3_lso"
        super().__init__(case, initial)

    def wrap(self, case):
        return wrap(self.recording, case["optimizer_class"], case["optimizer_kwargs"], **case["config"])


class _Replay(OfThisPackage, training.Replay):
    pass


class _GraphReplay(OfThisPackage, training.GraphReplay):
    """The same in a TF1 graph with a Session."""


def trace(recording, case, how):
    """Yields the state after each step of a training trace."""
    recorded = recordings.load(recording)
    kind = _GraphReplay if how == "graph" else _Replay
    running = kind(recording, {**case, "how": how}, recorded["initial_variables"])
    yield from training.steps(running, recorded["sequences"][case["sequence"]])


def take(optimizer, variable, gradient, keras3=False):
    """Takes a step, by Keras 3's contract or TensorFlow's."""
    if keras3:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(variable * gradient)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    else:
        loops.step(optimizer, lambda: variable * gradient, [variable])


def extreme(optimizer, recorded, keras3=False):
    """Yields each gradient of a recorded case at the ends of float32, and the state after its step."""
    variable = tf.Variable(1.0)

    def step(gradient):
        take(optimizer, variable, gradient, keras3)

    run = tf.function(step) if recorded["function"] else step
    for gradient in (float(g) for g, count in recorded["gradients_run_length"] for _ in range(count)):
        run(tf.constant(gradient))
        counts = int(optimizer.dynamic_counter), int(optimizer.iterations)
        yield gradient, (float(optimizer.loss_scale), *counts, float(variable))


def on_each_replica(variable):
    """A variable's values; a keras.Variable holds the one that a strategy made."""
    variable = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
    return [float(v) for v in strategies.get("mirrored_2").experimental_local_results(variable)]


def distributed(recording, recorded, is_compiled):
    """Yields the optimizer and the variable after each recorded step of two replicas."""
    strategy = strategies.get("mirrored_2")
    name, kwargs = recorded["optimizer"]
    with strategy.scope():
        variable = tf.Variable(1.0)
        optimizer = wrap(recording, name, kwargs, **recorded["config"])

    def on_replica(gradients):
        gradient = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
        take(optimizer, variable, gradient, recording == "keras3_lso")

    def step(gradients):
        strategy.run(on_replica, args=(gradients,))

    run = tf.function(step) if is_compiled else step
    for gradients in recorded["gradients"]:
        run(tf.constant(recordings.array(gradients), tf.float32))
        yield optimizer, variable
