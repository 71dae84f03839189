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
from tests.cases import combinations
from tests.conformance import recordings, replay

RECORDED = recordings.load("keras3_lso")


def wrap(**config):
    return tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01), **config)


EXTREMES = [
    case for case in RECORDED["extremes"] if not re.search(r"initial_scale (0.0|inf|nan)|growth_steps (0|2.5)$", case)
]


@pytest.mark.parametrize("case", EXTREMES)
def test_steps_are_those_of_keras_3_while_its_scale_is_within_bounds(case):
    recorded = RECORDED["extremes"][case]
    expected = recorded["result"]["ok"]
    columns = [[float(x) for x in expected[key]] for key in ("loss_scale", "counter", "iterations", "v")]
    steps = replay.extreme(wrap(**recorded["config"]), recorded, keras3=True)
    for (scale, *counts, value), (_, ours) in zip(zip(*columns), steps):
        if not 1 <= scale < math.inf:
            break
        assert ours == (scale, *counts, pytest.approx(value, rel=1e-6))


@pytest.mark.parametrize(
    "case", combinations(EXTREMES, usual=["initial_scale 1e-45", "dynamic_growth_steps 1"], others=pytest.mark.slow)
)
def test_what_keras_3_does_at_the_bounds_is_not_done_here(case):
    optimizer = wrap(**RECORDED["extremes"][case]["config"])
    start = optimizer.initial_scale
    steps = list(replay.extreme(optimizer, RECORDED["extremes"][case], keras3=True))
    for _, (scale, _, _, value) in steps:
        assert min(1.0, start) <= scale < math.inf
        assert math.isfinite(value)
    before, (gradient, after) = steps[-2:][0][1][2], steps[-1]
    if math.isfinite(gradient) and start >= 1:
        assert after[2] == before + 1, "no step is taken any more"


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
