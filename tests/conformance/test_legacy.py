"""Loss scales and managers of TensorFlow 1.15 to 2.3 and compat.v1, recorded, in every mode."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations, slow_one_in
from tests.conformance import recordings
from tf_lossscale import legacy
from tf_lossscale.legacy import contrib

SCALES = ["dynamic_loss_scale_tf115", "dynamic_loss_scale_tf23", "dynamic_loss_scale_compat_v1_tf221"]
# Recorded mode -> ours. Ref variables are gone from TensorFlow; resource variables behave the same.
MODES = {"eager": "eager", "function": "function", "graph": "graph", "graph_cfv2": "graph", "graph_v1cond": "graph_v1"}

# (recording, event) -> why we differ on purpose; the outcome is then the one given.
DIFFERENCES = {
    ("dynamic_loss_scale_compat_v1_tf221", "slices_dup_sum_overflows"): (
        False,
        "rows with the same index are summed when they are applied: the sum is what counts, as TensorFlow 1.15 had it",
    ),
    **{
        (recording, f"slices_without_dense_shape_{value}"): (
            value == "finite",
            "no dense shape is needed to check them",
        )
        for recording in SCALES[:2]
        for value in ("inf", "finite")
    },
}


def slices(values, indices, shape):
    return tf.IndexedSlices(values, tf.constant(indices), None if shape is None else tf.constant(shape))


def structure(spec, make=tf.constant, make_slices=slices):
    """The gradients that a recorded spec describes; `make` makes a tensor of an array and a dtype."""
    if spec is None:
        return None
    if isinstance(spec, list) or "list" in spec:
        return [structure(s, make, make_slices) for s in (spec if isinstance(spec, list) else spec["list"])]
    if "dict" in spec:
        return {key: structure(s, make, make_slices) for key, s in spec["dict"].items()}
    if "slices" in spec:
        parts = spec["slices"]
        values = make(recordings.array(parts["values"]), spec["dtype"])
        return make_slices(values, parts["indices"], parts["dense_shape"])
    if "dense" in spec:
        return make(recordings.array(spec["dense"]), spec["dtype"])
    if "numpy" in spec:
        return recordings.array(spec["numpy"], "float32")
    return spec["python_int"] if "python_int" in spec else [float(v) for v in spec["python"]]


def by_arguments(cases):
    """The names of recorded cases in lists of equal arguments: one object is traced for all sequences of a list."""
    lists = {}
    for name, case in cases.items():
        lists.setdefault(str(case["kwargs"]), []).append(name)
    return [pytest.param(names, id=names[0].split("/")[0]) for names in lists.values()]


class Running(contextlib.AbstractContextManager):
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
            self._initialize = tf.compat.v1.global_variables_initializer()
            self.session.run(self._initialize)
        elif self.scale is not None:
            self._initial = [(variable, variable.numpy()) for variable in self.scale.variables]
        self.updates, self._read = {}, None

    def __exit__(self, *error):
        self.stack.close()

    def start_again(self):
        """Gives the loss scale its initial state; what was traced stays."""
        if self.mode.startswith("graph"):
            self.session.run(self._initialize)
        else:
            for variable, value in self._initial:
                variable.assign(value)

    def update(self, spec):
        """Updates with one event; returns should_apply. Gradients of the same shapes are traced once."""
        if self.mode == "eager":
            return bool(self.scale.update(structure(spec))[1])
        values, dtypes = [], []

        def noted(value, dtype):
            values.append(value)
            dtypes.append(dtype)
            return f"{dtype}{value.shape}"

        def updated(*tensors):
            given = iter(tensors)
            return self.scale.update(structure(spec, lambda *_: next(given)))

        outline = str(structure(spec, noted, lambda *parts: parts))
        if self.mode == "function":
            if outline not in self.updates:
                self.updates[outline] = tf.function(lambda *tensors: updated(*tensors)[1])
            return bool(self.updates[outline](*map(tf.constant, values, dtypes)))
        if outline not in self.updates:
            feeds = [tf.compat.v1.placeholder(dtype, value.shape) for value, dtype in zip(values, dtypes)]
            operation, apply = updated(*feeds)
            self.updates[outline] = [apply, operation], feeds
        fetched, feeds = self.updates[outline]
        return bool(self.session.run(fetched, dict(zip(feeds, values)))[0])

    def state(self):
        """(scale, counter)."""
        if not self.mode.startswith("graph"):
            return float(self.scale()), int(self.scale.good_steps)
        if self._read is None:  # more operations in the graph would have it optimized anew
            self._read = [self.scale(), self.scale.good_steps]
        scale, counter = self.session.run(self._read)
        return float(scale), int(counter)


def trace_of(recording, name, mode):
    """The recorded trace of a case in one of our modes, with the traces it is equal to filled in."""
    traces = recordings.load(recording)["cases"][name]["traces"]
    theirs = {**traces[mode], "mode": mode} if mode in traces else None
    while theirs is not None and "same_trace_as" in theirs:
        theirs = {**traces[theirs["same_trace_as"]], "repr_after": theirs.get("repr_after")}
    return theirs


@pytest.mark.parametrize(
    ("names", "mode"),
    combinations(
        by_arguments(recordings.load(SCALES[0])["cases"]),
        sorted(set(MODES.values())),
        usual=["period_negative-function", "initial_inf-eager", "defaults-graph_v1", "near_max_3e38-graph"],
        others=slow_one_in(6),
    ),
)
def test_dynamic_loss_scale_moves_as_all_versions_recorded(names, mode):
    # The versions were given the same gradients: what we do once is compared with each of them.
    recorded = recordings.load(SCALES[0])
    cases = [recorded["cases"][name] for name in names]
    with Running(mode, lambda: legacy.DynamicLossScale(**numbers(cases[0]["kwargs"]))) as running:
        for name, case in zip(names, cases):
            running.start_again()
            events = recorded["sequences"][case["sequence"]]
            states = [(*running.state(), None)]
            for event in events:
                apply = running.update(recorded["events"][event])
                states.append((*running.state(), apply))
            assert_as_all_versions_recorded(name, mode, events, states, repr(running.scale))


def assert_as_all_versions_recorded(name, mode, events, states, after):
    compared = 0
    for recording in SCALES:
        differs = [step for step, event in enumerate(events) if (recording, event) in DIFFERENCES]
        for theirs in (m for m, ours in MODES.items() if ours == mode):
            trace = trace_of(recording, name, theirs)
            if trace is None:
                continue
            assert states[0][:2] == tuple(float(x) for x in trace["initial"])
            wanted = zip(map(float, trace["scale"]), trace["good_steps"], map(bool, trace["should_apply"]))
            for step, (ours, want) in enumerate(zip(states[1:], wanted)):
                where = f"{recording} {name} {theirs}, step {step}: {events[step]}"
                if step in differs:
                    assert ours[2] == DIFFERENCES[recording, events[step]][0], where
                    break  # from here on the scales differ; the other versions' traces go on
                np.testing.assert_equal(ours, want, err_msg=where)
            else:
                # The text of a float32 is NumPy 2's: that of the latest recording.
                assert recording != SCALES[-1] or after == trace["repr_after"]
            compared += 1
    assert compared == {"graph": 4, "graph_v1": 2}.get(mode, 3)


def numbers(kwargs):
    """Recorded arguments: infinity is a string in JSON."""
    return {key: float(value) if value in ("inf", "-inf", "nan") else value for key, value in kwargs.items()}


@pytest.mark.parametrize("part", ["single_events", "odd_gradients"])
@pytest.mark.parametrize("mode", sorted(set(MODES.values())))
def test_single_updates_are_as_recorded(part, mode):
    with Running(mode, lambda: legacy.DynamicLossScale(64.0, 3, 2.0)) as running:
        for name, case in recordings.load(SCALES[0])[part].items():
            running.start_again()
            try:
                apply = running.update(case["grads"])
            except (TypeError, ValueError, tf.errors.InvalidArgumentError):
                apply = "error"
            ours = (*running.state(), apply)
            for recording in SCALES:
                theirs = recordings.load(recording)[part][name]
                assert theirs["grads"] == case["grads"], "what we do once is compared with each of the versions"
                if (recording, name) in DIFFERENCES:
                    assert apply is DIFFERENCES[recording, name][0], (recording, name)
                    continue
                for result in (result for m, result in theirs["result"].items() if MODES.get(m) == mode):
                    ok = result.get("ok", {"scale": 64.0, "good_steps": 0, "should_apply": "error"})
                    assert ours == (ok["scale"], ok["good_steps"], ok["should_apply"]), (recording, name)


@pytest.mark.parametrize("recording", SCALES)
@pytest.mark.parametrize("context", ["cross-replica", "replica"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_per_replica_gradients_are_all_looked_at(recording, context, compiled):
    strategy = strategies.get("mirrored_2")
    values = {"finite": 1.0, "inf": np.inf, "nan": np.nan}

    def updating(scale):
        def replica(gradients):
            own = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
            return scale.update([own])[1] if context == "replica" else own

        def update(gradients):
            result = strategy.run(replica, args=(gradients,))
            if context == "replica":
                return strategy.experimental_local_results(result)[0]
            with strategy.scope():
                return scale.update([result])[1]

        return tf.function(update) if compiled else update

    for name, case in recordings.load(recording)["distributed_cases"].items():
        with strategy.scope():
            scale = legacy.DynamicLossScale(**case["kwargs"])
        update, trace = updating(scale), case["result"]["ok"]
        for step, events in enumerate(case["sequence"]):
            apply = bool(update(tf.constant([values[event] for event in events])))
            state = (float(scale()), int(scale.good_steps.numpy()), apply)
            assert state == (trace["scale"][step], trace["good_steps"][step], trace["should_apply"][step]), (name, step)


@pytest.mark.parametrize("recording", SCALES)
def test_constructors_configs_and_get_are_as_recorded(recording):
    scope = {"D": legacy.DynamicLossScale, "F": legacy.FixedLossScale, "np": np, "tf": tf, "get": legacy.get}
    scope |= {"inf": float("inf"), "nan": float("nan"), "object": object}
    scope["full"] = {"initial_loss_scale": 4, "increment_period": 3, "multiplier": 3}
    errors = {"OverflowError": OverflowError, "TypeError": TypeError, "ValueError": ValueError}
    probes = 0
    for probe, by_mode in recordings.load(recording)["api_probes"].items():
        recorded = by_mode["eager"]
        expression = probe.removeprefix("construct ")
        if not (probe.startswith(("construct D", "construct F", "get("))) or "np.array" in expression:
            continue
        probes += 1
        if "error" in recorded:
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


@pytest.mark.parametrize(
    ("names", "mode"),
    combinations(
        by_arguments(recordings.load(CONTRIB)["manager_cases"]),
        ["eager", "function", "graph", "graph_v1"],
        usual=11,
        others=pytest.mark.slow,
    ),
)
def test_exponential_managers_move_as_recorded(names, mode):
    recorded = recordings.load(CONTRIB)
    cases = [recorded["manager_cases"][name] for name in names]
    with Running(mode, lambda: legacy.ExponentialUpdateLossScaleManager(**cases[0]["kwargs"])) as running:
        manager = running.scale
        counters = manager._num_good_steps, manager._num_bad_steps
        if mode.startswith("graph"):
            flag = tf.compat.v1.placeholder(tf.bool, [])
            update, scale = manager.update_loss_scale(flag), manager.get_loss_scale()
        elif mode == "function":
            update = tf.function(lambda finite: [manager.update_loss_scale(finite), 0][1])
        else:
            update = manager.update_loss_scale
        for name, case in zip(names, cases):
            running.start_again()
            traces = case["traces"]
            trace = traces["eager" if mode == "eager" and "same_as" not in traces["eager"] else "graph"]["ok"]
            for step, finite in enumerate(recorded["finite_sequences"][case["sequence"]]):
                if mode.startswith("graph"):
                    running.session.run(update, {flag: bool(finite)})
                    state = running.session.run([scale, *counters])
                else:
                    update(tf.constant(bool(finite)))
                    state = [manager.get_loss_scale(), *counters]
                wanted = [trace[column][step] for column in ("loss_scale", "good_steps", "bad_steps")]
                assert [float(x) for x in state] == [float(x) for x in wanted], (name, step)


def optimizer_cases():
    for recording, part in ((CONTRIB, "loss_scale_optimizer_cases"), ("mixed_precision_lso_tf115", "cases")):
        for name in recordings.load(recording)[part]:
            yield pytest.param(recording, part, name, id=f"{recording[:7]}-{name}")


def wrapped(case):
    inner = getattr(tf.compat.v1.train, case["inner"]["cls"])(**case["inner"]["kwargs"])
    if "manager" in case:
        return contrib.LossScaleOptimizer(inner, getattr(legacy, case["manager"])(**case["manager_kwargs"]))
    ((kind, value),) = case["loss_scale"].items()
    scale = legacy.DynamicLossScale(*value) if kind == "dynamic" else value
    return legacy.MixedPrecisionLossScaleOptimizer(inner, scale)


def optimizer_trace(case, mode):
    """The recorded trace of a mode; for a fixed scale the eager one.

    In the original, the graph optimizer multiplied a fixed scale by its reciprocal first: it hid overflows that only
    the scaling causes, and left out its rounding. Here a graph does what eager mode does.
    """
    traces = case["traces"]
    eager = traces["graph" if "same_as" in traces["eager"] else "eager"]["ok"]
    fixed = "fixed" in case.get("loss_scale", {}) or case.get("manager") == "FixedLossScaleManager"
    return eager if mode == "eager" or fixed else traces["graph"]["ok"]


@pytest.mark.parametrize(
    ("mode", "recording", "part", "name"),
    combinations(["eager", "function", "graph", "graph_v1"], optimizer_cases(), usual=11, others=slow_one_in(6)),
)
def test_optimizers_of_tensorflow_1_train_as_recorded(recording, part, name, mode):
    recorded = recordings.load(recording)
    case = recorded[part][name]
    trace = optimizer_trace(case, mode)

    with Running(mode, lambda: None) as running:
        a, b = (tf.Variable(recordings.array(case["initial"][name], "float32"), name=name) for name in "ab")
        optimizer, global_step = wrapped(case), tf.Variable(0, dtype=tf.int64, name="global_step", trainable=False)

        def take(ga, gb):
            def loss():
                return tf.reduce_sum(a * ga) + tf.reduce_sum(b * gb)

            value = loss() if mode.startswith("graph") else loss
            if case["how"] == "minimize":
                return optimizer.minimize(value, global_step=global_step, var_list=[a, b]), []
            pairs = optimizer.compute_gradients(value, [a, b])
            return optimizer.apply_gradients(pairs, global_step=global_step), [g for g, _ in pairs]

        if mode == "function":
            take = tf.function(take)
        state = [a, b, optimizer.loss_scale, global_step]
        if mode.startswith("graph"):
            feeds = [tf.compat.v1.placeholder(tf.float32, v.shape) for v in (a, b)]
            operation, unscaled = take(*feeds)
            state += counters(optimizer)
            running.session.run(tf.compat.v1.global_variables_initializer())
        for step, gradients in enumerate(recorded["gradient_sequences"][case["gradients"]]):
            values = [recordings.array(g, "float32").reshape(v.shape) for g, v in zip(gradients, (a, b))]
            if mode.startswith("graph"):
                gradients = running.session.run([operation, *unscaled], dict(zip(feeds, values)))[1:]
                now = running.session.run(state)
            else:
                gradients = take(*[tf.constant(v) for v in values])[1]
                now = [a.numpy(), b.numpy(), optimizer.loss_scale, global_step, *counters(optimizer)]
            for got, column in zip(now[:2], ("a", "b")):
                wanted = recordings.array(trace[column][step])
                np.testing.assert_allclose(got, wanted, 1e-5, 1e-6, err_msg=f"step {step}: {column}")
            exact = [float(x) for x in now[2:]]
            wanted = [trace["loss_scale"][step], trace["global_step"][step], *trace["counters"][step]]
            assert exact == [float(x) for x in wanted], step
            for got, wanted in zip(gradients, trace["unscaled_grads"][step] if trace["unscaled_grads"] else []):
                np.testing.assert_allclose(got, recordings.array(wanted), 1e-6, err_msg=f"step {step}: gradient")
        for key, wanted in trace["slots_final"].items():
            slot, variable = key.split(":")
            got = optimizer.get_slot({"a": a, "b": b}[variable], slot)
            got = running.session.run(got) if mode.startswith("graph") else got
            np.testing.assert_allclose(got, recordings.array(wanted), 1e-5, 1e-6, err_msg=key)


def counters(optimizer):
    """What the recordings have of a loss scale beside its value."""
    found = [getattr(optimizer._loss_scale, name, None) for name in ("good_steps", "bad_steps")]
    return [counter for counter in found if counter is not None]
