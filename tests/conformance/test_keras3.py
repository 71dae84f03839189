"""Keras 3's own contract, `scale_loss` and scaled gradients, at the ends of float32, as recorded from Keras 3.

Differences on purpose: its scale has no bounds, so each case is compared as long as the recorded scale is at least 1
and finite (test_what_keras_3_does_at_the_bounds_is_not_done_here has what we do then); a scale in a half-precision loss
is the same before and after the optimizer is built, float32; an integer loss is a TypeError.
"""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests.conformance import recordings

RECORDED = recordings.load("keras3_lso")


def wrap(**config):
    return tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01), **config)


class Running:
    """One variable, stepped by Keras 3's contract."""

    def __init__(self, recorded):
        self.optimizer = wrap(**recorded["config"])
        self.variable = tf.Variable(1.0)
        self.step = tf.function(self._step) if recorded["function"] else self._step
        self.gradients = [g for g, count in recorded["gradients_run_length"] for _ in range(count)]

    def _step(self, gradient):
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.variable * gradient)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.variable), self.variable)])


EXTREMES = [
    case for case in RECORDED["extremes"] if not re.search(r"initial_scale (0.0|inf|nan)|growth_steps (0|2.5)$", case)
]


@pytest.mark.parametrize("case", EXTREMES)
def test_steps_are_those_of_keras_3_while_its_scale_is_within_bounds(case):
    recorded = RECORDED["extremes"][case]
    expected = recorded["result"]["ok"]
    scales = [float(scale) for scale in expected["loss_scale"]]
    running = Running(recorded)
    for i, gradient in enumerate(running.gradients):
        if not 1 <= scales[i] < math.inf:
            break
        running.step(tf.constant(float(gradient)))
        optimizer = running.optimizer
        assert float(optimizer.loss_scale) == scales[i], i
        assert int(optimizer.dynamic_counter) == expected["counter"][i], i
        assert int(optimizer.iterations) == expected["iterations"][i], i
        assert float(running.variable) == pytest.approx(float(expected["v"][i]), rel=1e-6), i


@pytest.mark.table("initial_scale 1e-45", "dynamic_growth_steps 1", every=1)
@pytest.mark.parametrize("case", EXTREMES)
def test_what_keras_3_does_at_the_bounds_is_not_done_here(case):
    running = Running(RECORDED["extremes"][case])
    start = running.optimizer.initial_scale
    for gradient in running.gradients:
        before = int(running.optimizer.iterations)
        running.step(tf.constant(float(gradient)))
        assert min(1.0, start) <= float(running.optimizer.loss_scale) < math.inf
        assert math.isfinite(float(running.variable))
    if math.isfinite(float(running.gradients[-1])) and start >= 1:
        assert int(running.optimizer.iterations) == before + 1, "no step is taken any more"


def test_scale_loss_gives_the_recorded_numbers():
    for probe, recorded in RECORDED["scaling"].items():
        if not probe.startswith("scale "):
            continue
        scale, dtype = re.fullmatch(r"scale (\S+), dtype (\w+)", probe).groups()
        values = recordings.array(recorded["ok"]["input"])
        optimizer = wrap(initial_scale=float(scale))
        for _ in ("not built", "built"):
            got = optimizer.scale_loss(tf.constant(values, dtype))
            expected = recorded["ok"]["scale_loss_built"]
            assert got.dtype.name == expected["dtype"], probe
            np.testing.assert_allclose(got, recordings.array(expected["value"]), 1e-6, 1e-37, err_msg=probe)
            optimizer.build([tf.Variable(1.0)])


def test_scale_loss_takes_numbers_and_arrays():
    optimizer = wrap(initial_scale=2.5)
    recorded = RECORDED["scaling"]
    assert float(optimizer.scale_loss(1.5)) == recorded["scale_loss(python float) unbuilt"]["ok"]["value"]
    assert float(optimizer.scale_loss(np.float32(1.5))) == recorded["scale_loss(numpy) unbuilt"]["ok"]["value"]
    assert [float(part) for part in optimizer.scale_loss([1.0, 2.0])] == recorded["scale_loss(list) unbuilt"]["ok"][
        "value"
    ]
    with pytest.raises(TypeError, match="floating"):
        optimizer.scale_loss(tf.constant(3))
