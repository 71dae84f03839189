"""What happens when every step is skipped."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.families import ALL_FAMILIES, FAMILIES, IDS, all_families
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.amp import FixedLossScaleManager


@pytest.fixture
def printed(capfd):
    """What graphs have printed since the last call."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if "steps were all skipped" in line]


modes = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


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


@all_families
def test_in_eager_mode_the_hundredth_skipped_step_warns_once_a_stall_and_says_what_to_try(family, warnings):
    _, take = made(family)
    take(np.inf, 99)
    assert not warnings
    take(np.nan, 6)
    (said,) = warnings
    assert "The last 100 steps were all skipped. The loss scale is 1 now. " in said
    assert "overflow_report()" in said and "min_scale" in said
    take(1.0)
    take(np.inf, 100)
    assert len(warnings) == 2


@modes
@pytest.mark.parametrize(("rule", "scale"), [({"min_scale": 2.0**-120}, "e-30"), ({"hysteresis": 1000}, "4")])
def test_a_hundred_skipped_steps_in_a_row_are_a_stall_wherever_the_scale_stands(
    compiled, rule, scale, warnings, printed
):
    _, take = made(compiled=compiled, **rule)
    take(np.inf, 99)
    assert not warnings + printed()
    take(np.inf, 40)
    (said,) = warnings + printed()
    assert "The last 100 steps were all skipped. The loss scale is " in said
    assert f"{scale} now. " in said


@modes
def test_raise_fails_the_hundredth_step_once_and_counts_it(compiled):
    optimizer, take = made(compiled=compiled, on_stall="raise")
    take(np.inf, 99)
    errors = (FloatingPointError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors[compiled], match=r"The last 100 steps.* The loss scale is 1 now"):
        take(np.inf)
    assert int(optimizer.iterations) == 100
    state = optimizer.state()
    assert (state["total_steps"], state["skipped_steps"], state["skipped_in_a_row"]) == (100, 100, 100)
    take(np.inf)
    assert optimizer.state()["total_steps"] == 101


@modes
def test_a_function_is_called_once_a_stall_sees_the_step_counted_and_may_help(compiled):
    seen = []

    def help_it(optimizer):
        seen.append((optimizer, optimizer.state()["total_steps"]))
        optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0})
        return optimizer  # The wrapper ignores the value.

    optimizer, take = made(compiled=compiled, on_stall=help_it)
    take(np.inf, 100)
    assert float(optimizer.loss_scale) == (32.0 if compiled else 64.0), "a graph lowers the new scale after that"
    for _ in range(2):
        take(np.inf, 100)
    assert seen == [(optimizer, 100)] * 3, "each stall of counts that `set_state` has set to 0"


def test_the_state_of_a_stalled_run_is_warned_of_and_the_next_eager_step_reports_it(warnings):
    stalled = {"loss_scale": 1.0, "dynamic_counter": 0, "skipped_in_a_row": 5, "skipped_steps": 5, "total_steps": 7}
    optimizer, take = made(on_stall="raise", stall_steps=3)
    optimizer.set_state(stalled)
    assert ["The last 5 steps were all skipped" in said for said in warnings] == [True]
    with pytest.raises(FloatingPointError, match="The last 6 steps"):
        take(np.nan)
    take(np.nan), take(1.0)
    optimizer.set_state({**stalled, "skipped_in_a_row": 2})
    assert len(warnings) == 1


@all_families
def test_a_tf_function_prints_it_once_a_stall_and_python_does_not_say_it_again(family, warnings, printed):
    optimizer, take = made(family, compiled=True)
    for _ in range(2):
        take(np.inf, 99)
        assert not printed()
        for _ in range(5):
            take(np.nan)
            float(optimizer.loss_scale)
        (line,) = printed()
        assert line.startswith("WARNING: The last 100 steps were all skipped")
        assert "The loss scale is 1 now. " in line
        assert line.endswith("or lower min_scale.")
        take(1.0)
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


def test_a_function_that_raises_fails_the_step():
    def stop(optimizer):
        raise KeyError("stop here")

    _, take = made(compiled=True, on_stall=stop)
    take(np.inf, 99)
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'stop here'"):
        take(np.inf)


@pytest.mark.parametrize("look", [lambda o: o.loss_scale, lambda o: o.state()], ids=["loss_scale", "state"])
def test_a_loop_that_xla_compiles_is_noticed_when_the_scale_is_read(look, warnings, printed):
    optimizer, take = made(compiled="XLA")
    for end in (lambda: optimizer.set_state({"loss_scale": 1.0, "dynamic_counter": 0}), lambda: take(1.0)):
        warnings.clear()
        take(np.inf, 300)
        repr(optimizer)
        assert not warnings, "nothing in the step leaves the device"
        look(optimizer), look(optimizer)
        (said,) = warnings
        assert "The last 300 steps" in said
        end()
    assert not printed()


@modes
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
        optimizer = LossScaleOptimizer(ALL_FAMILIES[3].sgd(), initial_scale=1.0, on_stall=on_stall)
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
    trained, path = tf.Module(), str(tmp_path_factory.mktemp("exported"))
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
def test_a_fit_that_xla_compiles_and_that_went_nowhere_says_so_once_at_its_end(family, warnings, printed):
    model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(family.sgd(), initial_scale=4.0), "mse", jit_compile=True)
    model.fit(np.full((110, 2), np.nan), np.zeros((110, 1)), batch_size=1, verbose=0)
    (said,) = warnings + printed()
    assert "The last 110 steps" in said


def test_a_function_is_no_part_of_a_config_which_is_said(warnings):
    for value in ("warn", print):
        assert "on_stall" not in LossScaleOptimizer(tf.keras.optimizers.SGD(), on_stall=value).get_config()
    (said,) = warnings
    assert "cannot contain the function `on_stall=print`" in said
