"""Records `LossScaleOptimizer` of TensorFlow 2.3, 2.4 and 2.8, of tf_keras and of Keras 3."""

import functools
import logging
import re

import numpy as np
import tensorflow as tf

from . import calls, training
from .values import array, numbers, outcome, plain, type_name, typed


class Original:
    """TensorFlow's `tf.keras.mixed_precision.LossScaleOptimizer`, from 2.4 on."""

    keras3 = False
    #: Required arguments of the wrapper after the inner optimizer.
    arguments = ()

    def __init__(self):
        self.library, self.optimizers = tf.keras, tf.keras.optimizers
        self.wrapper = tf.keras.mixed_precision.LossScaleOptimizer

    def wrap(self, name, kwargs, config):
        """Return a wrapped optimizer.

        Args:
            name: the class of the inner optimizer.
            kwargs: its arguments.
            config: the wrapper's arguments, under their names in TensorFlow 2.4.
        """
        return self.wrapper(getattr(self.optimizers, name)(**kwargs), **numbers(config))

    def variable(self, value, dtype="float32", name=None):
        """Return a variable of the library."""
        return tf.Variable(value, dtype=dtype, name=name)

    def scale(self, optimizer):
        """Return the loss scale: a tensor or variable."""
        return optimizer.loss_scale

    def counter(self, optimizer):
        """Return the counter of finite steps, or None if the scale is fixed."""
        return optimizer.dynamic_counter if optimizer.dynamic else None


# Configs of loss scales, which TensorFlow 2.3's wrapper accepts instead of loss scales.
FIXED_CONFIG = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 4.0}}
DYNAMIC_CONFIG = {
    "class_name": "DynamicLossScale",
    "config": {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 3.0},
}


class Experimental(Original):
    """TensorFlow 2.3's `tf.keras.mixed_precision.experimental.LossScaleOptimizer`."""

    arguments = ("dynamic",)

    def __init__(self):
        self.library, self.optimizers = tf.keras, tf.keras.optimizers
        self.wrapper = tf.keras.mixed_precision.experimental.LossScaleOptimizer
        self.DynamicLossScale = tf.mixed_precision.experimental.DynamicLossScale

    def wrap(self, name, kwargs, config):
        config, loss_scale = numbers(config), "dynamic"
        if not config.get("dynamic", True):
            loss_scale = config["initial_scale"]
        elif config:
            loss_scale = self.DynamicLossScale(config["initial_scale"], config["dynamic_growth_steps"], 2.0)
        return self.wrapper(getattr(self.optimizers, name)(**kwargs), loss_scale)

    def described(self, loss_scale):
        """Evaluate an expression, and describe the loss scale that the wrapper creates from its value."""
        module = tf.mixed_precision.experimental
        scope = {"DynamicLossScale": module.DynamicLossScale, "FixedLossScale": module.FixedLossScale, "np": np}
        scope.update(inf=float("inf"), nan=float("nan"), dict_config=FIXED_CONFIG, dict_config_Dynamic=DYNAMIC_CONFIG)
        expression = loss_scale.replace(" ", "_") if loss_scale.startswith("dict config") else loss_scale
        optimizer = self.wrapper(tf.keras.optimizers.SGD(0.1), eval(expression, scope))
        scale = optimizer.loss_scale
        return {
            "loss_scale": {"type": type_name(scale), "repr": repr(scale)},
            "call": plain(scale()),
            "call_dtype": scale().dtype.name,
            "get_config": optimizer.get_config(),
        }

    def scale(self, optimizer):
        return optimizer.loss_scale()

    def counter(self, optimizer):
        return getattr(optimizer.loss_scale, "_num_good_steps", None)


class TfKeras(Original):
    """tf_keras, with its new optimizers or its legacy ones."""

    def __init__(self, legacy):
        import tf_keras

        self.library = tf_keras
        self.optimizers = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
        self.wrapper = tf_keras.mixed_precision.LossScaleOptimizer


class Keras3(Original):
    """Keras 3's `keras.optimizers.LossScaleOptimizer`: `scale_loss`, and `apply` of scaled gradients."""

    keras3 = True

    def __init__(self):
        import keras

        self.library, self.optimizers = keras, keras.optimizers
        self.wrapper = keras.optimizers.LossScaleOptimizer
        self._variable = keras.Variable

    def variable(self, value, dtype="float32", name=None):
        return self._variable(value, dtype=dtype, name=name)

    def scale(self, optimizer):
        return optimizer.dynamic_scale

    def counter(self, optimizer):
        return optimizer.step_counter


#: For each recording, a function that creates the recorded original.
ORIGINALS = {
    "lso_experimental_tf23": Experimental,
    "lso_tf24": Original,
    "lso_tf28": Original,
    "lso_tfkeras221_legacy": lambda: TfKeras(legacy=True),
    "lso_tfkeras221_new": lambda: TfKeras(legacy=False),
    "keras3_lso": Keras3,
}


def replay(original, case, initial):
    class Running(training.GraphReplay if case["how"] == "graph" else training.Replay):
        keras3 = original.keras3

        def wrap(self, case):
            return original.wrap(case["optimizer_class"], case["optimizer_kwargs"], case["config"])

        def variable(self, value, name):
            return original.variable(value, self.dtype, name)

        def scale(self):
            return original.scale(self.optimizer)

        def counter(self):
            return original.counter(self.optimizer)

    return Running(case, initial)


def columns(states):
    """Convert a list of states to a dictionary with a list of values for each name."""
    states = [plain(state) for state in states]
    return {key: [state[key] for state in states] for key in states[0]}


def trace(original, case, cases):
    """Record a training case: the variables, scale, counter and iterations after each step."""
    events = cases["sequences"][case["sequence"]]
    result = outcome(lambda: columns(training.steps(replay(original, case, cases["initial_variables"]), events)))
    inputs = {key: value for key, value in case.items() if key not in ("trace", "error")}
    return dict(inputs, **({"trace": result["ok"]} if "ok" in result else result))


def take(original, optimizer, variable, gradient):
    """Take one step whose unscaled gradient is `gradient`."""
    with tf.GradientTape() as tape:
        scale = optimizer.scale_loss if original.keras3 else optimizer.get_scaled_loss
        loss = scale(variable * gradient)
    found = [tape.gradient(loss, variable.value if original.keras3 else variable)]
    if not original.keras3:
        found = optimizer.get_unscaled_gradients(found)
    optimizer.apply_gradients(zip(found, [variable]))


def extreme(original, case):
    """Train one variable, whose initial value is 1.0, with gradients near the limits of float32."""

    def run():
        optimizer, variable = original.wrap(*case["optimizer"], case["config"]), original.variable(1.0)
        step = lambda gradient: take(original, optimizer, variable, gradient)  # noqa: E731
        step = tf.function(step) if case["function"] else step
        states = []
        for gradient, count in case["gradients_run_length"]:
            for _ in range(count):
                step(tf.constant(float(gradient)))
                counter = original.counter(optimizer)
                states.append(
                    {
                        "v": plain(variable),
                        "loss_scale": float(original.scale(optimizer)),
                        "counter": None if counter is None else int(counter),
                        "iterations": int(optimizer.iterations),
                    }
                )
        return columns(states)

    return dict(case, result=outcome(run))


def per_replica(strategy, value):
    value = value if isinstance(value, (tf.Variable, tf.Tensor)) else getattr(value, "value", value)
    return plain([float(each) for each in strategy.experimental_local_results(value)])


@functools.lru_cache(maxsize=None)
def mirrored():
    """Return the only MirroredStrategy. In TensorFlow 2.21, the collective operations of a second one fail."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def distributed(original, case, compiled):
    """Train one variable under MirroredStrategy. `gradients[step][replica]` is an unscaled gradient."""

    def run():
        strategy = mirrored()
        with strategy.scope():
            variable = original.variable(1.0)
            optimizer = original.wrap(*case["optimizer"], case["config"])
            if original.keras3:  # a tf.function whose step builds the optimizer fails
                optimizer.build([variable])

        def on_replica(gradients):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            take(original, optimizer, variable, tf.gather(gradients, replica))

        def step(gradients):
            strategy.run(on_replica, args=(gradients,))

        step = tf.function(step) if compiled else step
        states = []
        for gradients in case["gradients"]:
            step(tf.constant(array(gradients), tf.float32))
            counter = original.counter(optimizer)
            states.append(
                {
                    "v": per_replica(strategy, variable),
                    "loss_scale": per_replica(strategy, original.scale(optimizer)),
                    "dynamic_counter": counter if counter is None else per_replica(strategy, counter),
                    "iterations": per_replica(strategy, optimizer.iterations),
                }
            )
        return columns(states)

    return dict(case, result=outcome(run))


def created_outside(original):
    """Create an optimizer outside a strategy's scope, take a step under the strategy, and return the variable."""
    optimizer = original.wrap("SGD", {"learning_rate": 0.1}, {"initial_scale": 8.0, "dynamic_growth_steps": 2000})
    with mirrored().scope():
        variable = tf.Variable(1.0)
    mirrored().run(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))
    return float(variable.numpy())


def cross_replica(original, call):
    with mirrored().scope():
        variable = tf.Variable(1.0)
        optimizer = original.wrap("SGD", {"learning_rate": 0.1}, {})
        call(optimizer, variable)


#: The recorded cases of `strategies`, each a function of the original.
STRATEGIES = {
    "MirroredStrategy(2 cpus) / constructed outside, applied in strategy.run": created_outside,
    "apply_gradients in cross-replica context": lambda original: cross_replica(
        original, lambda optimizer, variable: optimizer.apply_gradients([(tf.constant(1.0), variable)])
    ),
    "minimize in cross-replica context": lambda original: cross_replica(
        original, lambda optimizer, variable: optimizer.minimize(lambda: variable * 2.0, [variable])
    ),
}


def under_strategy(original, probe):
    """Record a step under a strategy, or in its cross-replica context. For other cases, return None."""
    return outcome(STRATEGIES[probe], original) if probe in STRATEGIES and not original.keras3 else None


def scaling(original, probe, recorded):
    """Record how a loss and its gradients are scaled. The name of the case contains the scale and the dtype."""
    found = re.match(r"scale (\S+), dtype (\w+)$", probe)
    scale, dtype = float(found.group(1)), found.group(2)

    def run():
        values = tf.constant(array(recorded["ok"]["input"]), dtype)
        result = {"input": plain(values)}
        if original.keras3:
            optimizer = original.wrap("SGD", {}, {"initial_scale": scale})
            for when in ("unbuilt", "built"):
                scaled = tf.convert_to_tensor(optimizer.scale_loss(values))
                result["scale_loss_" + when] = {"value": plain(scaled), "dtype": scaled.dtype.name}
                optimizer.build([tf.Variable(1.0)])
            return result
        optimizer = original.wrap("SGD", {}, {"initial_scale": scale, "dynamic_growth_steps": 2000})
        for name, scaled in (
            ("get_scaled_loss", optimizer.get_scaled_loss(values)),
            ("get_scaled_loss(callable)()", optimizer.get_scaled_loss(lambda: values)()),
        ):
            result[name] = {"value": plain(scaled), "dtype": scaled.dtype.name}
        count = int(tf.size(values))
        slices = tf.IndexedSlices(values, tf.range(count), tf.constant([count]))
        dense, none, sparse = optimizer.get_unscaled_gradients([values, None, slices])
        result["get_unscaled_gradients"] = {
            "dense": plain(dense),
            "dtype": dense.dtype.name,
            "none": none is None,
            "slices_type": type_name(sparse),
            "slices_values": plain(sparse.values),
            "dense_shape": plain(sparse.dense_shape),
        }
        return result

    return outcome(run)


def without_number(described):
    """Replace the number at the end of a name such as `sgd_12` with N."""
    if described["type"] == "str":
        described["value"] = re.sub(r"_\d+$", "_N", described["value"])
    return described


def hyperparameters(original, known):
    """Record which attributes of the inner optimizer the wrapper can read, set and list."""
    name, kwargs = known["optimizer"]

    def wrap():
        optimizer = original.wrap(name, kwargs, {})
        return optimizer, optimizer.inner_optimizer if hasattr(optimizer, "inner_optimizer") else optimizer._optimizer

    def both(optimizer, inner, attribute, of_inner="inner"):
        outer = outcome(lambda: without_number(typed(getattr(optimizer, attribute))))
        own = outcome(lambda: without_number(typed(getattr(inner, attribute))))
        return outer, "same" if own == outer else {"error": {"type": own["error"]["type"]}} if "error" in own else own

    def set_to(attribute, value):
        def run():
            optimizer, inner = wrap()
            setattr(optimizer, attribute, value)
            outer, own = both(optimizer, inner, attribute)
            return {
                "wrapper_after": outer,
                "inner_after": own,
                "stored_in_wrapper___dict__": attribute in vars(optimizer),
            }

        return {"value": value, "result": outcome(run)}

    optimizer, inner = wrap()
    hypers = getattr(inner, "_hyper", None)
    read = {}
    for attribute in known["read"]:
        outer, own = both(optimizer, inner, attribute)
        read[attribute] = {"wrapper": outer, "inner": own}
    beyond = set(dir(optimizer)) - set(dir(type(optimizer))) - set(vars(optimizer))
    return {
        "optimizer": known["optimizer"],
        "inner_hyper_names": None if hypers is None else sorted(hypers),
        "read": read,
        "dir_beyond_class_and_instance": sorted(each for each in beyond if not each.startswith("__")),
        "set": {attribute: set_to(attribute, case["value"]) for attribute, case in known["set"].items()},
    }


#: Calls to Keras 3's `scale_loss` before the optimizer is built.
SCALE_LOSS = {
    "scale_loss(python float) unbuilt": lambda optimizer: optimizer.scale_loss(1.5),
    "scale_loss(numpy) unbuilt": lambda optimizer: optimizer.scale_loss(np.float32(1.5)),
    "scale_loss(int tensor) unbuilt": lambda optimizer: optimizer.scale_loss(tf.constant(3)),
    "scale_loss(list) unbuilt": lambda optimizer: optimizer.scale_loss([1.0, 2.0]),
}


class Messages(logging.Handler):
    """Collects the warnings that TensorFlow and Keras log."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.found = []

    def emit(self, record):
        entry = {"level": record.levelname, "message": record.getMessage()}
        if entry not in self.found[-1:]:
            self.found.append(entry)

    def __enter__(self):
        for name in ("tensorflow", "absl"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *error):
        for name in ("tensorflow", "absl"):
            logging.getLogger(name).removeHandler(self)


def bench(original):
    class Bench(calls.Bench):
        optimizers, library, LossScaleOptimizer = original.optimizers, original.library, original.wrapper
        DynamicLossScale = getattr(original, "DynamicLossScale", None)
        arguments = original.arguments

        def wrap(self, name="SGD", kwargs=None, initial_scale=8.0, **config):
            config = dict({"dynamic_growth_steps": 2000}, initial_scale=initial_scale, **config)
            return original.wrap(name, {"learning_rate": 0.1} if kwargs is None else kwargs, config)

    return Bench()


def called(original, section, probe, recorded, cases):
    """Record the call with this name. If no test reads the result of this call, return None."""
    if original.keras3:
        call = SCALE_LOSS.get(probe)
        return call and outcome(lambda: typed(call(original.wrap("SGD", {}, {"initial_scale": 2.5}))))
    call = calls.TABLES[section].get(probe)
    if isinstance(original, Experimental):
        call = calls.EXPERIMENTAL.get(probe, call)
    of_sgd = re.match(r"LSO\(SGD, (\w+=[^)]*(\(.*\))?[^)]*)\)$", probe)
    state = re.match(r"state attributes, config (\w+)$", probe)
    config = re.match(r"get_config of (\w+)$", probe)
    if isinstance(original, Experimental):
        of_scale = re.match(r"LSO\(SGD, loss_scale=(.*)\)$", probe)
        in_config = re.match(r"get_config, config (\w+)$", probe)
        if of_scale:
            call = lambda b: original.described(of_scale.group(1))  # noqa: E731
        elif in_config and in_config.group(1) in calls.EXPERIMENTAL_CONFIGS:
            given = calls.EXPERIMENTAL_CONFIGS[in_config.group(1)]
            call = lambda b: original.wrap("SGD", {"learning_rate": 0.1}, given).get_config()  # noqa: E731
        elif call is None and (of_sgd or state):
            return None
    if call is None and of_sgd:
        scope = {"tf": tf, "np": np, "nan": float("nan"), "inf": float("inf")}
        call = lambda b: calls.described(  # noqa: E731
            original.wrapper(original.optimizers.SGD(), **eval("dict({})".format(of_sgd.group(1)), scope))
        )
    elif call is None and state:
        given = {name: recorded["ok"][name]["ok"]["value"] for name in calls.ARGUMENTS}
        call = lambda b: attributes(original.wrap("SGD", {"learning_rate": 0.1}, given))  # noqa: E731
    elif call is None and config and config.group(1) in optimizers_of(cases):
        name, kwargs = optimizers_of(cases)[config.group(1)]
        given = {"initial_scale": 256.0, "dynamic_growth_steps": 7}
        call = lambda b: original.wrap(name, kwargs, given).get_config()  # noqa: E731
    if call is None:
        return None
    with Messages() as messages:
        result = outcome(lambda: plain(call(bench(original))))
    return dict(result, logs=messages.found) if messages.found or section == "warnings" else result


def attributes(optimizer):
    """Return the documented attributes of a wrapper."""
    return {name: outcome(lambda name: typed(getattr(optimizer, name)), name) for name in calls.ARGUMENTS + calls.STATE}


def optimizers_of(cases):
    """Return the class and the arguments of each inner optimizer in `traces`, by name."""
    return {case["optimizer"]: (case["optimizer_class"], case["optimizer_kwargs"]) for case in cases["traces"].values()}


def record(name, cases, chosen):
    """Return the recording `name` with the inputs of `cases`; `chosen(part, case)` says which cases are run."""
    original = ORIGINALS[name]()
    np.seterr(all="ignore")

    def each(part, function):
        found = {key: function(key, case) for key, case in cases.get(part, {}).items() if chosen(part, key)}
        return {key: result for key, result in found.items() if result is not None}

    def one_call(part):
        return each(part, lambda key, case: called(original, part, key, case, cases))

    return {
        "initial_variables": cases["initial_variables"],
        "sequences": cases["sequences"],
        "traces": each("traces", lambda key, case: trace(original, case, cases)),
        "extremes": each("extremes", lambda key, case: extreme(original, case)),
        "scaling": dict(
            one_call("scaling"),
            **each("scaling", lambda key, case: scaling(original, key, case) if key.startswith("scale ") else None),
        ),
        "distributed": each("distributed", lambda key, case: distributed(original, case, key.endswith("tf.function"))),
        "hyperparameters": each("hyperparameters", lambda key, case: hyperparameters(original, case)),
        "configs": one_call("configs"),  # before the errors, which log warnings that TensorFlow logs once in a process
        "errors": one_call("errors"),
        "api_probes": one_call("api_probes"),
        "warnings": one_call("warnings"),
        "strategies": each("strategies", lambda key, case: under_strategy(original, key)),
    }
