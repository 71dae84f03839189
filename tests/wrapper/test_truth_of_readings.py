"""Readings of the loss scale have the truth value of their number, under every strategy."""

import inspect

import numpy as np
import pytest
import sonnet
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES, all_families
from tf_lossscale import LossScaleOptimizer, SharedLossScale, amp, legacy, optimizers
from tf_lossscale.core import state
from tf_lossscale.legacy import contrib, experimental

KERAS_3, TF_KERAS, LEGACY, *_ = FAMILIES


def training_cell(kind):
    network = amp.WithLossCell(KERAS_3.keras.Sequential([KERAS_3.keras.layers.Dense(1)]), lambda output, label: output)
    return kind(network, KERAS_3.sgd(), 8.0)


# A function for each public class whose objects are read. The rest has no variables.
READ = {
    LossScaleOptimizer: lambda: LossScaleOptimizer(KERAS_3.adam(), hysteresis=2, diagnose=True),
    SharedLossScale: SharedLossScale,
    tf_lossscale.DynamicLossScale: tf_lossscale.DynamicLossScale,
    amp.DynamicLossScaler: lambda: amp.DynamicLossScaler(8, 2, 3),
    amp.DynamicLossScaleUpdateCell: lambda: amp.DynamicLossScaleUpdateCell(8.0, 2, 3),
    amp.Model: lambda: amp.Model(KERAS_3.keras.Sequential([KERAS_3.keras.layers.Dense(1)]), "mse", KERAS_3.sgd()),
    amp.StaticLossScaler: lambda: amp.StaticLossScaler(8),
    amp.TrainOneStepCell: lambda: training_cell(amp.TrainOneStepCell),
    amp.TrainOneStepWithLossScaleCell: lambda: training_cell(amp.TrainOneStepWithLossScaleCell),
    contrib.ExponentialUpdateLossScaleManager: lambda: contrib.ExponentialUpdateLossScaleManager(8, 3),
    contrib.FixedLossScaleManager: lambda: contrib.FixedLossScaleManager(8),
    legacy.DynamicLossScale: legacy.DynamicLossScale,
    legacy.FixedLossScale: lambda: legacy.FixedLossScale(8),
    legacy.MixedPrecisionLossScaleOptimizer: lambda: legacy.MixedPrecisionLossScaleOptimizer(
        tf.compat.v1.train.AdamOptimizer(), 8
    ),
    experimental.LossScaleOptimizer: lambda: experimental.LossScaleOptimizer(LEGACY.adam(), "dynamic"),
    optimizers.Adafactor: lambda: optimizers.Adafactor([tf.Variable([1.0])], lr=1e-3),
}
WITHOUT_VARIABLES = {
    tf_lossscale.Family,
    tf_lossscale.LossScale,  # abstract
    tf_lossscale.LossScaleMonitor,
    tf_lossscale.Rules,
    amp.DynamicLossScaleManager,
    amp.FixedLossScaleManager,
    amp.FixedLossScaleUpdateCell,
    amp.LossMonitor,
    amp.LossScaleManager,
    amp.OverflowMonitor,
    amp.WithLossCell,
    contrib.LossScaleManager,
    experimental.Policy,
    legacy.LossScale,
}

# The same for what has no public class: each family's wrapper, and the loss scale inside of one.
OBJECTS = {
    **{cls.__name__: make for cls, make in READ.items()},
    **{f.name: lambda f=f: LossScaleOptimizer(f.adam(), hysteresis=2, diagnose=True) for f in ALL_FAMILIES},
    "scale": lambda: state.DynamicLossScale(8.0),
}


def test_every_public_class_is_either_read_here_or_has_no_variables():
    modules = (tf_lossscale, amp, legacy, experimental, optimizers)
    classes = {getattr(module, name) for module in modules for name in module.__all__}
    public = {each for each in classes if inspect.isclass(each)}
    assert public == READ.keys() | WITHOUT_VARIABLES
    assert not READ.keys() & WITHOUT_VARIABLES


def readings(thing):
    """(name, scalar variable) of each public attribute of an object."""
    for name in sorted(name for name in dir(thing) if not name.startswith("_")):
        try:
            value = getattr(thing, name)
        except (AttributeError, ValueError):  # which says why there is none
            continue
        if isinstance(value, tf.Variable) and value.shape == ():
            yield name, value


STRATEGIES = ["none", "one_device", "mirrored_1", "mirrored_2", "central_storage", "tpu"]
CASES = [("mirrored_2", kind) for kind in OBJECTS] + [(name, "LossScaleOptimizer") for name in STRATEGIES]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_public_variable_is_true_exactly_if_its_value_is(name, kind):
    strategy = strategies.get(name) or tf.distribute.get_strategy()
    with strategy.scope():
        thing = OBJECTS[kind]()
    for attribute, variable in readings(thing):
        assert getattr(thing, attribute) is variable, f"{attribute} is another object each time"
        for value in (0, 1, 0):
            variable.assign(tf.cast(value, variable.dtype))
            assert bool(variable) == bool(value), attribute
            assert (int(variable), float(variable)) == (value, value), attribute
    names = {attribute for attribute, _ in readings(thing)}
    if isinstance(thing, LossScaleOptimizer) and thing.dynamic:
        assert names >= {"dynamic_counter", "last_step_skipped", "skipped_steps"}


def test_the_variables_of_mirrored_strategy_would_be_true_without_our_help():
    """If this fails, TensorFlow has mended it, and `readable` can go."""
    with strategies.get("mirrored_2").scope():
        assert bool(tf.Variable(False))


def skipping(family):
    """A strategy, and a function that takes a step under it in a way and returns what an `if` says in each place."""
    strategy = strategies.get("mirrored_2")
    if family.name == "sonnet":  # refuses other strategies
        one_device = tf.distribute.ReductionToOneDevice()
        strategy = sonnet.distribute.Replicator(["cpu:0", "cpu:1"], cross_device_ops=one_device)
    with strategy.scope():
        variable = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(family.adam(), initial_scale=8)

    def step(gradient):
        optimizer.apply_gradients([(tf.identity(gradient), variable)])

    def in_replica(gradient):
        step(gradient)
        return "skipped" if optimizer.last_step_skipped else "applied"

    def traced(gradient):
        step(gradient)
        return tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    @tf.function
    def across(gradient):
        strategy.run(step, args=(gradient,))
        return tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    def eager(gradient):
        said = strategy.experimental_local_results(strategy.run(in_replica, args=(gradient,)))
        return {*said, "skipped" if optimizer.last_step_skipped else "applied"}

    compiled = tf.function(lambda gradient: strategy.run(traced, args=(gradient,)))

    def in_replicas(gradient):
        return {each.numpy().decode() for each in strategy.experimental_local_results(compiled(gradient))}

    return optimizer, {"eager": eager, "replica": in_replicas, "across": lambda g: {across(g).numpy().decode()}}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("where", ["eager", "replica", "across"])
@all_families
def test_an_if_on_the_last_step_tells_skipped_from_applied_steps(family, where):
    optimizer, steps = skipping(family)
    said = [steps[where](tf.constant([gradient])) for gradient in (1.0, np.inf, 1.0, np.nan)]
    assert said == [{"applied"}, {"skipped"}, {"applied"}, {"skipped"}]
    assert int(optimizer.skipped_steps) == 2


def test_a_truth_value_that_a_graph_cannot_have_is_an_error():
    with strategies.get("mirrored_2").scope():
        optimizer = LossScaleOptimizer(TF_KERAS.sgd())

    @tf.function(autograph=False)
    def ask():
        return 1 if optimizer.last_step_skipped else 2

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        ask()


@pytest.mark.parametrize("library", ["keras3", "tf_keras"])
def test_the_overflow_monitor_tells_skipped_from_applied_steps_under_a_strategy(library, capsys):
    keras = {"keras3": KERAS_3, "tf_keras": TF_KERAS}[library].keras
    with strategies.get("mirrored_2").scope():
        network = keras.Sequential([keras.layers.Dense(3)])
        manager = amp.DynamicLossScaleManager(64)
        model = amp.Model(network, "mse", keras.optimizers.SGD(0.01), loss_scale_manager=manager)
    x = np.ones((24, 4), "float32")
    x[8:16] = np.inf
    model.train(1, tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(8), callbacks=amp.OverflowMonitor())
    said = [line.partition("loss scale is ")[2] for line in capsys.readouterr().out.splitlines() if "overflow" in line]
    assert said == ["64, overflow: False", "32, overflow: True", "32, overflow: False"]
