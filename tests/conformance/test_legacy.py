"""Loss scales and managers of TensorFlow 1.15 to 2.3 and compat.v1, recorded, in every mode."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.conformance import recordings
from tf_lossscale import legacy

SCALES = ["dynamic_loss_scale_tf115", "dynamic_loss_scale_tf23", "dynamic_loss_scale_compat_v1_tf221"]
# Recorded mode -> ours. Ref variables are gone from TensorFlow; resource variables behave the same.
MODES = {"eager": "eager", "function": "function", "graph": "graph", "graph_cfv2": "graph", "graph_v1cond": "graph_v1"}

# (recording, event) -> why we differ on purpose; the outcome is then the one given.
DIFFERENCES = {
    ("dynamic_loss_scale_compat_v1_tf221", "slices_dup_sum_overflows"): (
        False,
        "rows with the same index are summed when they are applied: the sum is what counts, as TensorFlow 1.15 had it",
    ),
    ("dynamic_loss_scale_tf115", "slices_without_dense_shape_inf"): (False, "no dense shape is needed to check them"),
    ("dynamic_loss_scale_tf23", "slices_without_dense_shape_inf"): (False, "the same"),
    ("dynamic_loss_scale_tf115", "slices_without_dense_shape_finite"): (True, "the same"),
    ("dynamic_loss_scale_tf23", "slices_without_dense_shape_finite"): (True, "the same"),
}


def structure(spec):
    """The gradients that a recorded spec describes."""
    if spec is None:
        return None
    if isinstance(spec, list):
        return [structure(s) for s in spec]
    if "list" in spec:
        return [structure(s) for s in spec["list"]]
    if "dict" in spec:
        return {key: structure(s) for key, s in spec["dict"].items()}
    if "slices" in spec:
        parts = spec["slices"]
        shape = parts["dense_shape"]
        return tf.IndexedSlices(
            tf.constant(recordings.array(parts["values"]), spec["dtype"]),
            tf.constant(parts["indices"]),
            None if shape is None else tf.constant(shape),
        )
    if "dense" in spec:
        return tf.constant(recordings.array(spec["dense"]), spec["dtype"])
    if "numpy" in spec:
        return recordings.array(spec["numpy"], "float32")
    return [float(v) for v in spec["python"]]


@functools.cache
def _finite(text):
    return not any(bad in text for bad in ("nan", "inf"))


def finite_event(name, spec):
    """Whether an event's gradients are finite, told by the recorded numbers themselves."""
    return _finite(str(spec)) and name != "slices_dup_sum_overflows"


class Running:
    """A loss scale in one mode."""

    def __init__(self, mode, make):
        self.mode = mode
        self.stack = contextlib.ExitStack()
        if mode.startswith("graph"):
            self.graph = tf.Graph()
            self.stack.enter_context(self.graph.as_default())
            if mode == "graph_v1":
                self.stack.callback(tf.compat.v1.enable_control_flow_v2)
                tf.compat.v1.disable_control_flow_v2()
            self.session = self.stack.enter_context(tf.compat.v1.Session())
        self.scale = make()
        if mode.startswith("graph"):
            self.session.run(tf.compat.v1.global_variables_initializer())
        self.updates = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def update(self, name, spec):
        """Updates with one event; returns should_apply. Graphs are built once, and fed finite or NaN gradients."""
        if self.mode == "eager":
            return bool(self.scale.update(structure(spec))[1])
        finite = finite_event(name, spec)
        if self.mode == "function":
            if not self.updates:
                self.updates = tf.function(lambda g: self.scale.update([g])[1])
            return bool(self.updates(tf.constant([1.0 if finite else np.nan])))
        if not self.updates:
            self.fed = tf.compat.v1.placeholder(tf.float32, [1])
            self.updates = self.scale.update([self.fed])
        operation, apply = self.updates
        return bool(self.session.run([apply, operation], {self.fed: [1.0 if finite else np.nan]})[0])

    def state(self):
        """(scale, counter)."""
        values = [self.scale(), self.scale.good_steps]
        if self.mode.startswith("graph"):
            values = self.session.run(values)
        return float(values[0]), int(values[1])


CASES = [(recording, mode) for recording in SCALES for mode in ("eager", "function", "graph", "graph_v1")]


@pytest.mark.parametrize(("recording", "mode"), CASES, ids=["-".join(c) for c in CASES])
def test_dynamic_loss_scale_moves_as_recorded(recording, mode):
    recorded = recordings.load(recording)
    replayed = 0
    for name, case in recorded["cases"].items():
        theirs = [m for m in case["traces"] if MODES[m] == mode]
        if not theirs:
            continue
        trace = case["traces"][theirs[-1]]
        trace = case["traces"][trace["same_trace_as"]] if "same_trace_as" in trace else trace
        with Running(mode, lambda case=case: legacy.DynamicLossScale(**case["kwargs"])) as running:
            assert running.state() == tuple(float(x) for x in trace["initial"]), name
            good = float("nan")
            for step, event in enumerate(recorded["sequences"][case["sequence"]]):
                apply = running.update(event, recorded["events"][event])
                scale, good = running.state()
                if (recording, event) in DIFFERENCES:
                    assert apply == DIFFERENCES[recording, event][0]
                    break  # from here on the two have different scales
                assert apply == trace["should_apply"][step], (name, step, event)
                # TensorFlow turns a division by a constant into a multiplication in some graphs: the last bit.
                exact = mode == "eager" or case["kwargs"].get("multiplier", 2.0) in (1.0, 2.0, 4.0, 0.5)
                wanted = float(trace["scale"][step])
                assert scale == (wanted if exact else pytest.approx(wanted, rel=1e-6)), (name, step, event)
                assert good == trace["good_steps"][step], (name, step, event)
        replayed += 1
    if mode == "graph_v1" and recording == "dynamic_loss_scale_tf115":
        assert replayed == 0, "its graph mode is replayed as graph"
    else:
        assert replayed > 40


@pytest.mark.parametrize("recording", SCALES)
@pytest.mark.parametrize("part", ["single_events", "odd_gradients"])
def test_single_updates_are_as_recorded(recording, part):
    for name, case in recordings.load(recording)[part].items():
        recorded = case["result"]["eager"]
        spec = case["grads"]
        if (recording, name) in DIFFERENCES:
            assert (
                Running("eager", lambda: legacy.DynamicLossScale(64.0, 3, 2.0)).update(name, spec)
                == (DIFFERENCES[recording, name][0])
            )
            continue
        running = Running("eager", lambda: legacy.DynamicLossScale(64.0, 3, 2.0))
        if "error" in recorded:
            with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
                running.scale.update([1, 2] if "python_int" in str(spec) else structure(spec))
            assert running.state() == (64.0, 0), name
        else:
            assert running.update(name, spec) == recorded["ok"]["should_apply"], name
            assert running.state() == (recorded["ok"]["scale"], recorded["ok"]["good_steps"]), name


@pytest.mark.parametrize("recording", SCALES)
def test_per_replica_gradients_are_all_looked_at(recording):
    recorded = recordings.load(recording)
    strategy = strategies.get("mirrored_2")
    for name, case in recorded["distributed_cases"].items():
        trace = case.get("traces", {}).get("eager") or case.get("trace") or case.get("result", {}).get("ok")
        with strategy.scope():
            scale = legacy.DynamicLossScale(**case["kwargs"])
            for step, events in enumerate(case["sequence"]):
                gradients = strategy.experimental_distribute_values_from_function(
                    lambda context, events=events: tf.constant(
                        [1.0 if events[context.replica_id_in_sync_group] == "finite" else float("nan")]
                    )
                )
                _, apply = scale.update([gradients])
                assert bool(apply) == (set(events) == {"finite"})
                if trace:
                    values = trace["scale"][step]
                    expected = values[0] if isinstance(values, list) else values
                    assert float(scale()) == float(expected), (name, step)


@pytest.mark.parametrize("recording", SCALES)
def test_constructors_configs_and_get_are_as_recorded(recording):
    scope = {"D": legacy.DynamicLossScale, "F": legacy.FixedLossScale, "np": np, "tf": tf, "get": legacy.get}
    scope.update(
        inf=float("inf"), nan=float("nan"), full={"initial_loss_scale": 4, "increment_period": 3, "multiplier": 3}
    )
    scope["object"] = object
    probes = 0
    for probe, by_mode in recordings.load(recording)["api_probes"].items():
        recorded = by_mode["eager"]
        expression = probe.removeprefix("construct ")
        if not (probe.startswith(("construct D", "construct F", "get("))) or "np.array" in expression:
            continue
        probes += 1
        if "error" in recorded:
            errors = {"OverflowError": OverflowError, "TypeError": TypeError, "ValueError": ValueError}
            with pytest.raises(errors[recorded["error"]["type"]]):
                eval(expression, scope)
            continue
        made = eval(expression, scope)
        wanted = recorded["ok"] if isinstance(recorded["ok"], str) else recorded["ok"]["repr"]
        assert repr(made) == wanted, probe
        if isinstance(recorded["ok"], dict):
            for key, value in recorded["ok"]["config"].items():
                got = made.get_config()[key]
                assert type(got).__name__ == value["type"], (probe, key)
                np.testing.assert_equal(got, float(value["value"]) if value["type"] == "float" else value["value"])
            assert repr(type(made).from_config(made.get_config())) == wanted
    assert probes > 35


def test_a_checkpoint_has_the_recorded_keys_and_restores_into_another_config(tmp_path):
    first = legacy.DynamicLossScale(8.0, 1)
    first.update([tf.constant(1.0)])
    path = tf.train.Checkpoint(ls=first).write(str(tmp_path / "ckpt"))
    keys = {name for name, _ in tf.train.list_variables(path)}
    assert {f"ls/{n}/.ATTRIBUTES/VARIABLE_VALUE" for n in ("current_loss_scale", "good_steps")} <= keys
    second = legacy.DynamicLossScale(32.0, 5, 3.0)
    tf.train.Checkpoint(ls=second).read(path).assert_consumed()
    assert float(second()) == 16.0
    assert (second.initial_loss_scale, second.increment_period, second.multiplier) == (32.0, 5, 3.0)


CONTRIB = "contrib_exponential_manager_tf115"


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_exponential_managers_move_as_recorded(mode):
    recorded = recordings.load(CONTRIB)
    for name, case in recorded["manager_cases"].items():
        trace = case["traces"]["graph"]["ok"]
        with Running(mode, lambda case=case: legacy.ExponentialUpdateLossScaleManager(**case["kwargs"])) as running:
            manager = running.scale
            flag = tf.compat.v1.placeholder(tf.bool, []) if mode == "graph" else None
            update = manager.update_loss_scale(flag) if mode == "graph" else None
            for step, finite in enumerate(recorded["finite_sequences"][case["sequence"]]):
                state = [manager.get_loss_scale(), manager._state.good_steps, manager._state.bad_steps]
                if mode == "graph":
                    running.session.run(update, {flag: bool(finite)})
                    state = running.session.run(state)
                else:
                    manager.update_loss_scale(tf.constant(bool(finite)))
                    state = [manager.get_loss_scale(), manager._state.good_steps, manager._state.bad_steps]
                scale, good, bad = (float(x) for x in state)
                assert scale == float(trace["loss_scale"][step]), (name, step)
                assert (good, bad) == (trace["good_steps"][step], trace["bad_steps"][step]), (name, step)


def optimizer_cases():
    for recording, part in ((CONTRIB, "loss_scale_optimizer_cases"), ("mixed_precision_lso_tf115", "cases")):
        for name in recordings.load(recording)[part]:
            yield pytest.param(recording, part, name, id=f"{recording[:7]}-{name}")


def wrapped(case):
    inner = getattr(tf.compat.v1.train, case["inner"]["cls"])(**case["inner"]["kwargs"])
    if "manager" in case:
        manager = getattr(legacy, case["manager"])(**case["manager_kwargs"])
        from tf_lossscale.legacy import contrib

        return contrib.LossScaleOptimizer(inner, manager)
    kind, value = (
        next(iter(case["loss_scale"].items())) if isinstance(case["loss_scale"], dict) else ("", case["loss_scale"])
    )
    scale = legacy.DynamicLossScale(*value) if kind == "dynamic" else value
    return legacy.MixedPrecisionLossScaleOptimizer(inner, scale)


@pytest.mark.parametrize(("recording", "part", "name"), optimizer_cases())
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_optimizers_of_tensorflow_1_train_as_recorded(recording, part, name, mode):
    recorded = recordings.load(recording)
    case = recorded[part][name]
    # Where a graph of the original hid an overflow that only the scaling causes, we do what eager mode did.
    trace = case["traces"]["eager"].get("ok") or case["traces"]["graph"]["ok"]
    if mode == "graph" and "dynamic" in str(case.get("loss_scale")):
        trace = case["traces"]["graph"]["ok"]
    gradients = recorded["gradient_sequences"][case["gradients"]]

    def loss(a, b, ga, gb):
        return tf.reduce_sum(a * ga) + tf.reduce_sum(b * gb)

    def make():
        a = tf.Variable(recordings.array(case["initial"]["a"], "float32"), name="a")
        b = tf.Variable(recordings.array(case["initial"]["b"], "float32"), name="b")
        return wrapped(case), a, b, tf.Variable(0, dtype=tf.int64, name="global_step", trainable=False)

    def take(optimizer, a, b, step, ga, gb):
        value = loss(a, b, ga, gb) if mode == "graph" else (lambda: loss(a, b, ga, gb))
        if case["how"] == "minimize":
            return optimizer.minimize(value, global_step=step, var_list=[a, b])
        return optimizer.apply_gradients(optimizer.compute_gradients(value, [a, b]), global_step=step)

    with contextlib.ExitStack() as stack:
        if mode == "graph":
            stack.enter_context(tf.Graph().as_default())
            session = stack.enter_context(tf.compat.v1.Session())
            optimizer, a, b, global_step = make()
            feeds = [tf.compat.v1.placeholder(tf.float32, v.shape) for v in (a, b)]
            operation = take(optimizer, a, b, global_step, *feeds)
            scale = optimizer.loss_scale
            session.run(tf.compat.v1.global_variables_initializer())
        else:
            optimizer, a, b, global_step = make()
        for i, (ga, gb) in enumerate(gradients):
            values = [recordings.array(ga, "float32").reshape(2), recordings.array(gb, "float32").reshape(1)]
            if mode == "graph":
                session.run(operation, dict(zip(feeds, values)))
                state = session.run([a, b, scale, global_step])
            else:
                take(optimizer, a, b, global_step, *[tf.constant(v) for v in values])
                state = [a.numpy(), b.numpy(), float(optimizer.loss_scale), int(global_step)]
            np.testing.assert_allclose(state[0], recordings.array(trace["a"][i]), 1e-5, 1e-6, err_msg=f"step {i}")
            np.testing.assert_allclose(state[1], recordings.array(trace["b"][i]), 1e-5, 1e-6, err_msg=f"step {i}")
            assert float(state[2]) == float(trace["loss_scale"][i]), i
            assert int(state[3]) == trace["global_step"][i], i
