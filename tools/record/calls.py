"""Functions that make the recorded calls. Both the recording programs and the tests use them."""

import copy

import numpy as np
import tensorflow as tf


class Bench:
    """An optimizer family, with two variables and a gradient of ones for one call.

    Subclasses set the class attributes.

    Attributes:
        optimizers: the module of the inner optimizers.
        library: the Keras library of these optimizers.
        LossScaleOptimizer: the wrapper's class, of an original or of this package.
        DynamicLossScale: the class of older wrappers' loss scales.
        arguments: the required arguments of the wrapper, except the inner optimizer.
    """

    arguments = ()

    def __init__(self):
        self.u = tf.Variable([1.0, 2.0], name="u")
        self.v = tf.Variable([1.0, 2.0], name="v")
        self.ones = tf.ones([2])

    def wrap(self, name="SGD", kwargs=None, **config):
        """Return a wrapped optimizer, usually SGD(0.1) with an initial scale of 8."""
        inner = getattr(self.optimizers, name)(**({"learning_rate": 0.1} if kwargs is None else kwargs))
        return self.LossScaleOptimizer(inner, **{"initial_scale": 8.0, **config})

    def built_adam(self):
        """Return a wrapped Adam that has taken one step with the gradient [0.5, -0.5]."""
        optimizer = self.wrap("Adam")
        apply(optimizer, [(tf.constant([0.5, -0.5]), self.v)])
        return optimizer


def apply(optimizer, grads_and_vars, **kwargs):
    """Call `get_scaled_loss` and `get_unscaled_gradients` as a training loop does, and apply unscaled gradients."""
    optimizer.get_scaled_loss(tf.constant(0.0))
    optimizer.get_unscaled_gradients([])
    return optimizer.apply_gradients(grads_and_vars, **kwargs)


def values(variable):
    return np.asarray(tf.convert_to_tensor(variable)).tolist()


def inner_of(wrapper):
    return wrapper.inner_optimizer if hasattr(wrapper, "inner_optimizer") else wrapper._optimizer


def scale_of(optimizer):
    """Return the scale as a number. In TensorFlow 2.3 and older, `loss_scale` is a callable object."""
    scale = optimizer.loss_scale
    return float(scale() if callable(scale) else scale)


def counter_of(optimizer):
    """Return the number of finite steps. A `LossScale` stores it in a private attribute."""
    counter = getattr(optimizer, "dynamic_counter", None)
    return float(optimizer.loss_scale._num_good_steps if counter is None else counter)


def after(bench, optimizer, *names):
    """Return the state that is recorded after a call."""
    everything = {
        "u": lambda: values(bench.u),
        "v": lambda: values(bench.v),
        "scale": lambda: scale_of(optimizer),
        "counter": lambda: counter_of(optimizer),
        "iterations": lambda: float(optimizer.iterations),
    }
    return {name: everything[name]() for name in names}


ARGUMENTS = ("dynamic", "initial_scale", "dynamic_growth_steps")
STATE = ("loss_scale", "dynamic_counter")


def described(optimizer):
    """Return the attributes that are recorded of a new wrapper."""
    config = optimizer.get_config()
    return {
        "loss_scale": scale_of(optimizer),
        "config": {key: config[key] for key in ARGUMENTS},
    }


def apply_and_look(bench, grads_and_vars, names):
    optimizer = bench.wrap()
    apply(optimizer, grads_and_vars)
    return after(bench, optimizer, *names)


def slices(rows, indices, shape=(2,)):
    return tf.IndexedSlices(tf.constant(rows), tf.constant(indices), None if shape is None else tf.constant(shape))


def v_after(bench, call):
    call(bench.wrap())
    return values(bench.v)


def applied(bench, grads_and_vars, **kwargs):
    apply(bench.wrap(), grads_and_vars, **kwargs)
    return values(bench.v)


def minimize_tensor(bench, with_tape):
    optimizer = bench.wrap()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bench.v**2)
    optimizer.minimize(loss, [bench.v], **({"tape": tape} if with_tape else {}))
    return after(bench, optimizer, "v", "scale", "iterations")


def twice(bench):
    return tf.reduce_sum(2 * bench.v)


def named_values(variables):
    return [values(v) for v in variables]


def variables_of(optimizer):
    """Return the optimizer's variables. In older optimizers, `variables` is a method."""
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def wrap_again(first, wrap, *args):
    """Wrap the inner optimizer of a wrapper that is still alive."""
    return wrap(inner_of(first), *args)


def set_back(bench):
    optimizer = bench.built_adam()
    optimizer.set_weights([w + 1 for w in optimizer.get_weights()])
    return named_values(optimizer.weights)


def set_learning_rate_to_a_string(bench):
    optimizer = bench.wrap()
    optimizer.learning_rate = "x"


def in_cross_replica_context(bench, call):
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        call(bench.wrap())


# The cases of `errors`, except those whose names are calls to the constructor: such names are evaluated.
ERRORS = {
    "LSO()": lambda b: b.LossScaleOptimizer(),
    "LSO(None)": lambda b: b.LossScaleOptimizer(None),
    "LSO(3)": lambda b: b.LossScaleOptimizer(3),
    "LSO(SGD class)": lambda b: b.LossScaleOptimizer(b.optimizers.SGD),
    'LSO(SGD, dynamic="dynamic" (positional))': lambda b: b.LossScaleOptimizer(b.optimizers.SGD(), "dynamic"),
    "LSO(SGD, dynamic=8.0 (positional))": lambda b: b.LossScaleOptimizer(b.optimizers.SGD(), 8.0),
    "LSO(SGD, positional False, 8.)": lambda b: described(b.LossScaleOptimizer(b.optimizers.SGD(), False, 8.0)),
    "LSO(SGD, too many positional)": lambda b: b.LossScaleOptimizer(b.optimizers.SGD(), True, 8.0, 5, 6, 7),
    "LSO(SGD, inner_optimizer twice)": lambda b: b.LossScaleOptimizer(
        b.optimizers.SGD(), inner_optimizer=b.optimizers.SGD()
    ),
    "nested: LSO(LSO(SGD))": lambda b: b.LossScaleOptimizer(b.wrap()),
    "wrapping the same inner twice": lambda b: wrap_again(b.wrap(), b.LossScaleOptimizer),
    "wrapping the same inner again after the first wrapper is gone": lambda b: (
        type(b.LossScaleOptimizer(inner_of(b.wrap()))).__name__
    ),
    "apply_gradients([])": lambda b: apply(b.wrap(), []),
    "apply_gradients(None)": lambda b: apply(b.wrap(), None),
    "apply_gradients([(None, v)])": lambda b: apply(b.wrap(), [(None, b.v)]),
    "apply_gradients([(None, u), (g, v)])": lambda b: apply_and_look(
        b, [(None, b.u), (b.ones, b.v)], ("u", "v", "scale", "counter", "iterations")
    ),
    "apply_gradients([(None, u), (nan, v)])": lambda b: apply_and_look(
        b, [(None, b.u), (b.ones * float("nan"), b.v)], ("u", "v", "scale", "counter", "iterations")
    ),
    "IndexedSlices, finite values whose duplicate sum overflows": lambda b: apply_and_look(
        b, [(slices([3e38, 3e38], [0, 0]), b.v)], ("v", "scale", "counter")
    ),
    "IndexedSlices without dense_shape": lambda b: apply_and_look(
        b, [(slices([1.0], [0], None), b.v)], ("v", "scale", "counter")
    ),
    "apply_gradients iterator (zip)": lambda b: applied(b, zip([b.ones], [b.v])),
    "apply_gradients int gradient": lambda b: applied(b, [(tf.constant([1, 1]), b.v)]),
    "apply_gradients wrong shape": lambda b: applied(b, [(tf.ones([3]), b.v)]),
    "apply_gradients numpy gradient": lambda b: applied(b, [(np.ones(2, np.float32), b.v)]),
    "apply_gradients return value (eager)": lambda b: apply(b.wrap(), [(b.ones, b.v)]),
    'apply_gradients name="n"': lambda b: apply(b.wrap(), [(b.ones, b.v)], name="n"),
    "apply_gradients experimental_aggregate_gradients=False": lambda b: apply(
        b.wrap(), [(b.ones, b.v)], experimental_aggregate_gradients=False
    ),
    "apply_gradients skip_gradients_aggregation=True": lambda b: apply(
        b.wrap(), [(b.ones, b.v)], skip_gradients_aggregation=True
    ),
    "apply_gradients bogus=1": lambda b: apply(b.wrap(), [(b.ones, b.v)], bogus=1),
    "minimize(tensor, tape=tape)": lambda b: minimize_tensor(b, True),
    "minimize(tensor) without tape": lambda b: minimize_tensor(b, False),
    "minimize(callable, var_list=callable)": lambda b: v_after(
        b, lambda o: o.minimize(lambda: twice(b), lambda: [b.v])
    ),
    "minimize(callable, var_list=variable)": lambda b: v_after(b, lambda o: o.minimize(lambda: twice(b), b.v)),
    "minimize with grad_loss": lambda b: v_after(
        b, lambda o: o.minimize(lambda: twice(b), [b.v], grad_loss=tf.constant(3.0))
    ),
    "minimize no gradient": lambda b: v_after(b, lambda o: o.minimize(lambda: tf.constant(1.0), [b.v])),
    "apply_gradients in cross-replica context (inside strategy.scope())": lambda b: in_cross_replica_context(
        b, lambda o: apply(o, [(b.ones, b.v)])
    ),
    "get_updates exists": lambda b: hasattr(b.wrap(), "get_updates"),
    "variables of a built Adam wrapper": lambda b: named_values(variables_of(b.built_adam())),
    "weights of a built Adam wrapper": lambda b: named_values(b.built_adam().weights),
    "get_weights of a built Adam wrapper": lambda b: named_values(b.built_adam().get_weights()),
    "get_slot_names of a built Adam wrapper": lambda b: b.built_adam().get_slot_names(),
    "set_weights(get_weights()+1)": set_back,
    "set_weights wrong length": lambda b: b.built_adam().set_weights([np.zeros(2)]),
    'get_slot(v, "m")': lambda b: values(b.built_adam().get_slot(b.v, "m")),
    'get_slot(v, "bogus")': lambda b: b.built_adam().get_slot(b.v, "bogus"),
    "add_slot": lambda b: values(b.built_adam().add_slot(b.v, "mine", "ones")),
    'learning_rate = "x"': set_learning_rate_to_a_string,
    "copy.copy(wrapper)": lambda b: type(copy.copy(b.wrap())).__name__,
    "copy.deepcopy(wrapper)": lambda b: type(copy.deepcopy(b.wrap())).__name__,
}


def set_attribute(optimizer, name, value):
    setattr(optimizer, name, value)
    return optimizer


def scheduled(bench):
    schedule = bench.library.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    return bench.wrap(kwargs={"learning_rate": schedule})


def lr_of_a_schedule(bench, name):
    rate = getattr(scheduled(bench), name)
    return type(rate).__name__ if callable(rate) else float(rate)


def before_and_after(bench, optimizer, name, value, *more):
    apply(optimizer, [(tf.constant([0.5, -0.5]), bench.v)])
    result = {"before": values(bench.v)}
    setattr(optimizer, name, value)
    apply(optimizer, [(bench.ones, bench.v)])
    result["after"] = values(bench.v)
    return {**result, **{key: float(read(optimizer)) for key, read in more}}


def momentum_set_late(bench):
    optimizer = set_attribute(bench.wrap(), "momentum", 0.9)
    for _ in range(2):
        apply(optimizer, [(bench.ones, bench.v)])
    inner = inner_of(optimizer)
    return {
        "v_after_2_steps": values(bench.v),
        "inner_momentum": float(inner.momentum),
        "inner__momentum_flag": getattr(inner, "_momentum", None),
    }


def iterations_assigned(optimizer):
    optimizer.iterations.assign(9)
    return [optimizer.iterations.trainable, int(optimizer.iterations)]


def both_iterations(optimizer):
    return {"wrapper": int(optimizer.iterations), "inner": int(inner_of(optimizer).iterations)}


def own_attribute(bench):
    optimizer = set_attribute(bench.wrap(), "my_attr", 3)
    return {"wrapper": optimizer.my_attr, "inner_has": hasattr(inner_of(optimizer), "my_attr")}


def delete_learning_rate(bench):
    optimizer = bench.wrap()
    del optimizer.learning_rate


API = {
    "dir(wrapper) public names": lambda b: [n for n in dir(b.wrap("Adam")) if not n.startswith("_")],
    'getattr(wrapper, "momentum") of Adam': lambda b: b.wrap("Adam").momentum,
    "del wrapper.learning_rate": delete_learning_rate,
    "learning_rate schedule: wrapper.learning_rate": lambda b: lr_of_a_schedule(b, "learning_rate"),
    "learning_rate schedule: wrapper.lr": lambda b: lr_of_a_schedule(b, "lr"),
    "set wrapper.learning_rate = 0.5 over a schedule": lambda b: float(
        set_attribute(scheduled(b), "learning_rate", 0.5).learning_rate
    ),
    "callable learning_rate": lambda b: float(b.wrap(kwargs={"learning_rate": lambda: 0.25}).learning_rate),
    "wrapper.learning_rate = 0.5 after first step": lambda b: before_and_after(
        b,
        b.wrap(),
        "learning_rate",
        0.5,
        ("inner_lr", lambda o: inner_of(o).learning_rate),
    ),
    "wrapper.beta_1 = 0.0 after first step (Adam)": lambda b: before_and_after(
        b,
        b.wrap("Adam", {"learning_rate": 0.01}),
        "beta_1",
        0.0,
        ("inner_beta_1", lambda o: inner_of(o).beta_1),
        ("wrapper_beta_1", lambda o: o.beta_1),
    ),
    "wrapper.momentum = 0.9 on SGD built without momentum": momentum_set_late,
    "wrapper.my_attr = 3": own_attribute,
    "wrapper.iterations = tf.Variable(5)": lambda b: both_iterations(
        set_attribute(b.wrap(), "iterations", tf.Variable(5, dtype=tf.int64))
    ),
    "wrapper.iterations = 5": lambda b: both_iterations(set_attribute(b.wrap(), "iterations", 5)),
    "wrapper.iterations.assign(9)": lambda b: iterations_assigned(b.wrap()),
}


def recorded_gradients(optimizer, gradients):
    return [values(g) for g in optimizer.get_unscaled_gradients(gradients)]


def scaled_later(bench):
    optimizer = bench.wrap(initial_scale=16.0, dynamic_growth_steps=1)
    scaled = optimizer.get_scaled_loss(lambda: tf.constant(1.0))
    before = float(scaled())
    apply(optimizer, [(bench.ones, bench.v)])
    return {"before": before, "after_scale_change": float(scaled()), "scale": scale_of(optimizer)}


# The cases of `scaling`. The scale is always 2.
SCALING = {
    "get_unscaled_gradients([])": lambda b: b.wrap().get_unscaled_gradients([]),
    "get_unscaled_gradients(tuple)": lambda b: type(b.wrap().get_unscaled_gradients((b.ones,))).__name__,
    "get_unscaled_gradients(tensor not list)": lambda b: recorded_gradients(b.wrap(initial_scale=2.0), tf.ones([2])),
    "get_unscaled_gradients([python float])": lambda b: b.wrap().get_unscaled_gradients([1.0]),
    "get_unscaled_gradients([int tensor])": lambda b: b.wrap().get_unscaled_gradients([tf.constant([1])]),
    "get_scaled_loss(numpy)": lambda b: float(b.wrap(initial_scale=2.0).get_scaled_loss(np.float32(1.5))),
    "get_scaled_loss(int tensor)": lambda b: b.wrap(initial_scale=2.0).get_scaled_loss(tf.constant(3)),
    "get_scaled_loss(callable) reads the scale when called?": scaled_later,
}


def steps_without_result(bench):
    steps(bench, 2, "get_scaled_loss", "get_unscaled_gradients")


def steps(bench, count, *called):
    """Take steps after calling only some of the methods that a training loop calls."""
    optimizer = bench.wrap(dynamic_growth_steps=3)
    for name in called:
        getattr(optimizer, name)(tf.constant(0.0) if name == "get_scaled_loss" else [])
    for _ in range(count):
        optimizer.apply_gradients([(bench.ones, bench.v)])
    return [values(bench.v), scale_of(optimizer)]


def minimize_without_result(bench):
    bench.wrap().minimize(lambda: twice(bench), [bench.v])


def step_with_a_missing_gradient(bench):
    apply(bench.wrap(), [(None, bench.u), (bench.ones, bench.v)])


def fit_with_a_step_that_forgets(bench):
    keras = bench.library

    class Forgetful(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    model = Forgetful()
    model.compile(optimizer=bench.wrap())
    model.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), batch_size=2, verbose=0)


WARNINGS = {
    "neither called, 1 step": lambda b: steps(b, 1),
    "neither called, 3 steps": lambda b: steps(b, 3),
    "only get_scaled_loss called, 2 steps": lambda b: steps(b, 2, "get_scaled_loss"),
    "only get_unscaled_gradients called, 2 steps": lambda b: steps(b, 2, "get_unscaled_gradients"),
    "both called before step 1, forgotten for step 2": steps_without_result,
    "minimize": minimize_without_result,
    "one None gradient": step_with_a_missing_gradient,
    "construction": lambda b: type(b.wrap()).__name__,
    "model.fit with a custom train_step that forgets both": fit_with_a_step_that_forgets,
}


def after_the_scale_moved(bench):
    optimizer = bench.wrap(dynamic_growth_steps=1)
    for _ in range(4):
        apply(optimizer, [(bench.ones, bench.v)])
    config = optimizer.get_config()
    return {
        "scale_now": scale_of(optimizer),
        "config": config,
        "scale_of_from_config": scale_of(type(optimizer).from_config(copy.deepcopy(config))),
    }


def serialized(bench):
    return bench.library.optimizers.serialize(
        bench.wrap("Adam", {"learning_rate": 0.01}, initial_scale=256.0, dynamic_growth_steps=7)
    )


def round_trip(bench):
    optimizers, optimizer = bench.library.optimizers, bench.wrap("Adam")
    again = optimizers.deserialize(optimizers.serialize(optimizer))
    return {"type": type(again).__name__, "equal": again.get_config() == optimizer.get_config()}


def itself(bench):
    optimizer = bench.wrap()
    return bench.library.optimizers.get(optimizer) is optimizer


SGD_OF_2_3 = {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 0.25, "momentum": 0.0, "nesterov": False}}


def from_2_3(bench, class_name, **values):
    config = {"optimizer": copy.deepcopy(SGD_OF_2_3), "loss_scale": {"class_name": class_name, "config": values}}
    before = dict(config)
    made = type(bench.wrap()).from_config(config)
    return {"config": made.get_config(), "argument_kept": config == before}


def dynamic_of_2_3(bench, multiplier):
    return from_2_3(bench, "DynamicLossScale", initial_loss_scale=64.0, increment_period=5, multiplier=multiplier)


def from_changed_config(bench, **changes):
    optimizer = bench.wrap()
    return type(optimizer).from_config({**optimizer.get_config(), **changes}).get_config()


def custom_inner(bench, known):
    class MyOpt(bench.optimizers.SGD):
        pass

    config = bench.LossScaleOptimizer(MyOpt(), *bench.arguments).get_config()
    made = type(bench.wrap()).from_config(config, {"MyOpt": MyOpt} if known else None)
    return type(inner_of(made)).__name__


CONFIGS = {
    "get_config after the scale moved": after_the_scale_moved,
    "optimizers.serialize(wrapper)": serialized,
    "serialize/deserialize": round_trip,
    'optimizers.get("LossScaleOptimizer")': lambda b: b.library.optimizers.get("LossScaleOptimizer"),
    "optimizers.get(wrapper) is wrapper": itself,
    "from_config of a TF <= 2.3 config, Dynamic": lambda b: dynamic_of_2_3(b, 2.0),
    "from_config of a TF <= 2.3 config, Dynamic multiplier 3": lambda b: dynamic_of_2_3(b, 3.0),
    "from_config of a TF <= 2.3 config, Fixed": lambda b: from_2_3(b, "FixedLossScale", loss_scale_value=8.0),
    "from_config of a TF <= 2.3 config, unknown class": lambda b: from_2_3(b, "Mine"),
    "from_config({})": lambda b: type(b.wrap()).from_config({}),
    "from_config(None)": lambda b: type(b.wrap()).from_config(None),
    "from_config unknown key": lambda b: from_changed_config(b, bogus=1),
    "from_config inner given as object": lambda b: from_changed_config(b, inner_optimizer=b.optimizers.SGD(0.1)),
    "custom inner class without custom_objects": lambda b: custom_inner(b, False),
    "custom inner class with custom_objects": lambda b: custom_inner(b, True),
}


def with_multiplier_3(bench):
    optimizer = bench.LossScaleOptimizer(bench.optimizers.SGD(0.1), bench.DynamicLossScale(8.0, 2, 3.0))
    states = []
    for factor in (1.0, 1.0, 1.0, np.inf, 1.0):
        apply(optimizer, [(bench.ones * factor, bench.v)])
        counts = scale_of(optimizer), counter_of(optimizer), optimizer.iterations
        states.append([values(bench.v), *map(float, counts)])
    return states


# The recorded calls to TensorFlow 2.3's experimental wrapper.
EXPERIMENTAL = {
    "LSO()": lambda b: b.LossScaleOptimizer(),
    "LSO(None)": lambda b: b.LossScaleOptimizer(None),
    "LSO(3)": lambda b: b.LossScaleOptimizer(3, "dynamic"),
    "LSO(SGD class)": lambda b: b.LossScaleOptimizer(b.optimizers.SGD, 8),
    "LSO(SGD) without loss_scale": lambda b: b.LossScaleOptimizer(b.optimizers.SGD()),
    "LSO(SGD, dynamic=True)": lambda b: b.LossScaleOptimizer(b.optimizers.SGD(), dynamic=True),
    "nested LSO(LSO(SGD, 8), 4)": lambda b: b.LossScaleOptimizer(b.wrap(), 4),
    "wrapping the same inner twice": lambda b: wrap_again(b.wrap(), b.LossScaleOptimizer, 4),
    "set wrapper.loss_scale = DynamicLossScale()": lambda b: set_attribute(
        b.wrap(), "loss_scale", b.DynamicLossScale()
    ),
    "multiplier 3: v, scale, good_steps, iterations per step": with_multiplier_3,
    "get_unscaled_gradients(None)": lambda b: b.wrap().get_unscaled_gradients(None),
    "get_unscaled_gradients([numpy])": lambda b: recorded_gradients(
        b.wrap(initial_scale=2.0), [np.ones(1, np.float32)]
    ),
}

#: The calls in each part of a recording.
TABLES = {"errors": ERRORS, "api_probes": API, "scaling": SCALING, "warnings": WARNINGS, "configs": CONFIGS}

#: The arguments in the cases `get_config, config NAME`, with TensorFlow 2.4's argument names.
EXPERIMENTAL_CONFIGS = {
    "g3": {"initial_scale": 1024.0, "dynamic_growth_steps": 3},
    "nonpow": {"initial_scale": 1000.0, "dynamic_growth_steps": 4},
    "floor": {"initial_scale": 2.0, "dynamic_growth_steps": 5},
    "below1": {"initial_scale": 0.3, "dynamic_growth_steps": 4},
    "half15": {"initial_scale": 8192.0, "dynamic_growth_steps": 4},
    "growth0": {"initial_scale": 16.0, "dynamic_growth_steps": 0},
    "fixed3": {"dynamic": False, "initial_scale": 3.0},
    "h_nonpow": {"initial_scale": 77.7, "dynamic_growth_steps": 2},
    "h_big": {"initial_scale": 1048576.0, "dynamic_growth_steps": 7},
}
