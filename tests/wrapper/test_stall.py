"""What happens when every step is skipped."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import MODES, combinations
from tests.families import ALL_FAMILIES
from tf_lossscale import DynamicLossScale, LossScaleOptimizer, SharedLossScale
from tf_lossscale.amp import FixedLossScaleManager


@pytest.fixture
def printed(capfd):
    """What graphs have printed since the last call."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if "steps were all skipped" in line]


def made(family=ALL_FAMILIES[0], compiled=False, **kwargs):
    """An optimizer, and a function that takes a number of steps with a gradient."""
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=4.0, dynamic_growth_steps=1, **kwargs)
    weight = tf.Variable(0.0)

    def step(gradient):
        optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(gradient, weight)])

    function = tf.function(step, jit_compile=compiled == "XLA") if compiled else step

    def take(gradient, times=1):
        for _ in range(times):
            function(tf.constant(gradient))

    return optimizer, take


@pytest.mark.parametrize(
    ("family", "compiled"),
    combinations(
        ALL_FAMILIES,
        MODES,
        usual=["keras3-function", "tf_keras-eager", "tf_keras_legacy-function", "tf1-eager", "sonnet-function"],
    ),
)
def test_the_hundredth_skipped_step_warns_once_a_stall_and_says_what_to_try(family, compiled, warnings, printed):
    _, take = made(family, compiled)
    for _ in range(2):
        take(np.inf, 99)
        assert not warnings + printed()
        take(np.nan, 6)
        (said,) = warnings + printed()
        assert "The last 100 steps were all skipped. The loss scale is 1 now. " in said
        assert "overflow_report()" in said and said.endswith("or lower min_scale.")
        warnings.clear()
        take(1.0)


@pytest.mark.parametrize(("rule", "scale"), [({"min_scale": 2.0**-120}, "e-30"), ({"hysteresis": 1000}, "4")])
def test_a_hundred_skipped_steps_in_a_row_are_a_stall_wherever_the_scale_stands(rule, scale, warnings):
    _, take = made(**rule)
    take(np.inf, 140)
    (said,) = warnings
    assert f"{scale} now. " in said


def test_a_loop_without_an_optimizer_of_ours_is_warned_as_well(warnings):
    scale = DynamicLossScale(4.0)
    for _ in range(150):
        scale.step([np.float32("nan")], lambda gradients: None)
    assert ["The last 100 steps" in said for said in warnings] == [True]


def test_in_a_function_that_xla_compiles_the_count_is_read(printed):
    optimizer, take = made(compiled="XLA")
    take(np.inf, 150)
    assert not printed(), "nothing in the step leaves the device"
    assert int(optimizer.skipped_in_a_row) == 150
    take(1.0)
    assert int(optimizer.skipped_in_a_row) == 0


def test_a_function_that_was_traced_before_xla_compiles_it_as_a_part_of_another():
    optimizer, weight = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5)), tf.Variable(1.0)
    step = tf.function(lambda factor: optimizer.minimize(lambda: weight * factor, [weight]))
    step(tf.constant(1.0))
    tf.function(step, jit_compile=True)(tf.constant(float("nan")))
    assert (float(weight), int(optimizer.skipped_steps)) == (0.5, 1)


@pytest.mark.slow
def test_the_step_of_several_optimizers_that_share_a_scale_warns_once(warnings):
    shared, weight = SharedLossScale(4.0), tf.Variable(0.0)
    optimizers = [LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=shared) for _ in range(2)]
    for _ in range(105):
        shared.apply_gradients([(o, o.compute_gradients(lambda: weight * np.nan, [weight])) for o in optimizers])
    assert [float(optimizer.loss_scale) for optimizer in optimizers] == [1.0, 1.0]
    assert len(warnings) == 1


def test_a_session_is_told_too(printed):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = LossScaleOptimizer(ALL_FAMILIES[3].sgd(), initial_scale=1.0)
        weight = tf.Variable(1.0)
        step = optimizer.minimize(weight * np.nan, var_list=[weight])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(99):
            session.run(step)
        assert not printed()
        for _ in range(5):
            session.run(step)
        assert len(printed()) == 1


@pytest.mark.parametrize("with_the_package", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_exported_step_trains_and_prints_also_in_a_process_without_the_package(with_the_package, tmp_path, printed):
    trained, path = tf.Module(), str(tmp_path)
    trained.weight = tf.Variable(1.0)
    trained.optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=2.0)
    trained.optimizer.build([trained.weight])

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def step(gradient):
        scaled = trained.optimizer.get_scaled_loss(gradient)
        gradients = trained.optimizer.get_unscaled_gradients([scaled])
        trained.optimizer.apply_gradients(zip(gradients, [trained.weight]))
        return trained.weight.read_value()

    trained.step = step
    tf.saved_model.save(trained, path)
    outcomes = [1.0, *[float("nan")] * 105, 0.25]
    if with_the_package:
        loaded = tf.saved_model.load(path)
        weights = [float(loaded.step(tf.constant(value))) for value in outcomes]
        warned = len(printed())
    else:
        code = f"""
import tensorflow as tf
loaded = tf.saved_model.load({path!r})
print(*[loaded.step(tf.constant(float(value))).numpy() for value in {list(map(str, outcomes))}])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        weights = list(map(float, done.stdout.split()))
        warned = done.stderr.count("The last 100 steps were all skipped")
    assert (weights, warned) == ([0.5] * 106 + [0.375], 1)


def texts_in_the_graph(**scale):
    optimizer, weight = LossScaleOptimizer(tf.keras.optimizers.SGD(), **scale), tf.Variable(0.0)
    function = tf.function(lambda: optimizer.minimize(lambda: weight * 1.0, [weight])).get_concrete_function()
    operations = {node.op for graph in function.graph.as_graph_def().library.function for node in graph.node_def}
    return {"PrintV2", "StringFormat"} & operations


def test_a_scale_that_cannot_stall_has_nothing_of_it_in_the_graph():
    assert texts_in_the_graph()
    assert not texts_in_the_graph(dynamic=False, initial_scale=8.0)
    assert texts_in_the_graph(loss_scale=FixedLossScaleManager(8.0, True))
