"""What happens when every step is skipped."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.families import ALL_FAMILIES, FAMILIES, IDS, all_families
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.amp import FixedLossScaleManager


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    return said


@pytest.fixture
def printed(capfd):
    """What graphs have printed since the last call."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if "steps were all skipped" in line]


def made(family=ALL_FAMILIES[0], compiled=False, **kwargs):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=4.0, dynamic_growth_steps=1, **kwargs)
    weight = tf.Variable(0.0)

    def step(gradient):
        optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(gradient, weight)])

    function = tf.function(step, jit_compile=compiled == "XLA") if compiled else step
    return optimizer, lambda gradient: function(tf.constant(gradient))


@all_families
def test_in_eager_mode_the_hundredth_skipped_step_warns_once_and_says_what_to_try(family, warnings):
    _, step = made(family)
    for _ in range(99):
        step(np.inf)
    assert not warnings
    step(np.nan)
    assert len(warnings) == 1
    assert "The last 100 steps were all skipped. The loss scale is 1 now. " in warnings[0]
    assert "overflow_report()" in warnings[0]
    assert "min_scale" in warnings[0]
    for _ in range(5):
        step(np.inf)
    assert len(warnings) == 1


def test_a_step_that_succeeds_ends_the_stall_and_the_next_one_is_said_again(warnings):
    _, step = made()
    for _ in range(100):
        step(np.inf)
    step(1.0)
    for _ in range(100):
        step(np.inf)
    assert len(warnings) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_hundred_skipped_steps_in_a_row_are_a_stall_wherever_the_scale_stands(compiled, warnings, printed):
    _, step = made(compiled=compiled, min_scale=2.0**-120)
    for skipped in range(140):
        assert not (skipped < 100 and (warnings or printed())), skipped
        step(np.inf)
    (said,) = warnings + printed()
    assert "The last 100 steps were all skipped. The loss scale is " in said
    assert "e-30 now. " in said


def test_a_hysteresis_that_keeps_the_scale_up_delays_no_stall(warnings):
    _, step = made(hysteresis=1000)
    for _ in range(100):
        step(np.inf)
    assert "The loss scale is 4 now" in warnings[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_raise_raises_with_the_state_complete(compiled):
    optimizer, step = made(compiled=compiled, on_stall="raise")
    for _ in range(99):
        step(np.inf)
    errors = (FloatingPointError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors[compiled], match=r"The last 100 steps.* The loss scale is 1 now"):
        step(np.inf)
    assert optimizer.state()["skipped_in_a_row"] == 100, "raised once: what happened can be looked at"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_function_is_called_with_the_optimizer_and_may_help(compiled):
    helped = []

    def help_it(optimizer):
        helped.append(optimizer)
        optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0})

    optimizer, step = made(compiled=compiled, on_stall=help_it)
    for _ in range(100):
        step(np.inf)
    assert float(optimizer.loss_scale) == (32.0 if compiled else 64.0), "a graph lowers the new scale after that"
    assert helped == [optimizer]


@all_families
def test_a_tf_function_prints_it_once_a_stall_and_python_does_not_say_it_again(family, warnings, printed):
    optimizer, step = made(family, compiled=True)
    for _ in range(2):
        for _ in range(99):
            step(np.inf)
        assert not printed()
        for _ in range(5):
            step(np.nan)
            float(optimizer.loss_scale)
        (line,) = printed()
        assert line.startswith("WARNING: The last 100 steps were all skipped")
        assert "The loss scale is 1 now. " in line
        assert line.endswith("or lower min_scale.")
        step(1.0)
    assert not warnings


@pytest.mark.table("function", every=1)
@pytest.mark.parametrize("first", ["eager", "function"])
def test_a_stall_is_said_once_though_eager_steps_and_a_tf_function_take_turns(first, warnings, printed):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=1.0)
    weight = tf.Variable(0.0)
    steps = {"eager": lambda: optimizer.minimize(lambda: weight * np.nan, [weight])}
    steps["function"] = tf.function(steps["eager"])
    for step in (steps[first], *steps.values(), *steps.values()):
        for _ in range(100):
            step()
        float(optimizer.loss_scale)
    assert (len(warnings), len(printed())) == {"eager": (1, 0), "function": (0, 1)}[first]


def test_raise_in_a_tf_function_fails_the_hundredth_step_once_and_counts_it():
    optimizer, step = made(compiled=True, on_stall="raise")
    for _ in range(99):
        step(np.inf)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"The last 100 steps.* is 1 now\. "):
        step(np.inf)
    assert int(optimizer.iterations) == 100
    state = optimizer.state()
    assert (state["total_steps"], state["skipped_steps"], state["skipped_in_a_row"]) == (100, 100, 100)
    step(np.inf)
    assert optimizer.state()["total_steps"] == 101


def test_a_function_is_called_from_a_tf_function_and_sees_the_step_counted():
    seen = []

    def help_it(optimizer):
        seen.append(optimizer.state()["total_steps"])
        optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0})
        return optimizer  # The wrapper ignores the value.

    optimizer, step = made(compiled=True, on_stall=help_it)
    for _ in range(100):
        step(np.inf)
    assert seen == [100]
    assert float(optimizer.loss_scale) == 32.0, "the step that was skipped then lowers the new scale"
    for _ in range(100):
        step(np.inf)
    assert seen == [100, 100], "another stall"


def test_a_function_that_raises_fails_the_step():
    def stop(optimizer):
        raise KeyError("stop here")

    _, step = made(compiled=True, on_stall=stop)
    for _ in range(99):
        step(np.inf)
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'stop here'"):
        step(np.inf)


@pytest.mark.parametrize("look", [lambda o: o.loss_scale, lambda o: o.state()], ids=["loss_scale", "state"])
def test_a_loop_that_xla_compiles_is_noticed_when_the_scale_is_read(look, warnings, printed):
    optimizer, step = made(compiled="XLA")
    for _ in range(2):
        warnings.clear()
        for _ in range(300):
            step(np.inf)
        assert not warnings, "nothing in the step leaves the device"
        repr(optimizer)
        assert not warnings
        look(optimizer)
        look(optimizer)
        assert len(warnings) == 1
        assert "The last 300 steps" in warnings[0]
        step(1.0)
    assert not printed()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_each_optimizer_that_shares_a_scale_reports_once(compiled, warnings, printed):
    shared = SharedLossScale(4.0)
    optimizers = [LossScaleOptimizer(f.sgd(), loss_scale=shared) for f in FAMILIES[:2]]
    weight = tf.Variable(0.0)

    def step():
        with shared.together():
            for optimizer in optimizers:
                optimizer.minimize(lambda: weight * np.nan, [weight])

    function = tf.function(step) if compiled else step
    for _ in range(105):
        function()
    assert [float(optimizer.loss_scale) for optimizer in optimizers] == [1.0, 1.0]
    assert (len(warnings), len(printed())) == ((0, 2) if compiled else (2, 0))


@pytest.mark.parametrize("on_stall", ["warn", "raise"])
def test_a_session_is_told_too(on_stall, printed):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = LossScaleOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.5), initial_scale=1.0, on_stall=on_stall
        )
        weight = tf.Variable(1.0)
        step = optimizer.minimize(weight * np.nan, var_list=[weight])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(99):
            session.run(step)
        assert not printed()
        if on_stall == "raise":
            with pytest.raises(tf.errors.InvalidArgumentError, match="The last 100 steps"):
                session.run(step)
        for _ in range(5):
            session.run(step)
        assert len(printed()) == (on_stall == "warn")


OUTCOMES = [1.0, *[float("nan")] * 105, 0.25]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The path of a model with a step, saved."""

    class Trained(tf.Module):
        def __init__(self):
            self.weight = tf.Variable(1.0)
            self.optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=2.0)
            self.optimizer.build([self.weight])

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def step(self, gradient):
            scaled = self.optimizer.get_scaled_loss(gradient)
            self.optimizer.apply_gradients(zip(self.optimizer.get_unscaled_gradients([scaled]), [self.weight]))
            return self.weight.read_value()

    path = str(tmp_path_factory.mktemp("exported"))
    tf.saved_model.save(Trained(), path)
    return path


def test_an_exported_step_trains_and_prints(exported, printed):
    loaded = tf.saved_model.load(exported)
    weights = [float(loaded.step(tf.constant(value))) for value in OUTCOMES]
    assert weights == [0.5] * 106 + [0.375]
    assert len(printed()) == 1


@pytest.mark.slow
def test_an_exported_step_trains_and_prints_in_a_process_without_the_package(exported):
    code = f"""
import tensorflow as tf
loaded = tf.saved_model.load({exported!r})
print(*[loaded.step(tf.constant(float(value))).numpy() for value in {list(map(str, OUTCOMES))}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.5"] * 106 + ["0.375"]
    assert done.stderr.count("The last 100 steps were all skipped") == 1


def texts_in_the_graph(**scale):
    optimizer, weight = LossScaleOptimizer(tf.keras.optimizers.SGD(), **scale), tf.Variable(0.0)
    function = tf.function(lambda: optimizer.minimize(lambda: weight * 1.0, [weight])).get_concrete_function()
    operations = {node.op for each in function.graph.as_graph_def().library.function for node in each.node_def}
    return {"PrintV2", "StringFormat"} & operations


def test_a_scale_that_cannot_stall_has_nothing_of_it_in_the_graph():
    assert texts_in_the_graph()
    assert not texts_in_the_graph(dynamic=False, initial_scale=8.0)
    assert texts_in_the_graph(loss_scale=FixedLossScaleManager(8.0, True))


@pytest.mark.parametrize("family", FAMILIES[:2], ids=IDS[:2])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "XLA"])
def test_a_fit_that_went_nowhere_says_so_once(family, jit_compile, warnings, printed):
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(family.sgd(), initial_scale=4.0), "mse", jit_compile=jit_compile)
    model.fit(np.full((110, 2), np.nan), np.zeros((110, 1)), batch_size=1, verbose=0)
    (said,) = warnings + printed()
    assert said == warnings[0] if jit_compile else not warnings
    assert ("The last 110 steps" if jit_compile else "The last 100 steps") in said, "XLA: at its end"


def test_it_is_part_of_a_config_unless_it_is_a_function():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), on_stall="raise")
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config["on_stall"] == "raise"
    assert LossScaleOptimizer.from_config(config).get_config()["on_stall"] == "raise"
    for unsaid in ("warn", print):
        assert "on_stall" not in LossScaleOptimizer(tf.keras.optimizers.SGD(), on_stall=unsaid).get_config()


def test_a_function_that_a_config_cannot_contain_is_said(warnings):
    LossScaleOptimizer(tf.keras.optimizers.SGD(), on_stall=print).get_config()
    assert "cannot contain the function `on_stall=print`" in warnings[0]


@pytest.mark.parametrize("value", ["stop", None, 1])
def test_other_values_are_refused_and_leave_the_inner_optimizer_free(value):
    inner = tf.keras.optimizers.SGD()
    with pytest.raises(ValueError, match="`on_stall` must be 'warn', 'raise' or a function"):
        LossScaleOptimizer(inner, on_stall=value)
    LossScaleOptimizer(inner)
