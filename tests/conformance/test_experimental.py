"""The recorded behavior of TensorFlow 2.3's `tf.keras.mixed_precision.experimental.LossScaleOptimizer`."""

import fnmatch

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import loops, strategies
from tests.conformance import probes, recordings, replay, test_probes
from tests.conformance.record import calls
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental

pytestmark = pytest.mark.wide("the calls and traces of TensorFlow 2.3, which are as in 2.4")

RECORDED = recordings.load("lso_experimental_tf23")

# Pattern of traces -> why we differ on purpose. What we do instead is what eager mode does.
DIFFERENCES = {
    "*|C_overflow_bursts|*_function": "the graph optimizer hid an overflow that only scaling causes",
    "*|nearmax|F_dense_finite|*_function": "the graph optimizer rounded a small gradient to zero",
}
# Optimizers that TensorFlow 2.3 refused to wrap, and that are taken here.
TAKEN_HERE = ("sgd_clipnorm", "adam_clipvalue", "sgd_global_clipnorm")


def loss_scale_of(config):
    """The argument that the recording was made with, for its config in the words of newer versions."""
    if not config:
        return "dynamic"
    if config.get("dynamic", True):
        return legacy.DynamicLossScale(config["initial_scale"], config["dynamic_growth_steps"], 2.0)
    return config["initial_scale"]


def sgd(learning_rate=0.1, **kwargs):
    return tf_keras.optimizers.legacy.SGD(learning_rate, **kwargs)


class Experimental:
    """The experimental optimizer in the replay of a trace."""

    @staticmethod
    def wrap(case):
        inner = getattr(tf_keras.optimizers.legacy, case["optimizer_class"])(**case["optimizer_kwargs"])
        return experimental.LossScaleOptimizer(inner, loss_scale_of(case["config"]))


class Replay(Experimental, replay.Replay):
    pass


class GraphReplay(Experimental, replay.GraphReplay):
    pass


def differs(name):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DIFFERENCES)


def run(case, how):
    kind = GraphReplay if how == "graph" else Replay
    running = kind("lso_experimental_tf23", {**case, "how": how}, RECORDED["initial_variables"])
    try:
        for event in RECORDED["sequences"][case["sequence"]]:
            running.step(event["grads"])
            yield event["event"], running.state()
    finally:
        if how == "graph":
            running.close()


TRACES = [name for name, case in RECORDED["traces"].items() if "trace" in case]


@pytest.mark.table(every=7)
@pytest.mark.parametrize("name", TRACES)
def test_traces_agree_with_the_original(name):
    case = RECORDED["traces"][name]
    expected = case["trace"]
    if differs(name):
        states = [state for _, state in run(case, case["how"].removesuffix("_function"))]
        expected = {key: [state[key] for state in states] for key in states[0]}
    tolerance = 2e-3 if case.get("var_dtype") == "float16" else 1e-5
    stands_still, scale = False, float(case["config"].get("initial_scale", 2.0**15))
    for step, (event, state) in enumerate(run(case, case["how"])):
        stands_still |= replay.stands_still("lso_experimental_tf23", scale)
        scale = state["loss_scale"]
        for key, value in state.items():
            if stands_still and key.startswith("w"):
                continue
            want = expected[key][step] if isinstance(expected[key], list) else expected[key]
            where = f"step {step} ({event}): {key}"
            if key.startswith("w"):
                want = recordings.array(want)
                np.testing.assert_allclose(value, want, tolerance, tolerance, equal_nan=True, err_msg=where)
            else:
                assert value == (None if want is None else float(want)), where


@pytest.mark.first
def test_every_trace_is_replayed_or_says_why_not():
    refused = [name for name, case in RECORDED["traces"].items() if "error" in case]
    for name in refused:
        case = RECORDED["traces"][name]
        if case["optimizer"] in TAKEN_HERE:
            assert Experimental.wrap(case).inner_optimizer is not None
        else:
            with pytest.raises(ValueError, match="at least 1"):
                Experimental.wrap(case)
    assert len(refused) + len(TRACES) == len(RECORDED["traces"])


@pytest.mark.first
@pytest.mark.parametrize("name", calls.EXPERIMENTAL_CONFIGS)
def test_configs_are_those_of_the_original_and_round_trip(name):
    recorded = RECORDED["configs"][f"get_config, config {name}"]["ok"]
    optimizer = experimental.LossScaleOptimizer(sgd(), loss_scale_of(calls.EXPERIMENTAL_CONFIGS[name]))
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


# Arguments that the original refused, and that are taken here.
TAKEN_ARGUMENTS = {"LSO(SGD, loss_scale=np.float32(8))": "a NumPy number is a number"}


def argument_probes():
    for probe in RECORDED["api_probes"]:
        if probe.startswith("LSO(SGD, loss_scale=") and "dict config" not in probe:
            yield probe


@pytest.mark.parametrize("probe", list(argument_probes()))
def test_the_argument_loss_scale_is_read_as_in_the_original(probe):
    recorded = RECORDED["api_probes"][probe]
    names = {name: getattr(legacy, name) for name in ("DynamicLossScale", "FixedLossScale")}
    names |= {"np": np, "inf": float("inf"), "nan": float("nan")}
    value = eval(probe.removeprefix("LSO(SGD, loss_scale=").removesuffix(")"), names)
    if probe in TAKEN_ARGUMENTS:
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


def scalings():
    return [p for p in RECORDED["scaling"] if p.startswith("scale ")]


@pytest.mark.parametrize("probe", scalings())
def test_loss_and_gradients_are_scaled_to_the_recorded_numbers(probe):
    recorded = RECORDED["scaling"][probe]
    scale, dtype = probe.removeprefix("scale ").split(", dtype ")

    class Scale(legacy.LossScale):
        def __call__(self):
            return tf.constant(float(scale))

        def update(self, grads):
            return tf.no_op(), True

        def get_config(self):
            return {}

    optimizer = experimental.LossScaleOptimizer(sgd(), Scale())
    if "error" in recorded:
        pytest.skip("the original refused the scale")
    recorded = recorded["ok"]
    values = tf.constant(recordings.array(recorded["input"]), dtype)
    rtol = 1e-3 if dtype == "float16" else 1e-6
    tiny = 1e-7 if dtype == "float16" else 1e-37
    scaled = optimizer.get_scaled_loss(values)
    np.testing.assert_allclose(
        tf.cast(scaled, tf.float64), recordings.array(recorded["get_scaled_loss"]["value"]), rtol, tiny
    )
    dense, none = optimizer.get_unscaled_gradients([values, None])
    expected = recordings.right_gradients(recorded, recorded["get_unscaled_gradients"]["dense"], float(scale), dtype)
    np.testing.assert_allclose(tf.cast(dense, tf.float64), expected, rtol, tiny)
    assert (scaled.dtype.name, dense.dtype.name, none) == (dtype, dtype, None)


# Extremes from scales that the original took although nothing can be trained with them, as it went.
@pytest.mark.table(every=3)
@pytest.mark.parametrize("case", RECORDED["extremes"])
def test_the_ends_of_float32_are_survived_as_recorded(case):
    recorded = RECORDED["extremes"][case]
    name, kwargs = recorded["optimizer"]
    config = {**recorded["config"], "initial_scale": float(recorded["config"]["initial_scale"])}
    optimizer = experimental.LossScaleOptimizer(
        getattr(tf_keras.optimizers.legacy, name)(**kwargs), loss_scale_of(config)
    )
    variable = tf.Variable(1.0)

    def step(gradient):
        loops.step(optimizer, lambda: variable * gradient, [variable])

    compiled = tf.function(step) if recorded["function"] else step
    gradients = [g for g, count in recorded["gradients_run_length"] for _ in range(count)]
    expected, ahead = recorded["result"]["ok"], 0.0
    for i, gradient in enumerate(gradients):
        before = float(optimizer.loss_scale())
        compiled(tf.constant(float(gradient)))
        ahead += recordings.passed_over(before, expected["loss_scale"][i], gradient, **kwargs)
        state = float(optimizer.loss_scale()), int(optimizer.iterations)
        np.testing.assert_equal(state, (float(expected["loss_scale"][i]), expected["iterations"][i]), str(i))
        assert int(optimizer.dynamic_counter) == expected["counter"][i], i
        np.testing.assert_allclose(float(variable), float(expected["v"][i]) - ahead, 1e-6, 1e-7, err_msg=str(i))


@pytest.mark.table(every=7)
@pytest.mark.parametrize("name", RECORDED["distributed"])
def test_mirrored_replicas_agree_as_recorded(name):
    recorded = RECORDED["distributed"][name]
    kind, kwargs = recorded["optimizer"]
    strategy = strategies.get("mirrored_2")

    def values(variable):
        return [float(v) for v in strategy.experimental_local_results(variable)]

    with strategy.scope():
        variable = tf.Variable(1.0)
        inner = getattr(tf_keras.optimizers.legacy, kind)(**kwargs)
        optimizer = experimental.LossScaleOptimizer(inner, loss_scale_of(recorded["config"]))

    def replica_step(gradients):
        gradient = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
        loops.step(optimizer, lambda: variable * gradient, [variable])

    def step(gradients):
        strategy.run(replica_step, args=(gradients,))

    run_step = tf.function(step) if name.endswith("tf.function") else step
    expected = recorded["result"]["ok"]
    for i, gradients in enumerate(recorded["gradients"]):
        run_step(tf.constant(recordings.array(gradients), tf.float32))
        np.testing.assert_allclose(values(variable), recordings.array(expected["v"][i]), 1e-5, err_msg=f"step {i}")
        assert float(optimizer.loss_scale()) == float(expected["loss_scale"][i][0]), i
        assert values(optimizer.iterations) == [float(x) for x in expected["iterations"][i]], i


class Bench(probes.Bench):
    """The bench of the recorded calls, with the experimental wrapper."""

    LossScaleOptimizer = experimental.LossScaleOptimizer
    DynamicLossScale = legacy.DynamicLossScale
    arguments = ("dynamic",)

    def __init__(self, recording):
        super().__init__("lso_tf24")

    def wrap(self, name="SGD", kwargs=None, initial_scale=8.0, dynamic_growth_steps=2000):
        inner = getattr(self.optimizers, name)(**({"learning_rate": 0.1} if kwargs is None else kwargs))
        return experimental.LossScaleOptimizer(inner, legacy.DynamicLossScale(initial_scale, dynamic_growth_steps))


# Call -> our result or error, and why.
DIFFERENT_CALLS = {
    "IndexedSlices without dense_shape": ({"v": [0.9, 2.0], "scale": 8.0, "counter": 1.0}, "no dense shape is needed"),
    "minimize(tensor, tape=tape)": ({"v": [0.8, 1.6], "scale": 8.0}, "every name has the arguments of 2.4"),
    "minimize with grad_loss": ([0.4, 1.4], "the same"),
    'learning_rate = "x"': (ValueError, "the setter says what a rate can be; the inner optimizer would fail later"),
    "wrapper.beta_1 = 0.0 after first step (Adam)": (
        {"after": [0.97735, 1.99735], "inner_beta_1": 0.0, "wrapper_beta_1": 0.0},
        "hyperparameters reach the inner optimizer, as the documentation of 2.4 has it",
    ),
    "wrapper.momentum = 0.9 on SGD built without momentum": (
        {"v_after_2_steps": [0.8, 1.8], "inner_momentum": 0.9},
        "the same",
    ),
    "get_unscaled_gradients(?int tensor?)": (TypeError, "an integer gradient would be cut to zero"),
    "get_scaled_loss(int tensor)": (TypeError, "an integer loss has no gradient"),
    "apply_gradients wrong shape": (
        (ValueError, tf.errors.InvalidArgumentError),
        "an error of ours, before anything has changed",
    ),
    "from_config(None)": (TypeError, "says what a config is"),
}
ELSEWHERE = (
    "LSO(SGD, loss_scale=*",  # the tests above
    "state attributes, *",
    "scale *",
    "get_config*",
    "round trip of *",
    "custom LossScale subclass",  # tests/legacy/test_own_loss_scales.py
    "compile(*",  # tests/legacy/test_install.py
    "clipnorm inner",  # TAKEN_HERE
    "set wrapper.clipnorm",
    "mro",
    "repr(wrapper)",
    "isinstance of the optimizer base",
    "get_scaled_loss(python float)",  # a number is made a tensor
    "get_scaled_loss(None)",
)


@pytest.mark.table("scaling", "configs", "api_probes", "warnings", "errors", every=1)
@pytest.mark.parametrize("section", test_probes.TABLES)
def test_calls_do_what_the_recorded_ones_did(section, monkeypatch):
    monkeypatch.setattr(probes, "Bench", Bench)
    monkeypatch.setattr(test_probes, "DIFFERENCES", {("*", probe): entry for probe, entry in DIFFERENT_CALLS.items()})
    failures = []
    for probe, recorded in RECORDED[section].items():
        call = calls.EXPERIMENTAL.get(probe) or test_probes.TABLES[section].get(probe)
        if call is None:
            assert any(fnmatch.fnmatchcase(probe, pattern) for pattern in ELSEWHERE), f"{probe} is left out"
        elif failure := test_probes.check("tf23", probe, call, recorded):
            failures.append(failure)
    assert not failures, "\n".join(failures)
