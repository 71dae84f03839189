"""Recorded steps under MirroredStrategy, with gradients that differ per replica."""

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.conformance import recordings, replay

FILES = ["lso_tf24", "lso_tf28", "lso_tfkeras221_legacy", "lso_tfkeras221_new", "keras3_lso"]

# Keras 3 looks only at the gradient of replica 0, and the recording of tf_keras ends in errors of its collectives. What
# TensorFlow 2.8 did with the same gradients is what we do around all of them; Keras 3's contract does not count skips.
RIGHT = "lso_tf28"


def cases():
    for recording in FILES:
        for name in recordings.load(recording)["distributed"]:
            source = recording if recording == "lso_tf24" else RIGHT
            if name in recordings.load(source)["distributed"]:
                yield recording, source, name


@pytest.mark.parametrize(("recording", "source", "name"), cases())
def test_all_replicas_follow_the_recorded_steps(recording, source, name):
    strategy = strategies.get("mirrored_2")
    recorded = recordings.load(source)["distributed"][name]
    optimizer_name, kwargs = recorded["optimizer"]
    keras3 = recording == "keras3_lso"

    def values(variable):
        variable = (
            getattr(variable, "value", variable) if keras3 and not isinstance(variable, tf.Variable) else variable
        )
        return [float(v) for v in strategy.experimental_local_results(variable)]

    with strategy.scope():
        variable = tf.Variable(1.0)
        inner = getattr(replay.OPTIMIZERS[recording], optimizer_name)(**kwargs)
        optimizer = tf_lossscale.LossScaleOptimizer(inner, **recorded["config"])

    def replica_step(gradients):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.gather(gradients, index)
        if keras3:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(variable * gradient)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        else:
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(variable * gradient)
            (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(loss, variable)])
            optimizer.apply_gradients([(gradient, variable)])

    def step(gradients):
        strategy.run(replica_step, args=(gradients,))

    run = tf.function(step) if name.endswith("tf.function") else step
    expected = recorded["result"]["ok"]
    applied = 0
    for i, gradients in enumerate(recorded["gradients"]):
        before = int(values(optimizer.iterations)[0])
        run(tf.constant(recordings.array(gradients), tf.float32))
        want = {key: [float(x) for x in expected[key][i]] for key in ("v", "loss_scale")}
        if not np.isfinite(want["v"]).all():
            # After an infinite gradient (fixed scale): -inf, or NaN where an optimizer has a momentum of 0 times inf.
            assert not np.isfinite(values(variable)).any(), i
        elif optimizer_name == "SGD" or not keras3:
            # Keras 3's Adam corrects its bias by another count of steps, as skipped ones do not count.
            assert values(variable) == pytest.approx(want["v"], rel=1e-5), i
        assert len(set(values(variable))) == 1 or not np.isfinite(values(variable)).all(), i
        assert float(optimizer.loss_scale) == want["loss_scale"][0], i
        if optimizer.dynamic:
            assert values(optimizer.dynamic_counter) == [float(x) for x in expected["dynamic_counter"][i]], i
            skipped = bool(strategy.experimental_local_results(optimizer.last_step_skipped)[0])
        else:
            skipped = False
        if keras3:
            assert values(optimizer.iterations) == [before + (not skipped)] * 2, i
            applied += not skipped
        else:
            assert values(optimizer.iterations)[0] == float(expected["iterations"][i][0]), i
    if keras3:
        assert values(optimizer.iterations) == [applied, applied]
