"""The recorded behavior of TensorFlow 2.3's `tf.keras.mixed_precision.experimental.LossScaleOptimizer`."""

import numpy as np
import pytest
import tf_keras

from tests.conformance import recordings, replay
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental
from tools.record import calls

RECORDED = recordings.load("lso_experimental_tf23")


def sgd():
    return tf_keras.optimizers.legacy.SGD(0.1)


@pytest.mark.parametrize("name", calls.EXPERIMENTAL_CONFIGS)
def test_configs_are_those_of_the_original_and_round_trip(name):
    recorded = RECORDED["configs"][f"get_config, config {name}"]["ok"]
    optimizer = experimental.LossScaleOptimizer(sgd(), replay.loss_scale_of(calls.EXPERIMENTAL_CONFIGS[name]))
    config = optimizer.get_config()
    assert config["loss_scale"] == recorded["loss_scale"]
    assert config["optimizer"]["class_name"] == "SGD"
    assert config["optimizer"]["config"].items() >= recorded["optimizer"]["config"].items()
    again = type(optimizer).from_config(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == config
    read = experimental.LossScaleOptimizer.from_config({**recorded, "optimizer": config["optimizer"]})
    assert read.get_config() == config


@pytest.mark.parametrize("probe", [p for p in RECORDED["configs"] if p.startswith("get_config of ")])
def test_recorded_configs_of_every_optimizer_are_read(probe):
    recorded = RECORDED["configs"][probe]["ok"]
    if "loss_scale" not in recorded:
        pytest.skip("a config after training: no optimizer in it")
    config = {**recorded, "optimizer": {"module": "tf_keras.optimizers.legacy", **recorded["optimizer"]}}
    made = experimental.LossScaleOptimizer.from_config(config)
    assert made.get_config()["loss_scale"] == recorded["loss_scale"]
    assert type(made.inner_optimizer).__name__ == recorded["optimizer"]["class_name"]


ARGUMENTS = [p for p in RECORDED["api_probes"] if p.startswith("LSO(SGD, loss_scale=") and "dict config" not in p]


@pytest.mark.parametrize("probe", ARGUMENTS)
def test_the_argument_loss_scale_is_read_as_in_the_original(probe):
    recorded = RECORDED["api_probes"][probe]
    names = {name: getattr(legacy, name) for name in ("DynamicLossScale", "FixedLossScale")}
    names |= {"np": np, "inf": float("inf"), "nan": float("nan")}
    value = eval(probe.removeprefix("LSO(SGD, loss_scale=").removesuffix(")"), names)
    if probe == "LSO(SGD, loss_scale=np.float32(8))":  # the original refused a NumPy number
        assert float(experimental.LossScaleOptimizer(sgd(), loss_scale=value).loss_scale()) == float(value)
    elif "error" in recorded:
        with pytest.raises((ValueError, TypeError)):
            experimental.LossScaleOptimizer(sgd(), loss_scale=value)
    else:
        optimizer = experimental.LossScaleOptimizer(sgd(), loss_scale=value)
        recorded = recorded["ok"]
        assert type(optimizer.loss_scale).__name__ == recorded["loss_scale"]["type"].rsplit(".", 1)[1]
        np.testing.assert_equal(float(optimizer.loss_scale()), float(recorded["call"]))
        assert optimizer.loss_scale().dtype.name == recorded["call_dtype"]
        for key, config in optimizer.get_config()["loss_scale"]["config"].items():
            np.testing.assert_equal(config, float(recorded["get_config"]["loss_scale"]["config"][key]), key)
