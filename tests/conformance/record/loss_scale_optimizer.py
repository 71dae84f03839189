"""Records `LossScaleOptimizer` of TensorFlow 2.3, 2.4 and 2.8, of tf_keras and of Keras 3."""

import functools
import re

import numpy as np
import tensorflow as tf

from . import training
from .values import array, outcome, plain, type_name, typed


class Original:
    """TensorFlow's `tf.keras.mixed_precision.LossScaleOptimizer`, from 2.4 on."""

    keras3 = False

    def __init__(self):
        self.optimizers = tf.keras.optimizers
        self.wrapper = tf.keras.mixed_precision.LossScaleOptimizer

    def wrap(self, name, kwargs, config):
        """Return a wrapped optimizer.

        Args:
            name: the class of the inner optimizer.
            kwargs: its arguments.
            config: the wrapper's arguments, in the words of TensorFlow 2.4.
        """
        return self.wrapper(getattr(self.optimizers, name)(**kwargs), **numbers(config))

    def scale(self, optimizer):
        """Return the loss scale: a tensor or variable."""
        return optimizer.loss_scale

    def counter(self, optimizer):
        """Return the counter of finite steps, or None if the scale is fixed."""
        return optimizer.dynamic_counter if optimizer.dynamic else None


class Experimental(Original):
    """TensorFlow 2.3's `tf.keras.mixed_precision.experimental.LossScaleOptimizer`."""

    def __init__(self):
        self.optimizers = tf.keras.optimizers
        self.wrapper = tf.keras.mixed_precision.experimental.LossScaleOptimizer

    def wrap(self, name, kwargs, config):
        config, loss_scale = numbers(config), "dynamic"
        if not config.get("dynamic", True):
            loss_scale = config["initial_scale"]
        elif config:
            loss_scale = tf.mixed_precision.experimental.DynamicLossScale(
                config["initial_scale"], config["dynamic_growth_steps"], 2.0
            )
        return self.wrapper(getattr(self.optimizers, name)(**kwargs), loss_scale)

    def scale(self, optimizer):
        return optimizer.loss_scale()

    def counter(self, optimizer):
        return getattr(optimizer.loss_scale, "_num_good_steps", None)


class TfKeras(Original):
    """tf_keras, with its new optimizers or its legacy ones."""

    def __init__(self, legacy):
        import tf_keras

        self.optimizers = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
        self.wrapper = tf_keras.mixed_precision.LossScaleOptimizer


class Keras3(Original):
    """Keras 3's `keras.optimizers.LossScaleOptimizer`: `scale_loss`, and `apply` of scaled gradients."""

    keras3 = True

    def __init__(self):
        import keras

        self.optimizers = keras.optimizers
        self.wrapper = keras.optimizers.LossScaleOptimizer

    def scale(self, optimizer):
        return optimizer.dynamic_scale

    def counter(self, optimizer):
        return optimizer.step_counter


#: Recording -> what makes its original.
ORIGINALS = {
    "lso_experimental_tf23": Experimental,
    "lso_tf24": Original,
    "lso_tf28": Original,
    "lso_tfkeras221_legacy": lambda: TfKeras(legacy=True),
    "lso_tfkeras221_new": lambda: TfKeras(legacy=False),
    "keras3_lso": Keras3,
}


def numbers(config):
    """Return recorded arguments; infinity and NaN are strings in JSON."""
    return {key: float(value) if value in ("inf", "-inf", "nan") else value for key, value in config.items()}


def replay(original, case, initial):
    """Return the run of a training case with an original."""

    class Running(training.GraphReplay if case["how"] == "graph" else training.Replay):
        keras3 = original.keras3

        def wrap(self, case):
            return original.wrap(case["optimizer_class"], case["optimizer_kwargs"], case["config"])

        def scale(self):
            return original.scale(self.optimizer)

        def counter(self):
            return original.counter(self.optimizer)

    return Running(case, initial)


def columns(states):
    """Return {name: its values after each step}."""
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
    found = [tape.gradient(loss, variable)]
    if not original.keras3:
        found = optimizer.get_unscaled_gradients(found)
    optimizer.apply_gradients(zip(found, [variable]))


def extreme(original, case):
    """Record a case at the ends of float32: one variable of 1.0, whose gradients are listed with their run lengths."""

    def run():
        optimizer, variable = original.wrap(*case["optimizer"], case["config"]), tf.Variable(1.0)
        step = lambda gradient: take(original, optimizer, variable, gradient)  # noqa: E731  a new tf.function each
        step = tf.function(step) if case["function"] else step
        states = []
        for gradient, count in case["gradients_run_length"]:
            for _ in range(count):
                step(tf.constant(float(gradient)))
                counter = original.counter(optimizer)
                states.append(
                    {
                        "v": float(variable),
                        "loss_scale": float(original.scale(optimizer)),
                        "counter": None if counter is None else int(counter),
                        "iterations": int(optimizer.iterations),
                    }
                )
        return columns(states)

    return dict(case, result=outcome(run))


def per_replica(strategy, value):
    """Return the values of a variable on all replicas."""
    value = value if isinstance(value, (tf.Variable, tf.Tensor)) else getattr(value, "value", value)
    return plain([float(each) for each in strategy.experimental_local_results(value)])


@functools.lru_cache(maxsize=None)
def mirrored():
    """Return the one MirroredStrategy: in TensorFlow 2.21 the collectives of a second one fail."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def distributed(original, case, compiled):
    """Record a case under MirroredStrategy: `gradients[step][replica]` are unscaled, of one variable of 1.0."""

    def run():
        strategy = mirrored()
        with strategy.scope():
            variable = tf.Variable(1.0)
            optimizer = original.wrap(*case["optimizer"], case["config"])

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


def scaling(original, probe, recorded):
    """Record how a loss and gradients are scaled: `recorded["ok"]["input"]` with the scale and dtype in the name."""
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


def hyperparameters(original, known):
    """Record which attributes of an optimizer are read, set and listed through the wrapper."""
    name, kwargs = known["optimizer"]

    def wrap():
        optimizer = original.wrap(name, kwargs, {})
        return optimizer, optimizer.inner_optimizer if hasattr(optimizer, "inner_optimizer") else optimizer._optimizer

    def both(optimizer, inner, attribute, of_inner="inner"):
        outer = outcome(lambda: typed(getattr(optimizer, attribute)))
        own = outcome(lambda: typed(getattr(inner, attribute)))
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


def record(name, cases, chosen):
    """Return the recording `name` with the inputs of `cases`; `chosen(part, case)` says which cases are run."""
    original = ORIGINALS[name]()

    def each(part, function):
        return {key: function(key, case) for key, case in cases[part].items() if chosen(part, key)}

    np.seterr(all="ignore")
    return {
        "initial_variables": cases["initial_variables"],
        "sequences": cases["sequences"],
        "traces": each("traces", lambda key, case: trace(original, case, cases)),
        "extremes": each("extremes", lambda key, case: extreme(original, case)),
        "scaling": {
            key: scaling(original, key, case)
            for key, case in cases["scaling"].items()
            if key.startswith("scale ") and chosen("scaling", key)
        },
        "distributed": each("distributed", lambda key, case: distributed(original, case, key.endswith("tf.function"))),
        "hyperparameters": each("hyperparameters", lambda key, case: hyperparameters(original, case)),
    }
