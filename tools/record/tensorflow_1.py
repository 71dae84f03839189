"""Records TensorFlow 1.15's `contrib.mixed_precision` and `MixedPrecisionLossScaleOptimizer`."""

import contextlib

import tensorflow as tf

from .values import array, outcome, plain

tf.compat.v1.enable_eager_execution()

#: In graphs, TensorFlow 1 creates reference variables by default.
MODES = ("graph", "graph_resource", "eager")


@contextlib.contextmanager
def in_mode(mode):
    """Enter a new graph and its session. Yield the session; in eager mode, yield None."""
    if mode == "eager":
        yield None
        return
    (tf.compat.v1.enable_resource_variables if mode == "graph_resource" else tf.compat.v1.disable_resource_variables)()
    try:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            yield session
    finally:
        tf.compat.v1.enable_resource_variables()


def in_all_modes(run):
    """Record `run(mode)` in each mode. A result that equals the result in graph mode is {"same_as": "graph"}."""
    found = {}
    for mode in MODES:
        found[mode] = outcome(run, mode)
        if mode != "graph" and found[mode] == found["graph"]:
            found[mode] = {"same_as": "graph"}
    return found


def counters(scale):
    """Return the counters of a manager or loss scale, which are private attributes."""
    found = [getattr(scale, name, None) for name in ("_num_good_steps", "_num_bad_steps")]
    return [counter for counter in found if counter is not None]


def manager_of(name, kwargs):
    return getattr(tf.contrib.mixed_precision, name)(**kwargs)


def manager(case, cases):
    """Record how a manager's scale changes. In a sequence, 1 is a finite step and 0 is an overflow."""

    def run(mode):
        with in_mode(mode) as session:
            scale = manager_of("ExponentialUpdateLossScaleManager", case["kwargs"])
            if session:
                finite = tf.compat.v1.placeholder(tf.bool, [])
                update = scale.update_loss_scale(finite)
                state = [scale.get_loss_scale()] + counters(scale)
                session.run(tf.compat.v1.global_variables_initializer())

            def now():
                found = session.run(state) if session else [scale.get_loss_scale()] + counters(scale)
                return [plain(each) for each in found]

            columns = {"loss_scale": [], "good_steps": [], "bad_steps": [], "initial": now()}
            for flag in cases["finite_sequences"][case["sequence"]]:
                if session:
                    session.run(update, {finite: bool(flag)})
                else:
                    scale.update_loss_scale(tf.constant(bool(flag)))
                value, good, bad = now()
                columns["loss_scale"].append(value)
                columns["good_steps"].append(good)
                columns["bad_steps"].append(bad)
        return columns

    return dict(case, traces=in_all_modes(run))


def wrapped(case):
    inner = getattr(tf.compat.v1.train, case["inner"]["cls"])(**case["inner"]["kwargs"])
    if "manager" in case:
        scale = manager_of(case["manager"], case["manager_kwargs"])
        return tf.contrib.mixed_precision.LossScaleOptimizer(inner, scale), inner, scale
    ((kind, value),) = case["loss_scale"].items()
    scale = tf.train.experimental.DynamicLossScale(*value) if kind == "dynamic" else value
    optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(inner, scale)
    return optimizer, inner, optimizer._loss_scale


def optimizer(case, cases):
    """Train the variables a and b with recorded gradients."""
    sequence = cases["gradient_sequences"][case["gradients"]]

    def run(mode):
        with in_mode(mode) as session:
            wrapper, inner, scale = wrapped(case)
            variables = [tf.Variable(array(case["initial"][name], "float32"), name=name) for name in "ab"]
            global_step = tf.compat.v1.train.get_or_create_global_step() if session else tf.Variable(0, dtype=tf.int64)
            read_scale = scale.get_loss_scale if "manager" in case else scale

            def step(of_a, of_b):
                def loss():
                    return tf.reduce_sum(variables[0] * of_a) + tf.reduce_sum(variables[1] * of_b)

                value = loss() if session else loss
                if case["how"] == "minimize":
                    return wrapper.minimize(value, global_step=global_step, var_list=variables), []
                pairs = wrapper.compute_gradients(value, variables)
                return wrapper.apply_gradients(pairs, global_step=global_step), [g for g, _ in pairs]

            if session:
                feeds = [tf.compat.v1.placeholder(tf.float32, v.shape) for v in variables]
                operation = step(*feeds)
                state = variables + [read_scale(), global_step] + counters(scale)
                session.run(tf.compat.v1.global_variables_initializer())
            columns = {name: [] for name in ("a", "b", "loss_scale", "counters", "global_step", "unscaled_grads")}
            for gradients in sequence:
                values = [array(g, "float32").reshape(v.shape.as_list()) for g, v in zip(gradients, variables)]
                if session:
                    unscaled = session.run(operation, dict(zip(feeds, values)))[1]
                    now = session.run(state)
                else:
                    unscaled = step(*[tf.constant(value) for value in values])[1]
                    now = [plain(each) for each in variables + [read_scale(), global_step] + counters(scale)]
                for name, value in zip(("a", "b", "loss_scale", "global_step"), now):
                    columns[name].append(plain(value))
                columns["counters"].append([int(value) for value in now[4:]])
                if unscaled:
                    columns["unscaled_grads"].append(plain([plain(g) for g in unscaled]))
            slots = {}
            for slot in inner.get_slot_names():
                for name, variable in zip("ab", variables):
                    value = inner.get_slot(variable, slot)
                    slots[slot + ":" + name] = plain(session.run(value) if session else value)
            return dict(columns, slots_final=slots)

    return dict(case, traces=in_all_modes(run))


def record(name, cases, chosen):
    """Return the recording `name` with the inputs of `cases`; `chosen(part, case)` says which cases are run."""

    def each(part, function):
        return {key: function(case, cases) for key, case in cases[part].items() if chosen(part, key)}

    recorded = {"gradient_sequences": cases["gradient_sequences"]}
    if name == "mixed_precision_lso_tf115":
        return dict(recorded, cases=each("cases", optimizer))
    return dict(
        recorded,
        finite_sequences=cases["finite_sequences"],
        manager_cases=each("manager_cases", manager),
        loss_scale_optimizer_cases=each("loss_scale_optimizer_cases", optimizer),
    )
