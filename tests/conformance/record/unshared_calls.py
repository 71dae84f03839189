"""Functions that make the calls that only the recording programs make.

Examples are calls to `compile` and calls under rarely used strategies. The calls that the tests repeat with this
package are in `calls.py`.
"""

import copy
import re

import numpy as np
import tensorflow as tf

from . import calls
from .calls import ARGUMENTS, apply, inner_of, values
from .values import outcome, type_name, typed

# API of the wrappers. ------------------------------------------------------------------------------------------------


def class_name(cls):
    return cls.__name__ if cls.__module__ == "builtins" else "{}.{}".format(cls.__module__, cls.__name__)


def without_address(text):
    """Replace memory addresses in a text, because they differ from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0xADDR", text)


def instance_of(original, bench):
    optimizer = bench.wrap()
    return {
        "keras.optimizers.Optimizer": isinstance(optimizer, original.library.optimizers.Optimizer),
        "LossScaleOptimizer": isinstance(optimizer, original.wrapper),
    }


def subclass_of_loss_scale(original, bench):
    """Train with a user-defined subclass of TensorFlow 2.3's `LossScale`."""

    class Custom(tf.mixed_precision.experimental.LossScale):
        def __call__(self):
            return tf.constant(16.0)

        def update(self, grads):
            return tf.no_op(), True

        def get_config(self):
            return {}

    optimizer = original.wrapper(original.optimizers.SGD(0.1), Custom())
    apply(optimizer, [(bench.ones, bench.v)])
    return {"v": values(bench.v), "scale": float(optimizer.loss_scale()), "get_config": optimizer.get_config()}


API = {
    "mro": lambda original, bench: [class_name(cls) for cls in type(bench.wrap()).__mro__],
    "repr(wrapper)": lambda original, bench: without_address(repr(bench.wrap())),
    "isinstance of the optimizer base": instance_of,
}

# Errors. -------------------------------------------------------------------------------------------------------------


def mixed_precision(library):
    module = library.mixed_precision
    return module.set_global_policy if hasattr(module, "set_global_policy") else module.experimental.set_policy


def compiled(original, optimizer, policy):
    """Pass `optimizer` to `compile` under a policy. Return the class and the arguments of the model's optimizer."""
    keras = original.library
    mixed_precision(keras)(policy)
    try:
        if optimizer == "LSO(SGD)":
            config = {"initial_scale": 64.0, "dynamic_growth_steps": 5}
            optimizer = original.wrap("SGD", {}, config)
        elif optimizer == "SGD()":
            optimizer = original.optimizers.SGD()
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
        model.compile(optimizer, "mse")
        config = None
        if hasattr(model.optimizer, "loss_scale"):
            config = model.optimizer.get_config()
            config = {name: config[name] for name in ARGUMENTS + ("loss_scale",) if name in config}
        return {"type": type_name(model.optimizer), "config": config}
    finally:
        mixed_precision(keras)("float32")


def version_1(loss_scale):
    """Return TensorFlow 2.4's wrapper with the name that it had in TensorFlow 2.3. The argument is an expression."""
    module = tf.mixed_precision.experimental
    config = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 2.0}
    scope = {
        "np": np,
        "DynamicLossScale": module.DynamicLossScale,
        "FixedLossScale": module.FixedLossScale,
        "dict_Dynamic": {"class_name": "DynamicLossScale", "config": config},
    }
    given = eval(loss_scale.replace("dict Dynamic", "dict_Dynamic"), scope)
    return tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), given)


def described_version_1(loss_scale):
    optimizer = version_1(loss_scale)
    return [type_name(optimizer), optimizer.get_config(), float(optimizer.loss_scale)]


def round_trip_of_version_1():
    optimizer = version_1("8")
    return type(optimizer).from_config(optimizer.get_config()).get_config()


def of_the_old_keras(original):
    from tensorflow.python.keras.optimizer_v2 import gradient_descent

    return type_name(original.wrapper(gradient_descent.SGD()))


def of_the_other_family(original):
    legacy = original.library.optimizers.legacy
    other = original.library.optimizers if original.optimizers is legacy else legacy
    return type_name(original.wrapper(other.SGD()))


def of_keras_3(original):
    import keras

    return type_name(original.wrapper(keras.optimizers.SGD()))


def private(name):
    """Return a class of tf_keras's module that has no public name."""
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    return getattr(loss_scale_optimizer, name)


def of_the_experimental_module(original):
    module = getattr(original.optimizers, "experimental", None)
    return "no tf.keras.optimizers.experimental" if module is None else type_name(original.wrapper(module.SGD()))


def wrapped_with_clipnorm(original):
    return type_name(original.wrapper(original.optimizers.SGD(0.1, clipnorm=1.0), 8))


def clipnorm_set_later(original, bench):
    optimizer = bench.wrap()
    optimizer.clipnorm = 1.0
    return {"wrapper": optimizer.clipnorm, "inner": getattr(inner_of(optimizer), "clipnorm", None)}


ERRORS = {
    "LossScaleOptimizerV1 fixed round trip": lambda original, bench: round_trip_of_version_1(),
    "LSO(experimental new optimizer)": lambda original, bench: of_the_experimental_module(original),
    "LSO(tensorflow.python.keras optimizer)": lambda original, bench: of_the_old_keras(original),
    "LSO(keras 3 optimizer)": lambda original, bench: of_keras_3(original),
    "public class with the other family": lambda original, bench: of_the_other_family(original),
    "LossScaleOptimizerV3(legacy)": lambda original, bench: type_name(
        private("LossScaleOptimizerV3")(original.library.optimizers.legacy.SGD())
    ),
    "isinstance(wrapper, LossScaleOptimizerV3)": lambda original, bench: isinstance(
        bench.wrap(), private("LossScaleOptimizerV3")
    ),
    "isinstance(wrapper, BaseLossScaleOptimizer)": lambda original, bench: isinstance(
        bench.wrap(), private("BaseLossScaleOptimizer")
    ),
    "clipnorm inner": lambda original, bench: wrapped_with_clipnorm(original),
    "set wrapper.clipnorm": clipnorm_set_later,
}

SCALING = {
    "get_scaled_loss(python float)": lambda original, bench: bench.wrap().get_scaled_loss(1.0),
    "get_scaled_loss(None)": lambda original, bench: bench.wrap().get_scaled_loss(None),
}

# Configs. ------------------------------------------------------------------------------------------------------------

#: The configs for the cases `state attributes, config NAME` and `get_config, config NAME` of TensorFlow 2.3.
EXPERIMENTAL_CONFIGS = {
    "default": {},
    "g1": {"initial_scale": 128.0, "dynamic_growth_steps": 1},
    "nearmax": {"initial_scale": 2.0**126, "dynamic_growth_steps": 2},
    "fixed1024": {"dynamic": False, "initial_scale": 1024.0},
    "fixed0p7": {"dynamic": False, "initial_scale": 0.7},
    "h_g5": {"initial_scale": 512.0, "dynamic_growth_steps": 5},
    "h_fixed": {"dynamic": False, "initial_scale": 12.5},
    **calls.EXPERIMENTAL_CONFIGS,
}


def round_trip(original, name, kwargs):
    """Record whether `from_config` recreates the optimizer from its config, and whether it changes the config."""
    optimizer = original.wrap(name, kwargs, {"initial_scale": 256.0, "dynamic_growth_steps": 7})
    config = optimizer.get_config()
    before = copy.deepcopy(config)
    again = type(optimizer).from_config(config)
    return {
        "equal_config": again.get_config() == before,
        "from_config_mutated_its_argument": config != before,
        "inner_type": type_name(inner_of(again)),
    }


def state_attributes(optimizer, names):
    """Record the attributes of TensorFlow 2.3's wrapper, and the repr of its loss scale."""
    found = {name: outcome(lambda name: typed(getattr(optimizer, name)), name) for name in names}
    found["loss_scale"]["ok"]["value"]["repr"] = repr(optimizer.loss_scale)
    return found


def call_of(original, probe, recorded, optimizers):
    """Return a function of a bench that makes a recorded call. If no program makes this call, return None.

    Args:
        original: the original, from `loss_scale_optimizer`.
        probe: the name of the call.
        recorded: the recorded case, for its inputs.
        optimizers: {name: (class, arguments)} of the inner optimizers.
    """
    call = {**API, **ERRORS, **SCALING}.get(probe)
    if call is not None:
        return lambda bench: call(original, bench)
    in_compile = re.match(r"compile\((.*)\) under (\w+)$", probe)
    if in_compile:
        return lambda bench: compiled(original, in_compile.group(1).strip('"'), in_compile.group(2))
    of_version_1 = re.match(r"experimental\.LossScaleOptimizer\(SGD, (.*)\) \(LossScaleOptimizerV1\)$", probe)
    if of_version_1:
        return lambda bench: described_version_1(of_version_1.group(1))
    of_optimizer = re.match(r"round trip of (\w+)$", probe)
    if of_optimizer and of_optimizer.group(1) in optimizers:
        return lambda bench: round_trip(original, *optimizers[of_optimizer.group(1)])
    if probe.startswith("get_config, config ") and set(ARGUMENTS) <= set(recorded.get("ok", ())):
        given = {name: recorded["ok"][name] for name in ARGUMENTS}
        return lambda bench: original.wrap("SGD", {"learning_rate": 0.1}, given).get_config()
    return None


# Strategies. ---------------------------------------------------------------------------------------------------------


def in_scope(original, strategy):
    """Create a wrapper in the scope of a strategy, and return the name of its class."""
    with strategy.scope():
        return type_name(original.wrap("SGD", {"learning_rate": 0.1}, {}))


def created_outside(original, strategy):
    """Create an optimizer outside the strategy's scope, take a step under the strategy, and return the variable."""
    optimizer = original.wrap("SGD", {"learning_rate": 0.1}, {"initial_scale": 8.0, "dynamic_growth_steps": 2000})
    with strategy.scope():
        variable = tf.Variable(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))
    return float(variable.numpy())


def central_storage(cpus):
    devices = ["/cpu:{}".format(i) for i in range(cpus)]
    return tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")


def multi_worker():
    found = getattr(tf.distribute, "MultiWorkerMirroredStrategy", None)
    return (found or tf.distribute.experimental.MultiWorkerMirroredStrategy)()


def under_a_tpu_strategy(original):
    """Wrap an optimizer while a patched `get_strategy` returns a TPUStrategy."""
    from tensorflow.python.distribute import distribute_lib

    # TensorFlow 2.13 moved the function `get_strategy`.
    try:
        from tensorflow.python.distribute import distribution_strategy_context as module
    except ImportError:
        module = distribute_lib
    inner, get_strategy = original.optimizers.SGD(0.1), module.get_strategy
    tpu = object.__new__(getattr(tf.distribute, "TPUStrategy", tf.distribute.experimental.TPUStrategy))
    module.get_strategy = lambda: tpu
    try:
        return type_name(original.wrapper(inner, *original.arguments))
    finally:
        module.get_strategy = get_strategy


#: For each case of `strategies`, a function of the original and the MirroredStrategy.
STRATEGIES = {
    "MirroredStrategy(2 cpus) / constructed in scope": in_scope,
    "MirroredStrategy(2 cpus) / constructed outside, applied in strategy.run": created_outside,
    "MirroredStrategy(1 cpu) / constructed outside, applied in strategy.run": lambda original, _: created_outside(
        original, tf.distribute.MirroredStrategy(["/cpu:0"])
    ),
    "OneDeviceStrategy / constructed in scope": lambda original, _: in_scope(
        original, tf.distribute.OneDeviceStrategy("/cpu:0")
    ),
    "CentralStorageStrategy(2 cpus) / constructed in scope": lambda original, _: in_scope(original, central_storage(2)),
    "CentralStorageStrategy(2 cpus) / constructed outside, applied in strategy.run": lambda original, _: (
        created_outside(original, central_storage(2))
    ),
    "CentralStorageStrategy(1 cpu) / constructed outside, applied in strategy.run": lambda original, _: created_outside(
        original, central_storage(1)
    ),
    "MultiWorkerMirroredStrategy / constructed in scope": lambda original, _: in_scope(original, multi_worker()),
    "TPUStrategy (fake instance, patched get_strategy)": lambda original, _: under_a_tpu_strategy(original),
}
