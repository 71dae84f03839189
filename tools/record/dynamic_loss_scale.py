"""Records the loss scales of TensorFlow 1.15, of 2.3, and of compat.v1 in 2.21, such as `DynamicLossScale`."""

import contextlib

import numpy as np
import tensorflow as tf

from .values import array, numbers, outcome, plain, typed

V1 = tf.__version__.startswith("1.")
if V1:
    # `enable_eager_execution` affects the whole process and cannot be undone, so graphs are built while it is enabled.
    tf.compat.v1.enable_eager_execution()
    MODULE = tf.train.experimental
elif hasattr(tf, "mixed_precision"):
    MODULE = tf.mixed_precision.experimental
else:
    MODULE = tf.compat.v1.mixed_precision
#: The recorded modes. `_cfv2` is a graph with TensorFlow 2's control flow, `_v1cond` a graph with TensorFlow 1's.
MODES = ("graph", "graph_cfv2", "eager", "function") if V1 else ("eager", "function", "graph", "graph_v1cond")


def gradients(spec):
    """Return the gradients that a recorded spec describes: tensors, IndexedSlices, None, nested as in the spec."""
    if spec is None:
        return None
    if isinstance(spec, list):
        return [gradients(each) for each in spec]
    if "list" in spec:
        return gradients(spec["list"])
    if "dict" in spec:
        return {key: gradients(each) for key, each in spec["dict"].items()}
    if "slices" in spec:
        parts = spec["slices"]
        shape = None if parts["dense_shape"] is None else tf.constant(parts["dense_shape"], tf.int64)
        values = constant(parts["values"], spec["dtype"])
        return tf.IndexedSlices(values, tf.constant(parts["indices"], tf.int64), shape)
    if "dense" in spec:
        return constant(spec["dense"], spec["dtype"])
    if "numpy" in spec:
        return array(spec["numpy"], "float32")
    return spec["python_int"] if "python_int" in spec else [float(value) for value in spec["python"]]


def constant(value, dtype):
    if dtype in ("int32", "bool"):
        return tf.constant(value, dtype)
    return tf.cast(tf.constant(array(value)), dtype)


@contextlib.contextmanager
def control_flow(v2):
    """Temporarily use the control flow of TensorFlow 2, or of TensorFlow 1."""
    enable, disable = tf.compat.v1.enable_control_flow_v2, tf.compat.v1.disable_control_flow_v2
    (enable if v2 else disable)()
    try:
        yield
    finally:
        (disable if V1 else enable)()


class Eager:
    """A DynamicLossScale in eager mode, with the arguments `kwargs`."""

    def __init__(self, kwargs):
        self.scale = MODULE.DynamicLossScale(**numbers(kwargs))

    def update(self, spec):
        """Update the scale with the gradients of a spec. Return `should_apply`."""
        return bool(self.scale.update(gradients(spec))[1])

    def state(self):
        return float(self.scale()), int(self.scale._num_good_steps)

    def close(self):
        """Leave the graph, if there is one."""


class Function(Eager):
    """A loss scale in a `tf.function`."""

    def __init__(self, kwargs):
        super().__init__(kwargs)
        self._functions = {}

    def update(self, spec):
        if str(spec) not in self._functions:
            self._functions[str(spec)] = tf.function(lambda: self.scale.update(gradients(spec))[1])
        return bool(self._functions[str(spec)]())


class Graph(Eager):
    """A loss scale in a TF1 graph with a Session."""

    def __init__(self, kwargs, v2):
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(control_flow(v2))
        self._stack.enter_context(tf.Graph().as_default())
        super().__init__(kwargs)
        self._updates = {}
        self._state = self.scale(), self.scale._num_good_steps
        self._session = self._stack.enter_context(tf.compat.v1.Session())
        self._session.run(tf.compat.v1.global_variables_initializer())

    def update(self, spec):
        if str(spec) not in self._updates:
            operation, apply = self.scale.update(gradients(spec))
            self._updates[str(spec)] = operation, tf.convert_to_tensor(apply)
        return bool(self._session.run(self._updates[str(spec)])[1])

    def state(self):
        scale, good = self._session.run(self._state)
        return float(scale), int(good)

    def close(self):
        self._stack.close()


def running(mode, kwargs):
    if mode.startswith("graph"):
        return Graph(kwargs, v2=mode == "graph_cfv2" if V1 else mode == "graph")
    return {"eager": Eager, "function": Function}[mode](kwargs)


def traces(case, cases):
    """Record a case in every mode. If a mode's results equal those of the first mode, store the first mode's name."""
    found = {}
    for mode in MODES:
        scale = running(mode, case["kwargs"])
        columns = {"initial": plain(scale.state()), "scale": [], "good_steps": [], "should_apply": []}
        for event in cases["sequences"][case["sequence"]]:
            apply = scale.update(cases["events"][event])
            value, good = scale.state()
            for name, entry in (("scale", value), ("good_steps", good), ("should_apply", int(apply))):
                columns[name].append(plain(entry))
        first = found.get(MODES[0])
        same = first is not None and {key: first[key] for key in columns} == columns
        found[mode] = {"same_trace_as": MODES[0]} if same else columns
        found[mode]["repr_after"] = repr(scale.scale)
        scale.close()
    return dict(case, traces=found)


def single(case):
    """Record one update of DynamicLossScale(64.0, 3, 2.0) in every mode."""

    def run(mode):
        scale = running(mode, {"initial_loss_scale": 64.0, "increment_period": 3, "multiplier": 2.0})
        try:
            apply = scale.update(case["grads"])
            value, good = scale.state()
            return {"scale": value, "good_steps": good, "should_apply": apply}
        finally:
            scale.close()

    return dict(case, result={mode: outcome(run, mode) for mode in MODES})


def distributed(case):
    """Record updates in the cross-replica context of a MirroredStrategy. Each step lists one event per replica."""
    values = {"finite": 1.0, "inf": np.inf, "nan": np.nan}

    def run():
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        columns = {"scale": [], "good_steps": [], "should_apply": []}
        with strategy.scope():
            scale = MODULE.DynamicLossScale(**case["kwargs"])
            for events in case["sequence"]:
                of_replicas = tf.constant([values[event] for event in events])
                replica = lambda each: tf.gather(each, tf.distribute.get_replica_context().replica_id_in_sync_group)  # noqa: E731
                run_on = strategy.experimental_run_v2 if V1 else strategy.run
                apply = scale.update([run_on(replica, args=(of_replicas,))])[1]
                columns["scale"].append(float(scale()))
                columns["good_steps"].append(int(scale._num_good_steps.numpy()))
                columns["should_apply"].append(int(bool(apply)))
        return columns

    return dict(case, result=outcome(run))


def constructed(probe):
    """Record the result of an expression such as `D(8)` or `get(None)`, in eager mode."""
    scope = {
        "D": MODULE.DynamicLossScale,
        "F": MODULE.FixedLossScale,
        "get": getattr(MODULE, "get_loss_scale", None) or _get,
        "np": np,
        "tf": tf,
        "inf": float("inf"),
        "nan": float("nan"),
        "full": {"initial_loss_scale": 4, "increment_period": 3, "multiplier": 3},
    }

    def run():
        made = eval(probe[len("construct ") :] if probe.startswith("construct ") else probe, scope)
        if probe.startswith("get("):
            return repr(made)
        return {
            "repr": repr(made),
            "config": {key: typed(value) for key, value in made.get_config().items()},
        }

    return {"eager": outcome(run)}


def _get(value):
    """Call TensorFlow's private function that converts an argument `loss_scale` to a LossScale."""
    from tensorflow.python.training.experimental import loss_scale

    return loss_scale.get(value)


def is_expression(probe):
    """Return whether a probe is an expression that creates a loss scale."""
    return probe.startswith(("construct D", "construct F", "get("))


def record(name, cases, chosen):
    """Return the recording with the inputs of `cases`; `chosen(part, case)` says which cases are run."""
    del name

    def each(part, function):
        return {key: function(case) for key, case in cases[part].items() if chosen(part, key)}

    return {
        "events": cases["events"],
        "sequences": cases["sequences"],
        "cases": each("cases", lambda case: traces(case, cases)),
        "single_events": each("single_events", single),
        "odd_gradients": each("odd_gradients", single),
        "distributed_cases": each("distributed_cases", distributed),
        "api_probes": {
            probe: constructed(probe)
            for probe in cases["api_probes"]
            if is_expression(probe) and chosen("api_probes", probe)
        },
    }
